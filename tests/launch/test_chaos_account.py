"""The account of the chaos test."""

from __future__ import annotations

from tests.launch.chaos_job import Account, Step
from tests.launch.chaos_plan import Fault

ERRORS = """\
[0 node1] hvdtrain: no checkpoint could be saved, training goes on: Checkpoint of step 3 ...
hvdtrain run: rank 1 on node2 failed first: ended by signal 9 (SIGKILL); by a person
hvdtrain run: last lines of stderr:
hvdtrain run:   nothing of interest
hvdtrain run: attempt 2 of 11 starts in 1 s on node1, node2 (2 ranks); lost: 2 steps, 1 s, since ...
hvdtrain run: 2 attempts; lost in all: 2 steps, 1 s
"""
TIMES = [(10.0, 1), (10.2, 2), (10.4, 3), (15.4, 2), (15.6, 3), (16.0, 4)]


def test_what_it_counts_and_shows() -> None:
    fault = Fault(at_s=0.3, kind="kill", host="node2")
    account = Account([(0.4, fault)], ERRORS, [Step(*entry) for entry in TIMES])
    assert str(account) == (
        "    0.4 s  kill node2\n"
        "hvdtrain run: rank 1 on node2 failed first: ended by signal 9 (SIGKILL); by a person\n"
        "hvdtrain run: attempt 2 of 11 starts in 1 s on node1, node2 (2 ranks); lost: 2 steps, 1 s,"
        " since ...\n"
        "hvdtrain run: 2 attempts; lost in all: 2 steps, 1 s\n"
        "faults: 1 x kill\n"
        "recoveries: 1; 1 attempts met a full disk\n"
        "lost: 2 of 6 steps were done again, and for 5 s none was done"
    )


def test_a_quiet_run() -> None:
    account = Account([], "", [Step(1.0, 1), Step(1.5, 2)])
    assert (account.recoveries, account.without_room, account.repeated) == (0, 0, 0)
    assert account.idle_s == 0
