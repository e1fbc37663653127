"""What becomes of operations when ranks are lost; pure."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from hvdtrain.collectives.mpi_start import why_not_elastic
from hvdtrain.collectives.recovery import RecoveryDecision, RecoveryState, decide_recovery
from hvdtrain.errors import CollectiveError


def _state(member: int, operation: int, held: int, source: int = -1) -> RecoveryState:
    return RecoveryState(member=member, operation=operation, held=held, source=source)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param([(0, 5, 4), (2, 5, 4)], RecoveryDecision(4, 0), id="nobody-has-the-result"),
        pytest.param(
            [(0, 5, 5), (2, 5, 4)], RecoveryDecision(4, 0), id="one-has-it-and-does-it-again"
        ),
        pytest.param([(0, 5, 5), (2, 5, 5)], RecoveryDecision(5, 0), id="all-have-it"),
        pytest.param([(0, 6, 5), (2, 5, 5)], RecoveryDecision(5, 0), id="one-is-in-the-next"),
        pytest.param([(0, 0, 0), (2, 1, 0)], RecoveryDecision(0, 0), id="before-the-first"),
        pytest.param([(0, 5, 5), (2, 6, 5)], RecoveryDecision(5, 0), id="one-has-left"),
        pytest.param([(1, 5, 4, 0), (2, 5, 4, 0)], RecoveryDecision(4, 5), id="source-is-lost"),
        pytest.param([(1, 5, 4, 2), (2, 5, 4, 2)], RecoveryDecision(4, 0), id="source-is-there"),
        pytest.param(
            [(1, 4, 4), (2, 5, 4, 0)], RecoveryDecision(4, 5), id="source-is-lost-one-is-late"
        ),
        pytest.param(
            [(1, 5, 5, 0), (2, 5, 5, 0)], RecoveryDecision(5, 0), id="lost-source-was-heard"
        ),
        pytest.param(
            [(1, 5, 5, 0), (2, 6, 5)], RecoveryDecision(5, 0), id="lost-source-of-the-last-one"
        ),
    ],
)
def test_verdict(states: list[tuple[int, ...]], expected: RecoveryDecision) -> None:
    given = [_state(*state) for state in states]
    for order in itertools.permutations(given):
        assert decide_recovery(order) == expected


def test_rank_that_is_too_far_ahead() -> None:
    with pytest.raises(CollectiveError, match="Expected all in operation 5 or before it"):
        decide_recovery([_state(0, 6, 5), _state(1, 5, 4)])


TOLD = {"OMPI_MCA_mpi_ft_enable": "1"}


@pytest.mark.parametrize(
    ("vendor", "environ", "expected"),
    [
        (("Open MPI", (5, 0, 11)), TOLD, ""),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_mpi_ft_enable": "true"}, ""),
        (("Open MPI", (5, 0, 11)), {}, "start it with"),
        (("Open MPI", (5, 0, 11)), {"OMPI_MCA_mpi_ft_enable": "0"}, "start it with"),
        (("Open MPI", (4, 1, 4)), TOLD, "only Open MPI 5 can do without a rank, and this is Open"),
        (("MPICH", (5, 0, 2)), TOLD, "this is MPICH 5.0.2"),
    ],
)
def test_where_ranks_survive(
    vendor: tuple[str, tuple[int, ...]], environ: dict[str, str], expected: str
) -> None:
    reason = why_not_elastic(SimpleNamespace(get_vendor=lambda: vendor), environ)
    assert expected in reason
    assert bool(reason) == bool(expected)
