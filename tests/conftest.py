"""Plugins for tests on MPI ranks, on a cluster of four hosts, and with other MPIs.

``plugin.py`` in ``tests/harness``, ``tests/testbed`` and ``tests/environments`` describes the
fixtures and markers.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvdtrain.log import LOGGER, configure_log

pytest_plugins = (
    "tests.agent.cgroups",
    "tests.checkpoint.disks",
    "tests.environments.plugin",
    "tests.harness.fake_driver",
    "tests.harness.plugin",
    "tests.kubernetes.plugin",
    "tests.testbed.plugin",
    "pytester",
)


# Tests on ranks take seconds in these folders: `make test` runs only the essential ones.
TRAINING = ("tests/compat/horovod/", "tests/trainer/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(TRAINING):
            item.add_marker("training")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Configure hvdtrain's log as in a rank, and reset it afterwards."""
    LOGGER.handlers.clear()
    configure_log("info")
    yield
    LOGGER.handlers.clear()


@pytest.fixture(params=["eager", "graph"])
def in_mode(request) -> Callable[..., Any]:
    """Return a decorator that does nothing, or one that makes a ``tf.function``."""
    import tensorflow as tf

    return tf.function if request.param == "graph" else lambda function: function


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Restore the handlers of preemption signals, which a training may change."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
