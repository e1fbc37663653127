"""Restart decisions, and the summary of a job."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.launch.failure import Cause, Outcome
from hvdtrain.launch.progress import Straggler
from hvdtrain.launch.restart import (
    JITTER,
    LONGEST_DELAY_S,
    decide,
    describe_losses,
    describe_restart,
    describe_resume,
    goodput,
    summarise,
)


def after(cause: Cause, code: int = 1, **more: Any) -> Outcome:
    return Outcome(code=code, cause=cause, **more)


LOST = after("infrastructure", 137)


def restarts(*history: Outcome, max_restarts: int = 3, in_slurm: bool = False) -> bool | str:
    """Return whether the job restarts, or the reason why it doesn't."""
    decision = decide(history, max_restarts, in_slurm=in_slurm, chance=0.0)
    return decision.reason or decision.restart


def test_causes_that_restart_the_job() -> None:
    assert restarts(after("infrastructure")) is True
    assert restarts(after("exception")) is True
    assert restarts(after("preempted", 75)) is True
    assert restarts(after("done", 0)) is False
    assert restarts(after("ordered", 130)) is False
    assert restarts(after("own code", 3)) == "the program chose exit code 3"
    assert restarts(after("setup", 125)) == "a restart can't change this"
    for cause in ("infrastructure", "exception", "preempted", "own code", "setup"):
        assert restarts(after(cause), max_restarts=0) is False


def test_a_job_restarts_whenever_managed_hosts_are_removed() -> None:
    removed = after("preempted", 75)
    for history in ([removed], [removed] * 50):
        decision = decide(history, 0, in_slurm=False, chance=0.0, hosts_return=True)
        assert decision.restart
    assert decision.delay_s == LONGEST_DELAY_S, "none of them has saved anything new"
    assert not decide([LOST], 0, in_slurm=False, chance=0.0, hosts_return=True).restart


def test_the_limit_of_restarts() -> None:
    assert restarts(LOST, LOST, LOST) is True
    assert restarts(LOST, LOST, LOST, LOST) == "--max-restarts 3 is exhausted"
    assert restarts(LOST, max_restarts=1) is True


def test_an_exception_at_the_same_step_ends_the_job() -> None:
    first = after("exception", failed_after=40)
    assert restarts(first, after("exception", failed_after=41)) is True
    assert restarts(first, first) == "the program raised an exception after step 40 again"
    assert "after step 40" in str(restarts(first, LOST, first)), "also later"
    early = after("exception", failed_after=None)
    assert restarts(early) is True
    assert "before its first step" in str(restarts(early, early))


def test_preemptions_with_progress_do_not_count() -> None:
    run = [after("preempted", 75, saved=step) for step in range(1, 20)]
    assert restarts(*run) is True
    idle = [after("preempted", 75, saved=5)] * 5
    assert "exhausted" in str(restarts(*idle))
    assert restarts(*run, in_slurm=True) is False, "Slurm requeues the job"


def test_the_delay_doubles_until_a_checkpoint_is_saved() -> None:
    def delay(*history: Outcome, chance: float = 0.0) -> float:
        return decide(history, 99, in_slurm=False, chance=chance).delay_s

    assert [delay(*[LOST] * count) for count in range(1, 6)] == [1, 2, 4, 8, 16]
    assert delay(*[LOST] * 50) == LONGEST_DELAY_S
    assert delay(LOST, LOST, chance=1.0) == 2 * (1 - JITTER)
    saved = after("infrastructure", saved=10)
    assert delay(LOST, LOST, saved) == 0
    assert delay(LOST, LOST, saved, saved) == 2, "resumed, and saved nothing new"
    assert delay(saved, after("infrastructure", saved=20)) == 0


def test_the_first_failure_after_progress_needs_no_delay() -> None:
    def delays(*history: Outcome) -> list[float]:
        return [
            decide(history[:count], 99, in_slurm=False, chance=0.0).delay_s
            for count in range(1, len(history) + 1)
        ]

    stepped = after("infrastructure", 137, step=3)
    assert delays(*[stepped] * 8) == [0, 1, 2, 4, 8, 16, 32, LONGEST_DELAY_S]
    assert delays(LOST, stepped, stepped) == [1, 1, 2]
    again = after("infrastructure", step=12, resumed=10)
    assert delays(after("infrastructure", step=12, saved=10), again, again) == [0, 1, 2]
    idle = after("infrastructure", step=10, resumed=10)
    assert delays(after("infrastructure", saved=10), idle) == [0, 2], "it made no step"


def test_describe_restart() -> None:
    def text(*history: Outcome) -> str:
        return describe_restart(history, 3, delay_s=1.6, hosts=["node1", "node2"], ranks=2)

    first = after("infrastructure", step=157, saved=120, lost_s=12.3)
    assert text(first) == (
        "attempt 2 of 4 starts in 2 s on node1, node2 (2 ranks); "
        "lost: 37 steps, 12 s, since the checkpoint of step 120"
    )
    assert text(first, LOST).startswith("attempt 3 of 4")
    now = describe_restart([first], 3, delay_s=0.0, hosts=["node1"], ranks=1)
    assert now.startswith("attempt 2 of 4 starts now on node1 (1 rank)")
    unsaved = after("infrastructure", step=1, lost_s=3.0)
    assert text(unsaved).endswith("lost: 1 step, 3 s, since the start (no checkpoint is known)")
    unresumed = after("infrastructure", lost_s=5.0)
    assert text(first, unresumed).endswith(
        "lost: 0 steps, 5 s, since its start (the newest checkpoint is from step 120)"
    )
    preempted = after("preempted", 75, step=130, saved=130)
    assert text(first, preempted).startswith("attempt 3 of 5"), "a preemption does not count"


def test_describe_losses() -> None:
    first = after("infrastructure", step=157, saved=120, lost_s=12.0)
    second = after("infrastructure", step=125, saved=120, lost_s=3.0)
    last = after("done", 0, step=300, saved=290, lost_s=50.0)
    assert describe_losses([last]) == ""
    assert describe_losses([first, second, last]) == ("3 attempts; lost in total: 42 steps, 15 s")


def test_describe_resume() -> None:
    saved = after("infrastructure", step=157, saved=120)
    text = "the newest checkpoint is from step 120; start the job again to resume"
    assert describe_resume([saved]) == describe_resume([saved, LOST]) == text
    assert describe_resume([LOST]) == ""
    for cause, code in (("done", 0), ("ordered", 130), ("preempted", 75)):
        outcome = after(cause, code, step=157, saved=120)
        assert describe_resume([outcome]) == "", "in the messages of the outcome"


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


def test_goodput_attributes_all_time() -> None:
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
    single = [after("done", 0, phases={"start": 5.0, "training": 3.0})]
    assert goodput(single, 10.0) == pytest.approx({"kept": 0.3, "start": 0.7})


def test_waits_during_lost_steps_count_once() -> None:
    history = [
        after(
            "exception",
            step=100,
            saved=80,
            lost_s=10.0,
            phases={"start": 5.0, "training": 50.0},
            waited=0.5,
            starved=0.25,
        ),
        after("done", 0, phases={"training": 60.0}, waited=0.1),
    ]
    parts = goodput(history, 120.0)
    assert sum(parts.values()) == pytest.approx(1.0)
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


def test_no_more_time_is_lost_than_was_trained() -> None:
    early = after("exception", step=1, lost_s=50.0, phases={"training": 3.0})
    parts = goodput([early], 60.0)
    assert parts["kept"] == 0.0
    assert parts["lost"] == pytest.approx(3 / 60)


def test_the_summary_has_three_lines() -> None:
    assert summarise([FAILED, DONE], 130.0) == [
        "220 steps in 2 min 10 s; 2 steps/s, 128 samples/s during training",
        "time: 64% in steps that count, 12% waiting, 9% lost, 7% start, 6% restarts, "
        "2% validation, 1% checkpoints",
        "ranks waited for each other 25% of training; no rank was much slower than the others",
    ]
    assert summarise([after("done", 0, phases={"start": 9.0})], 9.0) == [], "without steps"


@pytest.mark.parametrize(
    ("is_starved", "reason"), [(False, ""), (True, ", mostly waiting for input")]
)
def test_the_summary_names_the_straggler(is_starved: bool, reason: str) -> None:
    slow = Straggler(rank=3, own_s=0.4, median_s=0.1, is_starved=is_starved)
    phases = {"training": 4.0}
    last = after(
        "done", 0, step=10, phases=phases, waited=0.6, straggler=slow, straggler_host="node2"
    )
    assert summarise([last], 4.0)[-1] == (
        "ranks waited for each other 60% of training, mostly for rank 3 on node2: it takes "
        f"0.4 s per step, 4.0 times the median{reason}"
    )
