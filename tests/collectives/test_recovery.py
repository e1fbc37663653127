"""Decisions after the loss of ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from hvdtrain.collectives.mpi_start import why_not_elastic
from hvdtrain.collectives.recovery import RecoveryDecision, RecoveryState, decide_recovery
from hvdtrain.errors import CollectiveError


def _state(member: int, operation: int, completed: int, source: int = -1) -> RecoveryState:
    return RecoveryState(member, operation, completed, source)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([(0, 5, 4), (2, 5, 4)], (4, 0), id="no-rank-has-the-result"),
        pytest.param([(0, 5, 5), (2, 5, 4)], (4, 0), id="one-rank-has-the-result"),
        pytest.param([(0, 5, 5), (2, 5, 5)], (5, 0), id="all-ranks-have-the-result"),
        pytest.param([(0, 6, 5), (2, 5, 5)], (5, 0), id="one-rank-in-the-next-operation"),
        pytest.param([(0, 0, 0), (2, 1, 0)], (0, 0), id="before-the-first-operation"),
        pytest.param([(1, 5, 4, 0), (2, 5, 4, 0)], (4, 5), id="lost-root"),
        pytest.param([(1, 5, 4, 2), (2, 5, 4, 2)], (4, 0), id="remaining-root"),
        pytest.param([(1, 4, 4), (2, 5, 4, 0)], (4, 5), id="lost-root-and-late-rank"),
        pytest.param([(1, 5, 5, 0), (2, 5, 5, 0)], (5, 0), id="lost-root-after-all-have-it"),
        pytest.param([(1, 5, 5, 0), (2, 6, 5)], (5, 0), id="lost-root-of-the-previous-operation"),
    ],
)
def test_decision(states: list[tuple[int, ...]], expected: tuple[int, int]) -> None:
    for order in itertools.permutations(_state(*state) for state in states):
        assert decide_recovery(order) == RecoveryDecision(*expected)


def test_a_rank_two_operations_ahead_is_an_error() -> None:
    with pytest.raises(CollectiveError, match="all should be in operation 5 or before"):
        decide_recovery([_state(0, 6, 5), _state(1, 5, 4)])


ENABLED = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("vendor", "environ", "expected"),
    [
        (("Open MPI", (5, 0, 11)), ENABLED, ""),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_mpi_ft_enable": "true"}, ""),
        (("Open MPI", (5, 0, 11)), {}, "start the job with"),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_mpi_ft_enable": "0"}, "start the job with"),
        (("Open MPI", (4, 1, 4)), ENABLED, "elastic jobs need Open MPI 5, and this is Open"),
        (("MPICH", (5, 0, 2)), ENABLED, "this is MPICH 5.0.2"),
    ],
)
def test_mpi_with_support_for_elastic_jobs(
    vendor: tuple[str, tuple[int, ...]], environ: dict[str, str], expected: str
) -> None:
    reason = why_not_elastic(SimpleNamespace(get_vendor=lambda: vendor), environ)
    assert expected in reason
    assert bool(reason) == bool(expected)
