"""The fixture ``environment``.

``environment(name)`` returns the Python of an environment of ``tests.environments``. Without the
environment the test is skipped, or fails if ``HVDTRAIN_TEST_REQUIRE`` contains its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import folder_of, missing_environment
from tests.harness.required import skip_or_fail


@pytest.fixture
def environment() -> Callable[[str], Path]:
    """A function that returns the Python of an environment."""

    def find(name: str) -> Path:
        if reason := missing_environment(name):
            skip_or_fail(name, reason)
        return folder_of(name) / "bin" / "python"

    return find
