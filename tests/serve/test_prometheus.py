"""A real Prometheus reads what a real job comes to."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.required import do_without
from tests.launch.jobs import HVDTRAIN, kill_marked, program, with_mark
from tests.serve.server import Server

pytestmark = [pytest.mark.mpi, pytest.mark.more, pytest.mark.timeout(300)]

_STEPS = """
from hvdtrain.monitor import report
for step in range(1, 10000):
    report.step(step, 0)
    time.sleep(0.05)
"""
_CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: hvdtrain
    authorization: {{credentials_file: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


@contextlib.contextmanager
def _prometheus(folder: Path, target: str, token: Path) -> Iterator[str]:
    """Where a Prometheus answers that asks one server."""
    binary = shutil.which("prometheus")
    if binary is None:
        do_without("prometheus", "there is no prometheus on PATH")
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(token=token, target=target))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [
        *(binary, f"--config.file={config}", f"--storage.tsdb.path={folder / 'series'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=20)


def _until_seen(prometheus: str, query: str) -> list[dict[str, str]]:
    """The labels of what is found, as soon as there is something."""
    deadline = time.monotonic() + 60
    asked = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    while True:
        # It answers nobody before it has begun.
        with (
            contextlib.suppress(urllib.error.URLError),
            urllib.request.urlopen(asked, timeout=20) as answer,
        ):
            if found := json.load(answer)["data"]["result"]:
                return [one["metric"] for one in found]
        assert time.monotonic() < deadline, query
        time.sleep(0.2)


def test_prometheus_reads_a_real_job_by_the_token(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    jobs = tmp_path / "jobs"
    server = Server(jobs, "--rank-metrics")
    job = subprocess.Popen(
        [*HVDTRAIN, "-np", "1", "--", *program(_STEPS)],
        env={**with_mark(mark), "HVDTRAIN_JOBS_DIR": str(jobs)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        target = server.url.removeprefix("http://")
        with _prometheus(tmp_path, target, jobs / ".serve-token") as prometheus:
            [labels] = _until_seen(prometheus, "hvdtrain_job_step > 0")
            assert labels["hvdtrain_job"].startswith("python-")
            [labels] = _until_seen(prometheus, "hvdtrain_rank_step > 0")
            assert labels["rank"] == "0"
            _until_seen(prometheus, 'hvdtrain_jobs{state="running"} == 1')
    finally:
        kill_marked(mark)
        job.wait(timeout=20)
        server.kill()
