"""What a test can ask for.

``environment(name)``
    Fixture: the Python of an environment that ``tests.environments`` describes. Where it was not
    made, the test is skipped, or fails where ``HVDTRAIN_TEST_REQUIRE`` contains its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.environments import folder_of, missing_environment


@pytest.fixture
def environment() -> Callable[[str], Path]:
    """Finds the Python of an environment by its name."""

    def find(name: str) -> Path:
        reason = missing_environment(name)
        if reason is not None and name in os.environ.get("HVDTRAIN_TEST_REQUIRE", "").split(","):
            pytest.fail(f"HVDTRAIN_TEST_REQUIRE asks for {name}, but {reason}", pytrace=False)
        if reason is not None:
            pytest.skip(reason)
        return folder_of(name) / "bin" / "python"

    return find
