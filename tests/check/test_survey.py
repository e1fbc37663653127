"""The allreduce over all hosts."""

from __future__ import annotations

from hvdtrain.check.allreduce_program import format_allreduce
from hvdtrain.check.survey import allreduce_problem
from hvdtrain.remote.problem import format_problem
from tests.check.answers import answer


def test_format_allreduce() -> None:
    assert format_allreduce("mpi", 4, 4_000_000, 0.01, 2.5e-4) == (
        "allreduce over 4 ranks (mpi): 4.0 MB in 10.0 ms, 0.40 GB/s (bus 0.60 GB/s); 4 bytes "
        "in 250 us"
    )


def test_a_failed_allreduce() -> None:
    answers = [answer("a"), answer("b")]
    problem = allreduce_problem(125, "hvdtrain run: rank 1 did not start\n", answers)
    assert format_problem(problem) == (
        "problem: each host is ready, but an allreduce over all failed (exit code 125):\n"
        "    rank 1 did not start\n"
        "  expected: an allreduce over all ranks succeeds\n"
        "  fix: let the hosts connect to each other at all ports, and restrict MPI to one network, "
        "such as eth0: export OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI) or FI_TCP_IFACE=eth0 "
        "(MPICH, Intel MPI)"
    )
    assert "timed out" in allreduce_problem(124, "", answers[:1]).summary
