"""Which losses a job survives, where its ranks can go on without one; pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.agent.exit_codes import signal_name
from hvdtrain.cluster.placement import Place
from hvdtrain.launch.commands import Mpirun
from hvdtrain.launch.failure import End

__all__ = ["critical_ranks", "describe_loss", "is_loss", "why_not"]


def why_not(mpirun: Mpirun, *, in_slurm: bool) -> str:
    """Why ranks can't go on without a lost one; empty where they can."""
    if in_slurm:
        return "ranks that srun starts end together"
    if mpirun.family != "openmpi5":
        return f"only Open MPI 5 lets ranks go on without one, and {mpirun.path} is another MPI"
    return ""


def critical_ranks(places: Sequence[Place]) -> dict[int, str]:
    """What those ranks are whose place no other can take; none where there are no servers."""
    if all(place.role != "ps" for place in places):
        return {}
    names = {"ps": "a parameter server", "chief": "the chief"}
    return {place.rank: names[place.role] for place in places if place.role in names}


def is_loss(end: End) -> bool:
    """Whether a rank died of something that says nothing about the others.

    A signal ended it, nobody had told it to end, and its host is there. An exception or an exit
    code is the program's own doing, and the same may happen to the next rank.
    """
    return end.code is not None and signal_name(end.code) is not None and not end.was_signalled


def describe_loss(end: End, step: int | None, left: int, *, enough: bool) -> str:
    """One line on a rank that was lost.

    Args:
        end: How it ended.
        step: How far it was; None where that is not known.
        left: Ranks that are left.
        enough: Whether they go on.
    """
    assert end.code is not None
    at = "" if step is None else f" after step {step}"
    ranks = "1 rank" if left == 1 else f"{left} ranks"
    memory = ", for lack of memory" if end.kills is not None and end.kills.in_group else ""
    goes_on = f"{ranks} {'goes' if left == 1 else 'go'} on" if enough else f"{ranks} left: too few"
    return (
        f"rank {end.rank} on {end.host} was lost ({signal_name(end.code)}{memory}){at}; {goes_on}"
    )
