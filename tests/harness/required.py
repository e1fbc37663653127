"""The skip or failure of tests whose requirements are missing."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["skip_or_fail"]


def skip_or_fail(name: str, reason: str) -> NoReturn:
    """Skip the test, or fail it if the list ``HVDTRAIN_TEST_REQUIRE`` contains ``name``."""
    if name in os.environ.get("HVDTRAIN_TEST_REQUIRE", "").split(","):
        pytest.fail(f"HVDTRAIN_TEST_REQUIRE requires {name}: {reason}", pytrace=False)
    pytest.skip(reason)
