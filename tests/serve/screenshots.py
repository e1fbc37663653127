"""Saves the images of the README: ``python -m tests.serve.screenshots docs/images``.

The script runs real jobs of examples/mnist.py for several minutes, and saves three views in
Chromium: the list of jobs, a running job, and a comparison. With Pillow, images have a palette,
which reduces their size to a third.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.harness.jobs import REPOSITORY, clean_environment
from tests.serve.server import Server

WIDTH = 1280
COLOURS = 128
# Long enough for curves and several columns of the heat map.
STEPS = 100
JOB_TIMEOUT_S = 1800.0
_ENDED = (
    ["--epochs", "3", "--run-dir", "runs/slow", "--learning-rate", "0.0005"],
    ["--epochs", "3", "--run-dir", "runs/fast", "--learning-rate", "0.002"],
    ["--epochs", "3", "--data-dir", "digits/that/are/not/there"],
)
_RUNS = ["--epochs", "200", "--run-dir", "runs/long", "--checkpoint-dir", "runs/long/saved"]


class Jobs:
    """Starts jobs in a separate folder."""

    def __init__(self, scratch: Path) -> None:
        self.folder = scratch / "jobs"
        self._here = scratch / "digits"
        self._here.mkdir()
        (self._here / "examples").symlink_to(REPOSITORY / "examples")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environ = {
            **clean_environment(),
            "HVDTRAIN_JOBS_DIR": str(self.folder),
            "PATH": path,
            "PYTHONPATH": str(REPOSITORY),
        }

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a job of two ranks."""
        argv = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--"]
        return subprocess.Popen(
            [*argv, "python", "examples/mnist.py", *arguments],
            env=self._environ,
            cwd=self._here,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def _save(page: Any, path: Path, height: int) -> None:
    page.set_viewport_size({"width": WIDTH, "height": height})
    # Charts are redrawn.
    page.wait_for_timeout(1000)
    page.screenshot(path=path)
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def show(folder: Path, server: Server, browser: Any) -> None:
    """Save the three images while one job runs."""
    page = browser.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
    page.request.post(f"{server.url}/login", form={"token": server.token})
    page.goto(f"{server.url}/")
    rows = page.locator("tbody tr")
    rows.nth(len(_ENDED)).wait_for()
    names = [rows.nth(at).locator("a").inner_text() for at in range(len(_ENDED) + 1)]
    page.goto(f"{server.url}/#/jobs/{names[0]}")
    page.get_by_text(f"step {STEPS}", exact=False).first.wait_for(timeout=600e3)
    _save(page, folder / "page-job.png", 1180)
    page.goto(f"{server.url}/#/")
    rows.first.wait_for()
    _save(page, folder / "page-jobs.png", 440)
    page.goto(f"{server.url}/#/compare?jobs={names[3]},{names[2]}")
    page.locator("canvas").first.wait_for()
    page.get_by_role("table", name="Settings of each job").wait_for()
    _save(page, folder / "page-compare.png", 845)


def main() -> None:
    """Run the jobs and save the images."""
    from playwright.sync_api import sync_playwright

    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tests.serve.screenshots FOLDER")
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        jobs = Jobs(Path(scratch))
        started = []
        for arguments in (*_ENDED, _RUNS):
            started.append(jobs.start(arguments))
            # The list is sorted by start time.
            time.sleep(2.0)
        *ending, running = started
        for job in ending:
            job.wait(timeout=JOB_TIMEOUT_S)
        server = Server(jobs.folder)
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                show(folder, server, browser)
                browser.close()
        finally:
            server.kill()
            running.terminate()
            running.wait(timeout=60)


if __name__ == "__main__":
    main()
