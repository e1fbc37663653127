"""A page that somebody has logged in to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from hvdtrain.serve.app import make_app
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.policy import Policy
from hvdtrain.serve.security import CSRF_HEADER, Keys, allowed_hosts

TOKEN = "a-token-of-the-tests"


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def page(jobs_dir: Path, tmp_path: Path) -> Iterator[TestClient]:
    """Python programs may be started in the test's folder."""
    policy = Policy(folders=[tmp_path], programs=[sys.executable], backends=["local"])
    app = make_app(
        JobIndex(jobs_dir),
        Keys(TOKEN),
        policy,
        hosts=allowed_hosts("127.0.0.1", 8264),
        environ=os.environ,
    )
    with TestClient(app, base_url="http://localhost:8264") as client:
        client.get("/login", params={"token": TOKEN})
        client.headers[CSRF_HEADER] = client.get("/api/session").json()["csrf"]
        yield client
