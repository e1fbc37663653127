"""The engine that a test runs on."""

from __future__ import annotations

import pytest

from tests.collectives.engines import EngineCase, Subject, shared_engine


@pytest.fixture
def subject(request: pytest.FixtureRequest, rank_count: int) -> Subject:
    """The engine of the item's case, shared with other tests; they must leave it usable."""
    return Subject(shared_engine(request.param), request.param)


@pytest.fixture
def case(request: pytest.FixtureRequest, rank_count: int) -> EngineCase:
    """A case for a test that builds, and breaks, an engine of its own."""
    return request.param
