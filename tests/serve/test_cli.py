from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity
from tests.serve.server import Server


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    """Create a running job, whose launcher is this process."""
    job = create_job(tmp_path, JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0))
    job.write_state(JobState(phase="running", launcher=own_identity(), step=1))
    return job


@pytest.mark.slow
def test_the_server_may_be_killed_at_any_time(tmp_path: Path, job: JobFolder) -> None:
    server = Server(tmp_path)
    try:
        with server.get("/api/live") as jobs, server.get(f"/api/jobs/{job.name}/live") as live:
            assert jobs.readline() == b"event: jobs\n"
            assert live.readline() == b"event: job\n"
            first = json.loads(live.readline().removeprefix(b"data: "))
            assert (first["view"]["status"], first["view"]["step"]) == ("running", 1)
            job.write_state(JobState(phase="running", launcher=own_identity(), step=2))
            lines = [live.readline() for _ in range(3)]
            assert json.loads(lines[2].removeprefix(b"data: "))["view"]["step"] == 2
    finally:
        server.kill()
    again = Server(tmp_path, "--rank-metrics")
    with again.get("/api/jobs") as response:
        assert [row["name"] for row in json.load(response)["jobs"]] == [job.name]
    append_json_line(job.ranks, {"step": [7]})
    with again.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=")
        series = f'hvdtrain_rank_step{{hvdtrain_job="{job.name}",rank="0"}} 7.0'
        assert series in response.read().decode()
    # The server ends while a client listens.
    with again.get("/api/live") as live:
        live.readline()
        again.process.send_signal(signal.SIGTERM)
        error = again.process.communicate(timeout=20)[1]
    assert (again.process.returncode, "Traceback" in error) == (-signal.SIGTERM, False), error


@pytest.mark.slow
def test_open_uses_one_time_links_in_a_private_file(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened.txt"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$*" > {opened}\n')
    browser.chmod(0o700)
    server = Server(tmp_path / "jobs", "--open", environ={"BROWSER": str(browser)})
    try:
        assert server.process.stderr is not None
        printed = server.process.stderr.readline()
        url = opened.read_text()
        assert url.startswith("file:///")
        assert not [text for text in (server.token, "code=") if text in url]
        file = Path(url.removeprefix("file://"))
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        links = [
            match[1]
            for text in (file.read_text(), printed)
            if (match := re.search(r"(http://localhost:\d+/login\?code=[\w-]+)", text))
        ]
        assert len({*links}) == 2
        assert server.token not in "".join([file.read_text(), printed])
        for link in links:
            with urllib.request.urlopen(link, timeout=20) as response:
                assert "hvdtrain_session" in response.headers["set-cookie"]
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(link, timeout=20)
        server.process.send_signal(signal.SIGINT)
        server.process.communicate(timeout=20)
        assert not file.parent.exists()
    finally:
        server.kill()


def test_listening_on_other_addresses_needs_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["serve", "--jobs-dir", str(tmp_path), "--host", "0.0.0.0"]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert "over the network unencrypted" in error
    assert "ssh -L" in error


def test_a_port_in_use_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--jobs-dir", str(tmp_path), "--port", port]) == 2
    assert "Choose another --port" in capsys.readouterr().err


def test_missing_packages_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", "--jobs-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "needs starlette, uvicorn, prometheus_client" in error
    assert "hvdtrain[serve]" in error
    assert os.listdir(tmp_path) == []
