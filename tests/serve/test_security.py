from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.serve.app import make_app
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.security import (
    COOKIE,
    CSRF_HEADER,
    READING,
    Keys,
    OneTimeCodes,
    allowed_hosts,
    read_token,
)

TOKEN = "a-token-of-the-tests"
BASE = "http://localhost:8264"
CODES = OneTimeCodes(60)
ACTIONS = ("/stop", "/restart", "/clone")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    """Return a client that is not logged in."""
    create_job(tmp_path, JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0))
    hosts = allowed_hosts("127.0.0.1", 8264)
    app = make_app(JobIndex(tmp_path), Keys(TOKEN), hosts=hosts, environ={}, codes=CODES)
    with TestClient(app, base_url=BASE, follow_redirects=False) as client:
        yield client


@pytest.fixture
def logged_in(client: TestClient) -> TestClient:
    assert client.post("/login", data={"token": TOKEN}).status_code == 303
    return client


def _paths(client: TestClient) -> list[str]:
    routes = client.app.routes  # type: ignore[attr-defined]
    # Static files are public.
    routes = [route for route in routes if route.path != "/static"]
    assert all(isinstance(route, Route) for route in routes)
    paths = [route.path.replace("{name}", "a-19700101-000001") for route in routes]
    assert len(paths) >= 15
    return paths


def test_without_a_cookie_only_the_login_is_allowed(client: TestClient) -> None:
    for path in _paths(client):
        for method in METHODS:
            code = client.request(method, path).status_code
            if path == "/login" and method in ("GET", "HEAD", "POST"):
                assert code == 200
            else:
                assert code in (401, 405), (method, path, code)
    to_login = client.get("/", headers={"accept": "text/html"})
    assert (to_login.status_code, to_login.headers["location"]) == (303, "/login")


@pytest.mark.slow
def test_other_hosts_and_origins_are_refused_on_all_routes(logged_in: TestClient) -> None:
    for path in [*_paths(logged_in), "/static/login.html", "/nothing"]:
        for method in METHODS:
            for host in (
                "evil.example",
                "localhost",
                "localhost:80",
                "127.0.0.1:8264.evil.example",
            ):
                code = logged_in.request(method, path, headers={"host": host}).status_code
                assert code == 421, (method, path, host)
            for origin in (
                "http://evil.example",
                "null",
                "http://localhost:80",
                "https://localhost:8264",
            ):
                code = logged_in.request(method, path, headers={"origin": origin}).status_code
                assert code in (403, 405), (method, path, origin)


def test_other_methods_are_refused(logged_in: TestClient) -> None:
    for path in _paths(logged_in):
        for method in METHODS[3:]:
            assert logged_in.request(method, path).status_code == 405


def test_changes_need_a_csrf_token(logged_in: TestClient) -> None:
    actions = {path for path in _paths(logged_in) if path.endswith(ACTIONS)}
    assert len(actions) == len(ACTIONS)
    for path in [*actions, "/api/jobs", "/api/plan", "/logout"]:
        assert logged_in.post(path, json={}).status_code == 403
        wrong = logged_in.post(path, json={}, headers={CSRF_HEADER: "0" * 64})
        assert wrong.status_code == 403
    csrf = logged_in.get("/api/session").json()["csrf"]
    refused = logged_in.post("/api/jobs", json={"program": ["a"]}, headers={CSRF_HEADER: csrf})
    assert refused.status_code == 400
    assert "folder must be an existing folder" in refused.json()["error"]
    assert logged_in.post("/logout", headers={CSRF_HEADER: csrf}).status_code == 200
    assert logged_in.get("/api/jobs").status_code == 401


def test_programs_authenticate_with_the_token(client: TestClient) -> None:
    assert client.get("/metrics", headers={"authorization": "Bearer wrong"}).status_code == 401
    metrics = client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
    assert 'hvdtrain_jobs{state="unknown"} 1.0' in metrics.text


def test_a_link_logs_in_once_with_a_code_and_never_with_the_token(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "set-cookie" not in client.get("/login", params={"token": TOKEN}).headers
    code = CODES.issue()
    assert "set-cookie" not in client.head("/login", params={"code": code}).headers
    entered = client.get("/login", params={"code": code})
    assert "SameSite=strict" in entered.headers["set-cookie"]
    # A redirect from a file would lose the strict cookie.
    assert (entered.status_code, '"0; url=/"' in entered.text) == (200, True)
    assert client.get("/api/jobs").status_code == 200
    client.cookies.clear()
    again = client.get("/login", params={"code": code})
    assert (again.status_code, "set-cookie" in again.headers) == (403, False)
    late, now = CODES.issue(), time.monotonic()
    monkeypatch.setattr("hvdtrain.serve.security.time.monotonic", lambda: now + 61)
    assert client.get("/login", params={"code": late}).status_code == 403


def test_read_only_refuses_all_changes(tmp_path: Path) -> None:
    job = create_job(tmp_path, JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0))
    hosts = allowed_hosts("127.0.0.1", 8264)
    codes = {}
    for read_only in (False, True):
        app = make_app(
            JobIndex(tmp_path), Keys(TOKEN), hosts=hosts, environ={}, read_only=read_only
        )
        actions = [
            (method, route.path.replace("{name}", job.name))
            for route in app.routes
            if isinstance(route, Route)
            for method in sorted(route.methods or ())
            if method not in READING
        ]
        with TestClient(app, base_url=BASE, follow_redirects=False) as client:
            client.headers["authorization"] = f"Bearer {TOKEN}"
            assert client.get("/api/session").json()["read_only"] == read_only
            responses = {way: client.request(*way, json={}) for way in actions}
            codes[read_only] = {way: response.status_code for way, response in responses.items()}
            for (_, path), response in responses.items():
                refused = path not in ("/login", "/logout") and read_only
                assert ("--read-only" in response.text) == refused, path
    assert {path for _, path in codes[True]} >= {"/api/jobs", "/api/plan", "/login", "/logout"}
    changes = codes[True].keys() - {("POST", "/login"), ("POST", "/logout")}
    assert len(changes) >= len(ACTIONS) + 2
    assert {codes[True][way] for way in changes} == {403}
    assert 403 not in {codes[False][way] for way in changes}


def test_a_wrong_token_sets_no_cookie(client: TestClient) -> None:
    for response in (
        client.get("/login", params={"code": "wrong"}),
        client.post("/login", content="token=wrong"),
        client.post("/login", content=b"\xff=\xff&token"),
    ):
        assert response.status_code in (200, 403)
        assert "set-cookie" not in response.headers
    assert client.post("/login", content=b"token=" + b"x" * 10_000).status_code == 413
    cookie = client.post("/login", content=f"token={TOKEN}").headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))


def test_cookies_are_signed_and_expire(client: TestClient) -> None:
    keys, now = Keys(TOKEN), time.time()
    cookie = keys.session(now)
    assert keys.is_session(cookie, now)
    assert not keys.is_session(cookie, now + 31 * 86400)
    assert not Keys("another-token-of-tests").is_session(cookie, now)
    later = str(int(now) + 10**9)
    for forged in (
        "",
        ".",
        "x",
        later + cookie[10:],
        cookie[:-1] + "0",
        cookie + "0",
        "\u00e9." * 3,
    ):
        assert forged == cookie or not keys.is_session(forged, now)
    assert keys.csrf(cookie) != keys.csrf(keys.session(now))


def test_all_responses_have_security_headers(logged_in: TestClient) -> None:
    for path in ("/", "/login", "/api/jobs", "/nothing", "/static/login.html", "/metrics"):
        headers = logged_in.get(path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert path.startswith("/static/") or headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "name", ["..%2f..%2fetc", "%2fetc%2fpasswd", ".queue", "a%00b", " ", "a" * 300]
)
def test_names_can_not_leave_the_folder(logged_in: TestClient, name: str) -> None:
    for rest in ("", "/log", "/metrics", "/live"):
        assert logged_in.get(f"/api/jobs/{name}{rest}").status_code == 404
    for path in (f"/static/{name}", f"/static/{name}/cli.py", "/static/..%2fsecurity.py"):
        assert logged_in.get(path).status_code in (401, 404)


def test_a_symbolic_link_is_not_a_job(logged_in: TestClient, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    assert logged_in.get("/api/jobs/link").status_code == 404


def test_the_token_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "jobs" / ".serve-token"
    token = read_token(path)
    assert len(token) >= 40
    assert read_token(path) == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigurationError, match="readable by other users"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("x\n")
    with pytest.raises(ConfigurationError, match="contains no token"):
        read_token(path)


def test_allowed_hosts() -> None:
    assert allowed_hosts("127.0.0.1", 1) == {"127.0.0.1:1", "localhost:1", "[::1]:1"}
    assert "10.0.0.1:1" in allowed_hosts("10.0.0.1", 1)
    assert "[fe80::1]:1" in allowed_hosts("fe80::1", 1)
    assert "login1:1" in allowed_hosts("0.0.0.0", 1, ["login1"])
    assert not any("0.0.0.0" in host for host in allowed_hosts("0.0.0.0", 1))


def test_cookies_of_other_servers_are_ignored(logged_in: TestClient) -> None:
    logged_in.cookies.set("other", "x" * 100)
    assert COOKIE in logged_in.cookies
    assert logged_in.get("/api/jobs").status_code == 200
