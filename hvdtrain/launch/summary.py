"""The summary of a job in three lines; pure functions of its attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from hvdtrain.cluster.ranges import span
from hvdtrain.launch.outcome import Outcome

__all__ = ["goodput", "summarise"]

# Of parts of the time that are less than this nothing is said.
_LEAST = 0.005


def goodput(history: Sequence[Outcome], wall_s: float) -> dict[str, float]:
    """The parts of a job's time, which are 1 in all.

    ``kept`` is what went into steps that nothing undid: training without what came after the last
    checkpoint of an attempt that failed, which is ``lost``, and without what ranks waited
    meanwhile, on the average: for each other, which is ``waiting``, and for their data, which is
    ``input``. ``restarts`` is the time between attempts; with one attempt the rest is ``start``.
    """
    seconds: dict[str, float] = defaultdict(float, kept=0.0)
    for outcome in history:
        for kind, taken_s in outcome.phases.items():
            if kind != "training":
                seconds[kind] += taken_s
        for kind, taken_s in _parts_of_training(outcome):
            seconds[kind] += taken_s
    between = "restarts" if len(history) > 1 else "start"
    seconds[between] += max(0.0, wall_s - sum(seconds.values()))
    total_s = max(sum(seconds.values()), 1e-9)
    return {kind: taken_s / total_s for kind, taken_s in seconds.items()}


def _parts_of_training(outcome: Outcome) -> Iterator[tuple[str, float]]:
    stands_s = outcome.phases.get("training", 0.0)
    if outcome.cause != "done" and (outcome.saved or 0) < (outcome.step or 0):
        undone_s = min(outcome.lost_s, stands_s)
        yield "lost", undone_s
        stands_s -= undone_s
    rest = 1.0
    for kind, share in (("waiting", outcome.waited), ("input", outcome.starved)):
        if share is not None:
            yield kind, share * stands_s
            rest -= share
    yield "kept", rest * stands_s


def summarise(history: Sequence[Outcome], wall_s: float) -> list[str]:
    """Three lines on a job whose ranks reported steps; none on another."""
    steps = sum((o.step or 0) - (o.resumed or 0) for o in history if o.step is not None)
    training_s = sum(outcome.phases.get("training", 0.0) for outcome in history)
    if steps <= 0 or training_s <= 0:
        return []
    samples = sum(outcome.samples or 0 for outcome in history)
    rates = f"{steps / training_s:.3g} steps/s"
    if samples:
        rates += f", {samples / training_s:,.0f} samples/s"
    parts = goodput(history, wall_s)
    kept = parts.pop("kept")
    rest = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{share:.0%} {kind}" for kind, share in rest if share >= _LEAST]
    return [
        f"{steps} steps in {span(wall_s)}; {rates} in training",
        f"time: {kept:.0%} in steps that were kept{''.join(f', {share}' for share in shares)}",
        _about_waiting(history[-1]),
    ]


def _about_waiting(last: Outcome) -> str:
    if last.waited is None:
        return "how long ranks waited for each other is not known"
    waited = f"ranks waited {last.waited:.0%} of training for each other"
    if last.straggler is None:
        return f"{waited}; none was much slower than the others"
    slow = last.straggler
    why = ", most of it waiting for its input" if slow.is_starved else ""
    return (
        f"{waited}, most for rank {slow.rank} on {last.straggler_host}: a step takes it "
        f"{slow.own_s:.3g} s, {slow.factor:.1f} times as long as the others{why}"
    )
