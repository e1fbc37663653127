"""Measure the page of hvdtrain serve with many jobs, long logs and many ranks.

    python benchmarks/page_speed.py
    python benchmarks/page_speed.py --jobs 1000 --log-mb 10

The program creates a folder of jobs, one of them with a large log, many ranks and many metrics,
and sends the requests of the page's scripts.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import make_parser

from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.log import LogLine, LogWriter
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

REPEATS = 9
TIMEOUT_S = 60.0
_LARGE = "large-20260101-000000"
_JOB = f"/api/jobs/{_LARGE}"
REQUESTS = {
    "the list": "/api/jobs?count=50",
    "the list, the next 100": "/api/jobs?begin=5000&count=100",
    "the list, a search": "/api/jobs?q=0.123&count=50",
    "metrics for Prometheus": "/metrics",
    "the large job": _JOB,
    "its curves": f"{_JOB}/metrics?count=1000",
    "its ranks": f"{_JOB}/ranks?count=240",
    "the end of its log": f"{_JOB}/log?count=400",
    "its log, one rank": f"{_JOB}/log?count=400&ranks=3",
    "its log, a search": f"{_JOB}/log?count=400&grep=no+such+text",
}


def _write_job(
    folder: Path, name: str, created_s: float, rng: random.Random, **state: Any
) -> JobFolder:
    """Write a job as hvdtrain does, without syncing the disk."""
    job = JobFolder(folder / name)
    job.path.mkdir()
    program = ("python", "train.py", "--learning-rate", f"{rng.random():.3g}")
    spec = JobSpec(options=("-np", "8"), program=program, folder="/", created_s=created_s)
    (job.path / "spec.json").write_text(json.dumps(asdict(spec)))
    job_state = JobState(**{"phase": "ended", "attempt": 1, "since_s": created_s + 600, **state})
    (job.path / "state.json").write_text(json.dumps(asdict(job_state)))
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
        self._url = self.process.stderr.readline().split()[-1].rstrip("/")
        self._token = (folder / ".serve-token").read_text().strip()
        self.get("/api/jobs")
        self.start_s = time.perf_counter() - start_s

    def get(self, path: str) -> bytes:
        """Return the response to an authorized request."""
        headers = {"authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(self._url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return bytes(response.read())

    def time_ms(self, path: str) -> list[float]:
        """Return the milliseconds of several requests."""
        times = []
        for _ in range(REPEATS):
            start_s = time.perf_counter()
            self.get(path)
            times.append((time.perf_counter() - start_s) * 1e3)
        return times


def main() -> None:
    parser = make_parser(__doc__)
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
            while json.loads(server.get("/api/jobs?count=1"))["found"] < arguments.jobs:
                time.sleep(0.1)
            print(f"{time.perf_counter() - start_s:.2f} s more until all jobs are listed")
            times = {name: server.time_ms(path) for name, path in REQUESTS.items()}
        finally:
            server.process.terminate()
            server.process.wait(timeout=20)
    for name, values in times.items():
        print(f"{name:<30} {statistics.median(values):6.0f} ms, at most {max(values):6.0f} ms")


if __name__ == "__main__":
    main()
