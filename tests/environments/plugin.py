"""What a test can ask for.

``environment(name)``
    Fixture: the Python of an environment that ``tests.environments`` describes. Where it was not
    made, the test is skipped, or fails where ``HVDTRAIN_TEST_REQUIRE`` contains its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import folder_of, missing_environment
from tests.harness.required import do_without


@pytest.fixture
def environment() -> Callable[[str], Path]:
    """Finds the Python of an environment by its name."""

    def find(name: str) -> Path:
        if reason := missing_environment(name):
            do_without(name, reason)
        return folder_of(name) / "bin" / "python"

    return find
