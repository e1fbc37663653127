"""The page in a real browser, with real jobs."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.required import skip_or_fail
from tests.launch.jobs import kill_marked, marked, with_mark

sync_api = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = [pytest.mark.mpi, pytest.mark.more, pytest.mark.timeout(300)]

# Two ranks that synchronize with files, and report while they wait.
_PROGRAM = """
import os, sys, time
from pathlib import Path
from hvdtrain.monitor import report
rank, steps = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(sys.argv[1])
here = Path(sys.argv[2])
here.mkdir(exist_ok=True)
waits = False
report.watch(lambda: "allreduce(gradients)" if waits else "", lambda: 0.0)
report.planned(steps)
report.phase("training")
print("<script>document.title = 'pwned'</script> $(id)", sys.argv[3:], flush=True)
for step in range(1, steps + 1):
    time.sleep(0.05)
    (here / f"{rank}-{step}").touch()
    waits = True
    while not (here / f"{1 - rank}-{step}").exists():
        time.sleep(0.01)
    waits = False
    report.step(step, step // 20)
    if rank == 0:
        report.learned(64.0 * step, 2 / step)
        print("step", step, flush=True)
"""
# Samples per second from rows; the count is missing in the first one.
_RATE = """
async () => {
  const { Series } = await import("/static/series.js");
  const rows = { time: [0, 5, 10], step: [57, 64, 70], samples: [null, 3700, 4200] };
  return new Series(rows).rows.map((row) => row.rate);
}
"""


class Site:
    """A server with a folder of jobs, and a browser that is logged in.

    Attributes:
        page: The browser's tab.
        errors: Errors in the browser.
    """

    def __init__(self, folder: Path, page) -> None:
        self.folder = folder
        self.page = page
        self.mark = uuid.uuid4().hex
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on(
            "console",
            lambda entry: self.errors.append(entry.text) if entry.type == "error" else None,
        )
        self.server = self._serve()

    def _serve(self) -> subprocess.Popen[bytes]:
        # The user's browser is a script that records the URL.
        opened = self.folder / "opened.txt"
        program = self.folder / "browser"
        program.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
        program.chmod(0o700)
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "hvdtrain", "serve", "--port", "0", "--open"),
                *("--jobs-dir", str(self.folder / "jobs")),
            ],
            env={**with_mark(self.mark), "BROWSER": str(program)},
            cwd=self.folder,
            stderr=subprocess.PIPE,
        )
        assert server.stderr is not None
        self.url = server.stderr.readline().decode().split()[-1].rstrip("/")
        server.stderr.readline()
        # The link redirects at once, which would interrupt waiting for the whole page.
        self.page.goto(opened.read_text(), wait_until="commit")
        self.page.wait_for_url(f"{self.url}/", timeout=60e3)
        return server

    def kill(self) -> None:
        """Kill the server."""
        self.server.kill()
        self.server.communicate(timeout=20)

    def open(self, path: str) -> None:
        """Show a view."""
        self.page.goto(f"{self.url}/{path}")

    def open_job(self, name: str) -> None:
        """Show a job. The previous view stays until the job's data has arrived."""
        self.open(f"#/jobs/{name}")
        self.page.get_by_role("heading", level=1, name=name, exact=True).wait_for(timeout=60e3)

    def see(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait for a text on the page."""
        self.page.get_by_text(text, exact=False).first.wait_for(timeout=timeout_s * 1e3)

    def state(self, state: str) -> None:
        """Wait until the job on the page has a state."""
        try:
            self.page.locator(".title .state", has_text=state).wait_for(timeout=150e3)
        except sync_api.TimeoutError:
            raise AssertionError(f"not {state}:\n{self._shown()}") from None

    def _shown(self) -> str:
        """Return the text of the page and the files of all jobs."""
        known = [
            f"{path}\n{path.read_text(errors='replace')[-4000:]}"
            for pattern in ("state.json", "events.jsonl", "launcher.txt", "log/*")
            for path in sorted(self.folder.glob(f"jobs/*/{pattern}"))
        ]
        return "\n".join([self.page.url, self.page.locator("body").inner_text(), *known])

    def check(self) -> None:
        """Check the accessibility of the current view."""
        results = axe.Axe().run(self.page)
        assert results.violations_count == 0, results.generate_report()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    chromium = shutil.which("chromium")
    if chromium is None:
        skip_or_fail("browser", "chromium is not on PATH")
    (tmp_path / "train.py").write_text(_PROGRAM)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        site = Site(tmp_path, browser.new_page(viewport={"width": 1280, "height": 900}))
        try:
            yield site
        finally:
            browser.close()
            site.kill()
            kill_marked(site.mark)


def _rank(mark: str, rank: int) -> int:
    """Return the process ID of a rank."""
    wanted = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for pid in marked(mark):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ours = words[1:2] == [b"train.py"]
        if ours and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    raise AssertionError(f"no rank {rank}")


def test_rates_need_sample_counts(site: Site) -> None:
    assert site.page.evaluate(_RATE) == [None, None, 100]


def test_a_job_is_submitted_followed_stopped_cloned_restarted_and_compared(site: Site) -> None:
    page = site.page
    site.open("#/submit")
    page.get_by_label("Program", exact=True).wait_for(timeout=60e3)
    site.check()
    special = "'$(touch pwned)' '<b>bold</b>'"
    page.get_by_label("Program", exact=True).fill(f"{sys.executable} train.py 2000 first {special}")
    page.get_by_label("Ranks", exact=True).fill("2")
    page.get_by_label("GPUs", exact=True).select_option("none")
    site.see("CUDA_VISIBLE_DEVICES=")
    assert page.get_by_role("button", name="Start").is_disabled(), "the plan must be shown first"
    page.get_by_role("button", name="Show the plan").click()
    site.see("local rank")
    page.get_by_role("button", name="Start").click()

    site.state("running")
    site.see("step 30")
    assert "pwned" not in page.title()
    site.see("<script>document.title = 'pwned'</script> $(id)")
    site.check()
    # The page shows which rank the other one waits for.
    stopped = _rank(site.mark, 1)
    os.kill(stopped, signal.SIGSTOP)
    site.see("No progress: the other ranks wait for rank 1")
    os.kill(stopped, signal.SIGCONT)
    page.locator(".slow").wait_for(state="hidden", timeout=60e3)

    # The job outlives the server.
    site.kill()
    first = page.locator("h1").inner_text()
    site.server = site._serve()
    site.open_job(first)
    site.state("running")
    page.locator(".tiles > div", has_text=re.compile(r"Remaining\s*\d")).wait_for(timeout=60e3)
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Stop", exact=True).click()
    site.state("stopped")

    page.get_by_role("button", name="Clone").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Program").fill(f"{sys.executable} train.py 40 second")
    dialog.get_by_role("button", name="Start the clone").click()
    page.locator("h1", has_not_text=first).wait_for(timeout=60e3)
    site.state("done")
    second = page.locator("h1").inner_text()
    site.see("40 steps in ")
    site.see("localhost: ranks 0 to 1")
    versions = page.locator("section", has_text="Environment")
    assert platform.python_version() in versions.inner_text()

    site.see(f"tensorboard --logdir {site.folder}")
    site.check()

    site.open_job(first)
    page.get_by_role("button", name="Restart").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Program").fill(f"{sys.executable} train.py 30 third")
    dialog.get_by_role("button", name="Restart").click()
    site.state("done")

    site.open(f"#/compare?jobs={first},{second}")
    page.locator("canvas").first.wait_for(timeout=60e3)
    page.locator("td", has_text="train.py 40 second").wait_for(timeout=60e3)
    site.check()
    site.open("#/")
    page.locator("tbody tr").nth(1).wait_for(timeout=60e3)
    page.locator(".sparkline").first.wait_for(timeout=60e3)
    for name in (first, second):
        page.get_by_label(f"Select {name}").check()
    site.check()
    page.get_by_role("button", name="Clone").click()
    page.get_by_role("dialog").get_by_role("button", name="Start the clones").click()
    site.see("2 jobs submitted")
    page.locator("tbody tr").nth(3).wait_for(timeout=60e3)
    assert not (site.folder / "pwned").exists()
    assert [error for error in site.errors if "ERR_" not in error] == []
