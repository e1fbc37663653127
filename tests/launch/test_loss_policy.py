"""Which losses a job survives, and what is said of them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdtrain.agent.oom import OomKills
from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import place
from hvdtrain.launch.commands import Mpirun
from hvdtrain.launch.failure import End
from hvdtrain.launch.loss_policy import critical_ranks, describe_loss, is_loss, why_not

KILLED = 128 + signal.SIGKILL


def end(code: int | None, *, was_signalled: bool = False) -> End:
    return End(rank=2, host="node1", code=code, was_signalled=was_signalled)


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        (end(KILLED), True),
        (end(128 + signal.SIGSEGV), True),
        (end(1), False),
        (end(75), False),
        (end(255), False),
        (end(0), False),
        (end(None), False),
        (end(KILLED, was_signalled=True), False),
    ],
)
def test_is_loss(one: End, lost: bool) -> None:
    assert is_loss(one) is lost


def test_describe_loss() -> None:
    told = describe_loss(end(KILLED), 41, 3, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 3 ranks go on"
    told = describe_loss(end(KILLED), None, 1, enough=True)
    assert told == "rank 2 on node1 was lost (SIGKILL); 1 rank goes on"
    memory = End(rank=2, host="node1", code=KILLED, kills=OomKills(in_group=1))
    told = describe_loss(memory, 41, 3, enough=True)
    assert told.startswith("rank 2 on node1 was lost (SIGKILL, for lack of memory) after step 41")
    told = describe_loss(end(KILLED), 41, 1, enough=False)
    assert told == "rank 2 on node1 was lost (SIGKILL) after step 41; 1 rank left: too few"


def test_without_whom_nothing_goes_on() -> None:
    hosts = [Host(name="a", slots=4)]
    assert critical_ranks(place(hosts, 4)) == {}
    served = place(hosts, 4, servers=(2,))
    assert critical_ranks(served) == {0: "the chief", 2: "a parameter server"}


def test_where_it_is_to_be_had() -> None:
    five = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi5")
    four = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi4")
    assert why_not(five, in_slurm=False) == ""
    assert "srun" in why_not(five, in_slurm=True)
    assert "/opt/bin/mpirun is another MPI" in why_not(four, in_slurm=False)
