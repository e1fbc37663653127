"""The result of the allreduce of ``hvdtrain check``, judged and shown; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.bench.results import format_seconds
from hvdtrain.exit_codes import ExitCode
from hvdtrain.remote.problem import Problem
from hvdtrain.remote.remote_probe import Answer

__all__ = ["MeasuredAllreduce", "judge_allreduce", "show_allreduce"]

_MOST_LINES = 12


@dataclass(frozen=True, kw_only=True)
class MeasuredAllreduce:
    """The outcome and speed of an allreduce.

    Attributes:
        code: Exit code of the job that it was.
        words: The complaints of the job.
        ranks: How many ranks took part.
        engine: Which of hvdtrain's engines did it.
        right: Whether every rank got the right sum.
        nbytes: Size of the array.
        best_s: Seconds of the quickest one.
        latency_s: Seconds of the quickest one of four bytes.
        bus_bandwidth: Bytes a second that the network or the memory carried, as nccl-tests
            counts them.
    """

    code: int = 0
    words: str = ""
    ranks: int = 0
    engine: str = ""
    right: bool = True
    nbytes: int = 0
    best_s: float = 0.0
    latency_s: float = 0.0
    bus_bandwidth: float = 0.0


def show_allreduce(measured: MeasuredAllreduce) -> str:
    """Format an allreduce that is right as one line."""
    return (
        f"allreduce over {measured.ranks} ranks ({measured.engine}): "
        f"{measured.nbytes / 1e6:.1f} MB in {format_seconds(measured.best_s)}, "
        f"{measured.nbytes / measured.best_s / 1e9:.2f} GB/s "
        f"(bus {measured.bus_bandwidth / 1e9:.2f} GB/s); "
        f"4 bytes in {format_seconds(measured.latency_s)}"
    )


def judge_allreduce(measured: MeasuredAllreduce, answers: Sequence[Answer]) -> Problem | None:
    """Return what is wrong with the allreduce; None if nothing is."""
    if measured.code == 0 and measured.right:
        return None
    if measured.code == 0:
        return Problem(
            found=f"an allreduce over {measured.ranks} ranks gave wrong sums",
            expected="the same right sum on every rank",
            remedy="find the host: check the others without it, hvdtrain check -H a,b",
        )
    lines = [line.removeprefix("hvdtrain run: ") for line in measured.words.splitlines()]
    said = "\n".join(f"    {line}" for line in lines[-_MOST_LINES:])
    hangs = measured.code == ExitCode.HANG
    what = "did not end in time" if hangs else f"failed (exit code {measured.code})"
    return Problem(
        found=f"the hosts are well one by one, but an allreduce over all {what}"
        + (f":\n{said}" if said else ""),
        expected="all ranks reduce an array together",
        remedy=_remedy(answers),
    )


def _remedy(answers: Sequence[Answer]) -> str:
    facts = [answer.facts for answer in answers if answer.facts is not None]
    interfaces = {one.interface for one in facts} - {"", "lo"}
    name = interfaces.pop() if len(interfaces) == 1 else "eth0"
    if len(facts) < 2:
        return "see what the ranks said above; hvdtrain run shows all of it"
    return (
        "let the hosts reach each other at all ports, and keep MPI to one network, such as "
        f"{name}: export OMPI_MCA_btl_tcp_if_include={name} (Open MPI) or "
        f"FI_TCP_IFACE={name} (MPICH, Intel MPI)"
    )
