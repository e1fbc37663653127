"""What is said of an allreduce over all hosts."""

from __future__ import annotations

import dataclasses

from hvdtrain.check.survey import MeasuredAllreduce, judge_allreduce, show_allreduce
from hvdtrain.remote.problem import show_problem
from tests.check.answers import answer

MEASURED = MeasuredAllreduce(
    ranks=4, engine="mpi", nbytes=4_000_000, best_s=0.01, latency_s=2.5e-4, bus_bandwidth=6e8
)


def test_a_good_allreduce() -> None:
    assert judge_allreduce(MEASURED, []) is None
    assert show_allreduce(MEASURED) == (
        "allreduce over 4 ranks (mpi): 4.0 MB in 10 ms, 0.40 GB/s (bus 0.60 GB/s); 4 bytes in "
        "250 us"
    )


def test_an_allreduce_that_fails() -> None:
    failed = MeasuredAllreduce(code=125, words="hvdtrain run: rank 1 did not start")
    problem = judge_allreduce(failed, [answer("a"), answer("b")])
    assert problem is not None
    assert show_problem(problem) == (
        "problem: the hosts are well one by one, but an allreduce over all failed (exit code "
        "125):\n    rank 1 did not start\n"
        "  expected: all ranks reduce an array together\n"
        "  do: let the hosts reach each other at all ports, and keep MPI to one network, such as "
        "eth0: export OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI) or FI_TCP_IFACE=eth0 (MPICH, "
        "Intel MPI)"
    )


def test_an_allreduce_that_hangs_or_is_wrong() -> None:
    hangs = judge_allreduce(MeasuredAllreduce(code=124), [answer("a")])
    assert hangs is not None
    assert "did not end in time" in hangs.found
    wrong = judge_allreduce(dataclasses.replace(MEASURED, right=False), [])
    assert wrong is not None
    assert "wrong sums" in wrong.found
