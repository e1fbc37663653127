"""What a test does without something that it needs."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

__all__ = ["do_without"]


def do_without(name: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where ``HVDTRAIN_TEST_REQUIRE``, a list, has ``name``."""
    if name in os.environ.get("HVDTRAIN_TEST_REQUIRE", "").split(","):
        pytest.fail(f"HVDTRAIN_TEST_REQUIRE asks for {name}, but: {reason}", pytrace=False)
    pytest.skip(reason)
