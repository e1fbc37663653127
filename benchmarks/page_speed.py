"""Measure the page of hvdtrain serve with many jobs, long logs and many ranks.

    python benchmarks/page_speed.py
    python benchmarks/page_speed.py --jobs 1000 --log-mb 10

The program creates a folder of jobs, one of them with a large log, many ranks and many metrics,
sends the requests of the page's scripts, and opens the page in Chromium if playwright is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.log import LogLine, LogWriter
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

REPEATS = 9
_LARGE = "large-20260101-000000"
# Runs in the page: records when the first expected element appears.
_WATCH = """new MutationObserver((_, watcher) => {
  if (!document.querySelector(%s)) return;
  window.shownAt = performance.now();
  watcher.disconnect();
}).observe(document, { childList: true, subtree: true });"""


def _write_job(
    folder: Path, name: str, created_s: float, rng: random.Random, **state: Any
) -> JobFolder:
    """Write a job as hvdtrain does, without syncing the disk."""
    job = JobFolder(folder / name)
    job.path.mkdir()
    program = ("python", "train.py", "--learning-rate", f"{rng.random():.3g}")
    spec = JobSpec(options=("-np", "8"), program=program, folder="/", created_s=created_s)
    (job.path / "spec.json").write_text(json.dumps(spec.to_json()))
    job_state = JobState(**{"phase": "ended", "attempt": 1, "since_s": created_s + 600, **state})
    (job.path / "state.json").write_text(json.dumps(job_state.to_json()))
    return job


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def _metrics(steps: int, begin_s: float, rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "time": begin_s + step,
            "step": step,
            "epoch": step // 100,
            "own_s": 0.1 + rng.random() / 100,
            "samples": step * 256,
            "loss": 2 * math.exp(-step * 4 / steps) + rng.random() / 20,
        }
        for step in range(1, steps + 1)
    ]


def make_jobs(folder: Path, jobs: int, ranks: int, log_mb: int) -> None:
    """Fill a folder with jobs."""
    rng = random.Random(0)
    now_s = time.time()
    hosts = {f"node{number:04}": 8 for number in range(-(-ranks // 8))}
    for number in range(jobs):
        code = rng.choice([0, 0, 0, 1])
        cause = "exception" if code else "done"
        begin_s = now_s - (jobs - number) * 300
        state = {"ranks": 8, "hosts": {"a": 4, "b": 4}, "step": 120, "epoch": 1, "code": code}
        name = f"train-{number:06}"
        job = _write_job(folder, name, begin_s, rng, cause=cause, **state)
        _write_lines(job.metrics, _metrics(120, begin_s, rng))
        _write_lines(job.events, [{"time": begin_s, "kind": "summary", "kept": 0.9}])
    state = {"ranks": ranks, "hosts": hosts, "code": 0, "cause": "done", "step": 80_000}
    large = _write_job(folder, _LARGE, now_s - 90_000, rng, **state)
    _write_lines(large.metrics, _metrics(80_000, now_s - 90_000, rng))
    saved = [{"time": now_s, "kind": "checkpoint", "step": step} for step in range(0, 80_000, 100)]
    _write_lines(large.events, saved)
    row = {"step": [80_000] * ranks, "phase": ["training"] * ranks, "waited_s": [12.5] * ranks}
    with large.ranks.open("w") as file:
        for number in range(900):
            own_s = [round(0.1 + rng.random() / 100, 4) for _ in range(ranks)]
            usage = {"rss_mb": [1234] * ranks, "cpu": [0.97] * ranks}
            record = {"time": now_s - 90_000 + number * 100, **row, "own_s": own_s, **usage}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")
    writer = LogWriter(large.log)
    text = "step 1234: loss = 0.1234, accuracy = 0.9876 (1,234 samples/s) " * 3
    for begin in range(0, log_mb * 5000, 1000):
        writer.append(
            [
                LogLine(time_s=now_s, rank=n % ranks, stream="stdout", text=f"{n} {text}")
                for n in range(begin, begin + 1000)
            ]
        )
    writer.close()


class Server:
    """A running hvdtrain serve."""

    def __init__(self, folder: Path) -> None:
        start_s = time.perf_counter()
        argv = [sys.executable, "-m", "hvdtrain", "serve", "--port", "0", "--jobs-dir", str(folder)]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.url = self.process.stderr.readline().split()[-1].rstrip("/")
        self.token = (folder / ".serve-token").read_text().strip()
        self.get("/api/jobs")
        self.start_s = time.perf_counter() - start_s

    def get(self, path: str) -> Any:
        """Return the response to an authorized request."""
        headers = {"authorization": f"Bearer {self.token}"}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, headers=headers)
        ) as response:
            body = response.read()
        return json.loads(body) if response.headers["content-type"] == "application/json" else body

    def close(self) -> None:
        """Stop the server."""
        self.process.terminate()
        self.process.wait(timeout=20)


def _times_ms(act: Callable[..., object], *arguments: object) -> list[float]:
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        act(*arguments)
        times.append((time.perf_counter() - start_s) * 1e3)
    return times


def requests_of(server: Server) -> dict[str, list[float]]:
    """Return the milliseconds of each request."""
    job = f"/api/jobs/{_LARGE}"
    paths = {
        "the list": "/api/jobs?count=50",
        "the list, the next 100": "/api/jobs?begin=5000&count=100",
        "the list, a search": "/api/jobs?q=0.123&count=50",
        "metrics for Prometheus": "/metrics",
        "the large job": job,
        "its curves": f"{job}/metrics?count=1000",
        "its ranks": f"{job}/ranks?count=240",
        "the end of its log": f"{job}/log?count=400",
        "its log, one rank": f"{job}/log?count=400&ranks=3",
        "its log, a search": f"{job}/log?count=400&grep=no+such+text",
    }
    return {name: _times_ms(server.get, path) for name, path in paths.items()}


def _shown_ms(page: Any, address: str) -> list[float]:
    """Return the milliseconds from navigation until the expected element is shown."""
    times = []
    for _ in range(REPEATS):
        page.goto("about:blank")
        page.goto(address, wait_until="commit")
        while not (shown_ms := page.evaluate("window.shownAt")):
            page.wait_for_timeout(20)
        times.append(float(shown_ms))
    return times


def views_of(server: Server) -> dict[str, list[float]]:
    """Return the milliseconds until a browser shows each view."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("views skipped: install playwright and Chromium")
        return {}
    views = {
        # The empty page, for comparison.
        "view: the login": ("login", "#token"),
        "view: the list": ("#/", "tbody tr"),
        "view: the large job": (f"#/jobs/{_LARGE}", ".log .line"),
        "view: two jobs compared": ("#/compare?jobs=train-000001,train-000002", "canvas"),
    }
    times = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (address, sign) in views.items():
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            context.add_init_script(_WATCH % json.dumps(sign))
            page = context.new_page()
            page.request.post(f"{server.url}/login", form={"token": server.token})
            page.goto(f"{server.url}/")
            times[name] = _shown_ms(page, f"{server.url}/{address}")
            context.close()
        browser.close()
    return times


def main() -> None:
    """Create jobs, measure, and print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000, help="default %(default)s")
    parser.add_argument("--ranks", type=int, default=1_000, help="default %(default)s")
    parser.add_argument("--log-mb", type=int, default=100, help="default %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_jobs(Path(folder), arguments.jobs, arguments.ranks, arguments.log_mb)
        server = Server(Path(folder))
        try:
            print(f"{server.start_s:.2f} s until the first response")
            start_s = time.perf_counter()
            while server.get("/api/jobs?count=1")["found"] < arguments.jobs:
                time.sleep(0.1)
            print(f"{time.perf_counter() - start_s:.2f} s more until all jobs are listed")
            times = requests_of(server) | views_of(server)
        finally:
            server.close()
    for name, values in times.items():
        print(f"{name:<30} {statistics.median(values):6.0f} ms, at most {max(values):6.0f} ms")


if __name__ == "__main__":
    main()
