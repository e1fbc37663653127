"""Whether a job that ended starts again, and what its summary says."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.launch.failure import Cause, Outcome
from hvdtrain.launch.progress import Straggler
from hvdtrain.launch.restart import (
    LONGEST_DELAY_S,
    SPREAD,
    account,
    announce,
    decide,
    fitting,
    goodput,
    remains,
    summarise,
    without,
)


def after(cause: Cause, code: int = 1, **more: Any) -> Outcome:
    return Outcome(code=code, cause=cause, **more)


LOST = after("infrastructure", 137)


def again(*history: Outcome, max_restarts: int = 3, in_slurm: bool = False) -> bool | str:
    """Whether there is another attempt, or why not."""
    decision = decide(history, max_restarts, in_slurm=in_slurm, chance=0.0)
    return decision.why_not or decision.again


def test_what_is_started_again() -> None:
    assert again(after("infrastructure")) is True
    assert again(after("exception")) is True
    assert again(after("preempted", 75)) is True


def test_what_is_not() -> None:
    assert again(after("done", 0)) is False
    assert again(after("ordered", 130)) is False
    assert "exit code 3 is what the program chose" in str(again(after("own code", 3)))


def test_nothing_is_unless_asked_for() -> None:
    for cause in ("infrastructure", "exception", "preempted", "own code"):
        assert again(after(cause), max_restarts=0) is False


def test_a_job_whose_hosts_were_taken_waits_for_others() -> None:
    """However often that happens, and unasked: it was not the job's doing."""
    taken = after("preempted", 75)
    for history in ([taken], [taken] * 50):
        decision = decide(history, 0, in_slurm=False, chance=0.0, hosts_return=True)
        assert decision.again
    assert decision.delay_s == LONGEST_DELAY_S, "none of them has saved anything new"
    assert not decide([LOST], 0, in_slurm=False, chance=0.0, hosts_return=True).again


def test_the_budget() -> None:
    assert again(LOST, LOST, LOST) is True
    assert "--max-restarts 3 are used up" in str(again(LOST, LOST, LOST, LOST))
    assert again(LOST, max_restarts=1) is True


def test_an_exception_at_another_step_is_tried_again() -> None:
    first = after("exception", failed_after=40)
    assert again(first, after("exception", failed_after=41)) is True
    assert "after step 40 before, too" in str(again(first, first))
    assert "after step 40" in str(again(first, LOST, first)), "whatever happened between"
    early = after("exception", failed_after=None)
    assert again(early) is True
    assert "before its first step" in str(again(early, early))


def test_preemptions_are_free_where_work_was_done() -> None:
    run = [after("preempted", 75, saved=step) for step in range(1, 20)]
    assert again(*run) is True
    idle = [after("preempted", 75, saved=5)] * 5
    assert "used up" in str(again(*idle))
    assert again(*run, in_slurm=True) is False, "the job script asks Slurm"


def delay(*history: Outcome, chance: float = 0.0) -> float:
    return decide(history, 99, in_slurm=False, chance=chance).delay_s


def test_the_delay_grows() -> None:
    assert [delay(*[LOST] * count) for count in range(1, 6)] == [1, 2, 4, 8, 16]
    assert delay(*[LOST] * 50) == LONGEST_DELAY_S
    assert delay(LOST, LOST, chance=1.0) == 2 * (1 - SPREAD)


def test_the_delay_begins_anew_where_something_was_saved() -> None:
    saved = after("infrastructure", saved=10)
    assert delay(LOST, LOST, saved) == 1
    assert delay(LOST, LOST, saved, saved) == 2, "resumed, and saved nothing more"
    assert delay(saved, after("infrastructure", saved=20)) == 1


def said(*history: Outcome) -> str:
    return announce(history, 3, delay_s=1.6, hosts=["node1", "node2"], ranks=2)


def test_what_is_said() -> None:
    first = after("infrastructure", step=157, saved=120, lost_s=12.3)
    assert said(first) == (
        "attempt 2 of 4 starts in 2 s on node1, node2 (2 ranks); "
        "lost: 37 steps, 12 s, since the checkpoint of step 120"
    )
    assert said(first, LOST).startswith("attempt 3 of 4")
    nothing = after("infrastructure", step=1, lost_s=3.0)
    assert said(nothing).endswith(
        "lost: 1 step, 3 s, since the beginning: no checkpoint is known of"
    )
    unresumed = after("infrastructure", lost_s=5.0)
    assert said(first, unresumed).endswith(
        "lost: 0 steps, 5 s, since its start; the newest checkpoint is of step 120"
    )
    free = after("preempted", 75, step=130, saved=130)
    assert said(first, free).startswith("attempt 3 of 5"), "a preemption is one more"


def test_the_account() -> None:
    first = after("infrastructure", step=157, saved=120, lost_s=12.0)
    second = after("infrastructure", step=125, saved=120, lost_s=3.0)
    last = after("done", 0, step=300, saved=290, lost_s=50.0)
    assert account([last]) == ""
    assert account([first, second, last]) == "3 attempts; lost in all: 42 steps, 15 s"


def test_what_is_left_to_go_on_from() -> None:
    saved = after("infrastructure", step=157, saved=120)
    told = "the newest checkpoint is of step 120; the next start goes on from it"
    assert remains([saved]) == told
    assert remains([saved, LOST]) == told
    assert remains([LOST]) == ""
    for cause, code in (("done", 0), ("ordered", 130), ("preempted", 75)):
        assert remains([after(cause, code, step=157, saved=120)]) == "", "told by their own words"


HOSTS = parse_hosts("node1:2,node2:2,node3:1")


@pytest.mark.parametrize(
    ("gone", "left"),
    [([], "node1 node2 node3"), (["NODE2"], "node1 node3"), (["node1", "node2", "node3"], "")],
)
def test_hosts_that_are_left(gone: list[str], left: str) -> None:
    assert [host.name for host in without(HOSTS, gone)] == left.split()


def test_ranks_that_fit() -> None:
    assert fitting(HOSTS, 4, oversubscribe=False) == 4
    assert fitting(HOSTS[:1], 4, oversubscribe=False) == 2
    assert fitting(HOSTS[:1], 4, oversubscribe=True) == 4
    assert fitting([], 4, oversubscribe=False) == 0
    assert fitting([], 4, oversubscribe=True) == 0


FAILED = Outcome(
    code=1,
    cause="infrastructure",
    step=100,
    saved=80,
    lost_s=12.0,
    phases={"start": 5.0, "training": 50.0},
    samples=6400,
)
DONE = Outcome(
    code=0,
    cause="done",
    step=200,
    saved=200,
    resumed=80,
    phases={"start": 4.0, "training": 60.0, "checkpoints": 1.0, "validation": 2.0},
    samples=7680,
    waited=0.25,
)


def test_all_time_is_somewhere() -> None:
    parts = goodput([FAILED, DONE], 130.0)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts == pytest.approx(
        {
            "kept": (50 - 12 + 60 * 0.75) / 130,
            "waiting": 60 * 0.25 / 130,
            "lost": 12 / 130,
            "start": 9 / 130,
            "checkpoints": 1 / 130,
            "validation": 2 / 130,
            "restarts": (130 - 122) / 130,
        }
    )


def test_what_ranks_waited_is_not_kept() -> None:
    history = [
        Outcome(
            code=1,
            cause="exception",
            step=100,
            saved=80,
            lost_s=10.0,
            phases={"start": 5.0, "training": 50.0},
            waited=0.5,
            starved=0.25,
        ),
        Outcome(code=0, cause="done", phases={"training": 60.0}, waited=0.1),
    ]
    parts = goodput(history, 120.0)
    assert sum(parts.values()) == pytest.approx(1.0)
    # What was waited for steps that were lost is lost, and counts once.
    assert parts == pytest.approx(
        {
            "kept": (40 / 4 + 60 * 0.9) / 120,
            "waiting": (40 / 2 + 60 * 0.1) / 120,
            "input": 40 / 4 / 120,
            "lost": 10 / 120,
            "start": 5 / 120,
            "restarts": 5 / 120,
        }
    )


def test_no_more_is_lost_than_was_trained() -> None:
    early = Outcome(code=1, cause="exception", step=1, lost_s=50.0, phases={"training": 3.0})
    parts = goodput([early], 60.0)
    assert parts["kept"] == 0.0
    assert parts["lost"] == pytest.approx(3 / 60)


def test_one_attempt_has_no_restarts() -> None:
    parts = goodput([Outcome(code=0, cause="done", phases={"start": 5.0, "training": 3.0})], 10.0)
    assert parts == pytest.approx({"kept": 0.3, "start": 0.7})


def test_three_lines_say_it() -> None:
    assert summarise([FAILED, DONE], 130.0) == [
        "220 steps in 2 min 10 s; 2 steps/s, 128 samples/s in training",
        "time: 64% in steps that were kept, 12% waiting, 9% lost, 7% start, 6% restarts, "
        "2% validation, 1% checkpoints",
        "ranks waited 25% of training for each other; none was much slower than the others",
    ]


@pytest.mark.parametrize(
    ("is_starved", "why"), [(False, ""), (True, ", most of it waiting for its input")]
)
def test_the_rank_that_others_wait_for_is_named(is_starved: bool, why: str) -> None:
    slow = Straggler(rank=3, own_s=0.4, median_s=0.1, is_starved=is_starved)
    last = Outcome(
        code=0,
        cause="done",
        step=10,
        phases={"training": 4.0},
        waited=0.6,
        straggler=slow,
        straggler_host="node2",
    )
    assert summarise([last], 4.0)[-1] == (
        "ranks waited 60% of training for each other, most for rank 3 on node2: a step takes it "
        f"0.4 s, 4.0 times as long as the others{why}"
    )


def test_a_program_without_steps_is_not_summarised() -> None:
    assert summarise([Outcome(code=0, cause="done", phases={"start": 9.0})], 9.0) == []
