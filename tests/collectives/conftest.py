"""Fixtures for engines."""

from __future__ import annotations

import pytest

from tests.collectives.engines import EngineCase, Subject, shared_engine


@pytest.fixture
def subject(request: pytest.FixtureRequest, rank_count: int) -> Subject:
    """Return the shared engine of the case, which must stay usable."""
    return Subject(shared_engine(request.param), request.param)


@pytest.fixture
def case(request: pytest.FixtureRequest, rank_count: int) -> EngineCase:
    """Return the case for a test that creates a new engine."""
    return request.param
