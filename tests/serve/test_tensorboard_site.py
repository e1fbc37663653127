"""Who comes to a TensorBoard, and what goes through; the TensorBoard itself is another test's."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.serve import tensorboard_api, tensorboard_site
from hvdtrain.serve.app import make_app
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.security import COOKIE, CSRF_HEADER, Keys, allowed_hosts
from hvdtrain.serve.tensorboards import TensorBoards

TOKEN = "a-token-of-the-tests"
PAGE = "http://localhost:8264"
SITE = "http://tensorboard.localhost:8264"


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    (tmp_path / "here" / "logs").mkdir(parents=True)
    here = str(tmp_path / "here")
    spec = JobSpec(options=(), program=("a.py",), folder=here, created_s=1.0)
    return create_job(tmp_path / "jobs", spec)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[httpx2.Request]:
    """What TensorBoards were asked; instead of them the test answers."""
    seen: list[Any] = []

    async def content() -> AsyncIterator[bytes]:
        yield b"a "
        yield b"board"

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        headers = {"content-security-policy": "script-src 'self'", "set-cookie": "a=b"}
        return httpx2.Response(200, headers=headers, content=content())

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    started: dict[str, Path] = {}

    async def start(self: TensorBoards, name: str, logdir: Path) -> None:
        started[name] = logdir

    monkeypatch.setattr(TensorBoards, "start", start)
    monkeypatch.setattr(
        TensorBoards, "client", lambda self, name: client if name in started else None
    )
    seen.append(started)
    return seen


@pytest.fixture
def page(job: JobFolder, tmp_path: Path) -> Iterator[TestClient]:
    app = make_app(
        JobIndex(job.path.parent),
        Keys(TOKEN),
        hosts=allowed_hosts("127.0.0.1", 8264),
        environ={},
        tensorboard_host="tensorboard.localhost:8264",
    )
    with TestClient(app, base_url=PAGE, follow_redirects=False) as client:
        client.post("/login", data={"token": TOKEN})
        client.headers[CSRF_HEADER] = client.get("/api/session").json()["csrf"]
        yield client


def _link(page: TestClient, job: JobFolder, folder: str = "logs") -> str:
    answer = page.post(f"/api/jobs/{job.name}/tensorboard", json={"folder": folder})
    assert answer.status_code == 200, answer.text
    return answer.json()["url"]


def test_a_link_lets_in_once_and_with_it_what_it_shows(
    page: TestClient, job: JobFolder, asked: list[Any]
) -> None:
    board = f"{SITE}/jobs/{job.name}/tensorboard/"
    assert page.get(board).status_code == 401, "the page's cookie is none here"
    link = _link(page, job)
    assert asked[0] == {job.name: Path(job.spec().folder, "logs")}
    entered = page.get(link)
    assert (entered.status_code, SITE + entered.headers["location"]) == (303, board)
    cookie = entered.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=lax"))
    assert "Domain" not in cookie
    again = page.get(link)
    assert (again.status_code, "set-cookie" in again.headers) == (403, False)

    answer = page.get(f"{board}data?a=%2F", headers={"authorization": "Bearer x", "x-more": "1"})
    assert (answer.status_code, answer.text) == (200, "a board")
    [request] = asked[1:]
    assert request.url.raw_path == f"/jobs/{job.name}/tensorboard/data?a=%2F".encode()
    assert request.headers["x-more"] == "1"
    assert not {"cookie", "authorization", "origin"} & set(request.headers)
    policies = answer.headers.get_list("content-security-policy")
    assert policies[0] == "script-src 'self'", "what TensorBoard forbids stays forbidden"
    assert policies[1].startswith("default-src 'self' data: blob:; script-src 'self' ")
    assert "set-cookie" not in answer.headers
    assert page.post(board, content=b"x" * 10, headers={"origin": SITE}).status_code == 200
    assert asked[-1].content == b"x" * 10
    assert page.post(board, content=b"x" * (9 << 20)).status_code == 413
    assert page.get(f"{SITE}/jobs/other/tensorboard/").status_code == 404
    assert page.get(f"{SITE}/api/session").status_code == 404, "the page is not here"


def test_neither_side_asks_the_other(page: TestClient, job: JobFolder, asked: list[Any]) -> None:
    page.get(_link(page, job))
    board = f"{SITE}/jobs/{job.name}/tensorboard/"
    for origin in (PAGE, "null", "http://evil.example"):
        assert page.get(board, headers={"origin": origin}).status_code == 403
    # A script there: whatever the browser sends along, the page refuses it.
    for path in ("/api/session", "/api/jobs"):
        assert page.get(PAGE + path, headers={"origin": SITE}).status_code == 403
    assert page.post(f"{PAGE}/api/jobs", json={}, headers={"origin": SITE}).status_code == 403
    assert page.put(board).status_code == 405
    # What opens the one door does not open the other.
    keys = Keys(TOKEN)
    for name, cookie, url in (
        (tensorboard_site.COOKIE, keys.session(0), board),
        (COOKIE, keys.sealed("tensorboard", 1e10), f"{PAGE}/api/jobs"),
    ):
        page.cookies.clear()
        page.cookies.set(name, cookie)
        assert page.get(url).status_code == 401


def test_links_end(
    page: TestClient, job: JobFolder, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = _link(page, job)
    now = time.monotonic()
    monkeypatch.setattr("hvdtrain.serve.security.time.monotonic", lambda: now + 61)
    assert page.get(link).status_code == 403


def test_the_folder_is_one_with_event_files_of_the_job_or_one_that_is_named(
    page: TestClient, job: JobFolder, asked: list[Any], tmp_path: Path
) -> None:
    path = f"/api/jobs/{job.name}/tensorboard"
    told = page.get(path).json()
    assert (told["folder"], "Name their folder" in told["why"]) == ("", True)
    for body in ({}, {"folder": 1}, {"folder": ""}, {"folder": "a\0"}, {"folder": "nowhere"}):
        assert page.post(path, json=body).status_code == 400
    # Where its own event files are is known by the job's arguments.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    _link(page, job, str(elsewhere))
    (elsewhere / "events.out.tfevents.1.a").touch()
    spec = job.spec()
    job.write_spec(JobSpec(**{**vars(spec), "program": ("a.py", str(elsewhere))}))
    assert page.get(path).json() == {"folder": str(elsewhere), "why": ""}
    _link(page, job, str(elsewhere))


def test_where_there_is_no_tensorboard_the_page_says_how_to_get_it(
    page: TestClient, job: JobFolder, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard_api.importlib.util, "find_spec", lambda name: None)
    path = f"/api/jobs/{job.name}/tensorboard"
    assert "pip install tensorboard" in page.get(path).json()["why"]
    refused = page.post(path, json={"folder": "logs"})
    assert (refused.status_code, "pip install tensorboard" in refused.text) == (400, True)
    assert asked == [{}]


def test_a_page_that_starts_nothing_starts_no_tensorboard(job: JobFolder) -> None:
    for read_only, host, words in (
        (True, "tensorboard.localhost:8264", "--read-only"),
        (False, "", "not over TLS"),
    ):
        app = make_app(
            JobIndex(job.path.parent),
            Keys(TOKEN),
            hosts=allowed_hosts("127.0.0.1", 8264),
            environ={},
            tensorboard_host=host,
            read_only=read_only,
        )
        with TestClient(app, base_url=PAGE) as client:
            client.headers["authorization"] = f"Bearer {TOKEN}"
            path = f"/api/jobs/{job.name}/tensorboard"
            assert words in client.get(path).json()["why"]
            assert words in client.post(path, json={"folder": "logs"}).json()["error"]
            # Nobody answers at the other name.
            assert client.get(f"{SITE}/enter").status_code == 421
