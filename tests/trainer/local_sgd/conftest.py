from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hvdtrain import world as job


@pytest.fixture
def local_sgd(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that changes the running job to local SGD with these settings."""

    def change(sync_every: int, **settings: Any) -> Any:
        given = {"mode": "local-sgd", "sync_every": sync_every, **settings}
        changed = dataclasses.replace(job.settings(), **given)
        changed.check()
        monkeypatch.setattr(job, "_world", dataclasses.replace(job._world, settings=changed))
        return world

    return change
