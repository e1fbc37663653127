"""What the page asks for, and what it gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.log import LogLine, LogWriter
from hvdtrain.jobs.process_identity import own_identity
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState
from hvdtrain.serve.app import make_app
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.security import Keys, allowed_hosts

TOKEN = "a-token-of-the-tests"
Open = Callable[..., TestClient]


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    spec = JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0)
    job = create_job(tmp_path / "jobs", spec)
    job.write_state(JobState(phase="running", launcher=own_identity()))
    writer = LogWriter(job.log)
    writer.append(
        [LogLine(time_s=1.5, rank=n % 2, stream="stdout", text=f"line {n}") for n in range(100)]
    )
    writer.close()
    return job


@pytest.fixture
def open_page(job: JobFolder) -> Iterator[Open]:
    clients = []

    def open_page(**options: Any) -> TestClient:
        index = JobIndex(job.path.parent)
        hosts = allowed_hosts("127.0.0.1", 8264)
        app = make_app(index, Keys(TOKEN), hosts=hosts, environ={}, **options)
        client = TestClient(app, base_url="http://localhost:8264")
        client.headers["authorization"] = f"Bearer {TOKEN}"
        clients.append(client.__enter__())
        return clients[-1]

    yield open_page
    for client in clients:
        client.__exit__(None, None, None)


def test_who_may_only_look_stops_nothing(open_page: Open, job: JobFolder, monkeypatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "hvdtrain.serve.job_api.stop_job", lambda job, view, save: told.append(job.name)
    )
    client = open_page(read_only=True)
    assert client.get("/api/session").json()["read_only"]
    refused = client.post(f"/api/jobs/{job.name}/stop", json={})
    assert (refused.status_code, told) == (403, [])
    assert "--read-only" in refused.json()["error"]
    client = open_page()
    assert not client.get("/api/session").json()["read_only"]
    assert client.post(f"/api/jobs/{job.name}/stop", json={}).status_code == 200
    assert told == [job.name]


def test_a_log_is_read_from_its_end_on_and_followed(open_page: Open, job: JobFolder) -> None:
    client = open_page()

    def ask(**query: Any) -> tuple[list[str], dict[str, Any]]:
        found = client.get(f"/api/jobs/{job.name}/log", params={"count": 10, **query}).json()
        return [line[5].removeprefix("line ") for line in found["lines"]], found

    texts, last = ask()
    assert texts == [str(n) for n in range(90, 100)]
    texts, earlier = ask(before=last["begin"], ranks="1")
    assert texts == [str(n) for n in range(71, 90, 2)]
    assert ask(before=earlier["begin"], grep="line 8")[0] == ["8"]
    assert ask(begin=last["next"])[1] == {"lines": [], "next": last["next"], "complete": True}
    assert ask(grep="no such text")[1] == {"lines": [], "begin": 0, "next": last["next"]}


def test_a_list_tells_the_newest_numbers_of_each_job(open_page: Open, job: JobFolder) -> None:
    job.metrics.write_text('{"time": 1.0, "loss": 0.5}\n')
    [row] = open_page().get("/api/jobs").json()["jobs"]
    assert row["metrics"]["loss"] == 0.5
    assert not row["is_over"]


def test_of_many_ranks_fewer_rows_are_told(open_page: Open, job: JobFolder, monkeypatch) -> None:
    client = open_page()
    path = f"/api/jobs/{job.name}/ranks"
    assert client.get(path).json() == {"rows": [], "now": {}}
    with job.ranks.open("w") as file:
        for number in range(100):
            row = {"time": float(number), "step": [number] * 4, "own_s": [0.1, 0.2, None, 0.4]}
            file.write(json.dumps(row) + "\n")
    told = client.get(path, params={"count": 50}).json()
    assert told["now"] == row
    assert told["rows"][0] == {"time": 0.0, "own_s": [0.1, 0.2, None, 0.4]}
    assert 40 <= len(told["rows"]) <= 52
    monkeypatch.setattr("hvdtrain.serve.job_api.MOST_RANK_CELLS", 40)
    assert 5 <= len(client.get(path, params={"count": 50}).json()["rows"]) <= 12
