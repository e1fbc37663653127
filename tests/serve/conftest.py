"""A client that is logged in to the page."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvdtrain.serve.app import make_app
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.security import CSRF_HEADER, Keys, allowed_hosts

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def page(jobs_dir: Path) -> Iterator[TestClient]:
    """Return a client that is logged in, with a CSRF token."""
    app = make_app(
        JobIndex(jobs_dir),
        Keys(TOKEN),
        hosts=allowed_hosts("127.0.0.1", 8264),
        environ=os.environ,
    )
    with TestClient(app, base_url="http://localhost:8264") as client:
        client.post("/login", data={"token": TOKEN})
        client.headers[CSRF_HEADER] = client.get("/api/session").json()["csrf"]
        yield client
