from __future__ import annotations

import pytest

from hvdtrain.launch.outcome import Outcome
from hvdtrain.launch.rank_pace import Straggler
from hvdtrain.launch.summary import goodput, summarise

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
