"""Tests may run on several MPI ranks, on a cluster of four hosts, and with other MPIs.

``plugin.py`` in ``tests/harness``, ``tests/testbed`` and ``tests/environments`` says how.
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
    "tests.harness.plugin",
    "tests.kubernetes.plugin",
    "tests.testbed.plugin",
    "pytester",
)


# Here a test on ranks takes some seconds of each: `make test` runs those that are essential.
TRAINING = ("tests/horovod/", "tests/keras/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(TRAINING):
            item.add_marker("training")


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """What hvdtrain says is shown as in a rank, whatever tests before this one chose."""
    LOGGER.handlers.clear()
    configure_log("info")
    yield
    LOGGER.handlers.clear()


@pytest.fixture(params=["eager", "graph"])
def in_mode(request) -> Callable[..., Any]:
    """A function that returns its argument as it is or as a ``tf.function``."""
    import tensorflow as tf

    return tf.function if request.param == "graph" else lambda function: function


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """A training that a warning has ended ignores further ones; tests after it must not."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
