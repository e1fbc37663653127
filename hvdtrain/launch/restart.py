"""Decides whether a job restarts after an attempt, and summarises jobs.

All functions are pure. Their input is the outcomes of the job's attempts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.launch.failure import Outcome
from hvdtrain.text import format_duration, format_list, plural

__all__ = [
    "Decision",
    "decide",
    "describe_losses",
    "describe_restart",
    "describe_resume",
    "goodput",
    "summarise",
]

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
# Delays vary by this fraction, so that jobs that failed together do not restart together.
JITTER = 0.25


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether another attempt follows, and after how many seconds; or why no attempt follows."""

    restart: bool
    delay_s: float = 0.0
    reason: str = ""  # why the job does not restart; empty if that is obvious


def decide(
    history: Sequence[Outcome],
    max_restarts: int,
    *,
    in_slurm: bool,
    chance: float,
    hosts_return: bool = False,
) -> Decision:
    """Decide what follows the last attempt of ``history``.

    Args:
        history: The outcomes of all attempts.
        max_restarts: Maximum number of restarts after failures.
        in_slurm: Whether Slurm preempts and requeues the job as a whole.
        chance: A random number from 0 to 1, for the jitter of the delay.
        hosts_return: Whether the cluster replaces hosts that it takes from the job.
    """
    last = history[-1]
    restart = Decision(restart=True, delay_s=_delay_s(history) * (1 - JITTER * chance))
    if last.cause == "preempted" and hosts_return:
        return restart
    if last.cause in ("done", "ordered") or max_restarts == 0:
        return Decision(restart=False)
    if last.cause == "preempted" and in_slurm:
        return Decision(restart=False)
    if last.cause == "own code":
        return Decision(restart=False, reason=f"the program chose exit code {last.code}")
    if last.cause == "setup":
        return Decision(restart=False, reason="a restart can't change this")
    if last.cause == "exception" and _is_repeated(history):
        step = last.failed_after
        after = "before its first step" if step is None else f"after step {step}"
        return Decision(restart=False, reason=f"the program raised an exception {after} again")
    if _used_attempts(history) > max_restarts:
        return Decision(restart=False, reason=f"--max-restarts {max_restarts} is exhausted")
    return restart


def _delay_s(history: Sequence[Outcome]) -> float:
    """Return the delay before the next attempt, which doubles with each failure in a row.

    The first failure after progress needs no delay. Progress is a new checkpoint, or the steps of
    the first attempt.
    """
    last = history[-1]
    has_stepped = (last.step or 0) > (last.resumed or 0)
    failures = _attempts_without_progress(history) + (
        not has_stepped and not _progressed(history)[-1]
    )
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 10)) if failures else 0.0


def describe_restart(
    history: Sequence[Outcome],
    max_restarts: int,
    *,
    delay_s: float,
    hosts: Sequence[str],
    ranks: int,
) -> str:
    """Describe the next attempt, and the steps and seconds that were lost in the last attempt."""
    number = len(history) + 1
    limit = max(number, max_restarts + number - _used_attempts(history))
    when = f"in {delay_s:.0f} s" if delay_s else "now"
    last, newest = history[-1], _newest_checkpoint(history)
    if last.saved is not None:
        since = f"the checkpoint of step {last.saved}"
    elif last.step is None and newest:
        since = f"its start (the newest checkpoint is from step {newest})"
    else:
        since = "the start (no checkpoint is known)"
    return (
        f"attempt {number} of {limit} starts {when} on {format_list(hosts, 'hosts')} "
        f"({plural(ranks, 'rank')}); lost: {plural(_lost_steps(last), 'step')}, "
        f"{last.lost_s:.0f} s, since {since}"
    )


def describe_losses(history: Sequence[Outcome]) -> str:
    """Describe the steps and seconds that attempts lost; empty after only one attempt."""
    if len(history) < 2:
        return ""
    failed = [outcome for outcome in history if outcome.cause != "done"]
    steps = sum(_lost_steps(outcome) for outcome in failed)
    seconds = sum(outcome.lost_s for outcome in failed)
    return f"{len(history)} attempts; lost in total: {plural(steps, 'step')}, {seconds:.0f} s"


def describe_resume(history: Sequence[Outcome]) -> str:
    """Describe the checkpoint that a failed job can resume from; empty if there is none."""
    newest = _newest_checkpoint(history)
    if history[-1].cause in ("done", "ordered", "preempted") or not newest:
        return ""
    return f"the newest checkpoint is from step {newest}; start the job again to resume"


def _progressed(history: Sequence[Outcome]) -> list[bool]:
    """Return for each attempt whether it saved a newer checkpoint than all earlier attempts."""
    return [
        (last.saved or 0) > _newest_checkpoint(history[:number])
        for number, last in enumerate(history)
    ]


def _used_attempts(history: Sequence[Outcome]) -> int:
    """Return the attempts that count as restarts: all but those preempted after progress."""
    return sum(
        last.cause != "preempted" or not progressed
        for last, progressed in zip(history, _progressed(history))
    )


def _is_repeated(history: Sequence[Outcome]) -> bool:
    last = history[-1]
    return any(
        earlier.cause == "exception" and earlier.failed_after == last.failed_after
        for earlier in history[:-1]
    )


def _attempts_without_progress(history: Sequence[Outcome]) -> int:
    progressed = _progressed(history)
    return progressed[::-1].index(True) if any(progressed) else len(history) - 1


def _newest_checkpoint(history: Sequence[Outcome]) -> int:
    """Return the step of the newest checkpoint, or 0 without checkpoints."""
    return max((outcome.saved or 0 for outcome in history), default=0)


def _lost_steps(outcome: Outcome) -> int:
    return max(0, (outcome.step or 0) - (outcome.saved or 0))


# Smaller shares of the time are not shown.
_LEAST_SHARE = 0.005


def goodput(history: Sequence[Outcome], wall_s: float) -> dict[str, float]:
    """Return how a job's time was spent, as fractions that sum to 1.

    ``lost`` is training after the last checkpoint of a failed attempt. In the rest of training,
    ``waiting`` is the mean time that ranks waited for each other, ``input`` is the mean time that
    they waited for data, and ``kept`` is the remaining time. ``restarts`` is the time between
    attempts. If there was a single attempt, time outside of its phases counts as ``start``.
    """
    seconds: dict[str, float] = defaultdict(float, kept=0.0)
    for outcome in history:
        for kind, kind_s in outcome.phases.items():
            if kind != "training":
                seconds[kind] += kind_s
        for kind, kind_s in _parts_of_training(outcome):
            seconds[kind] += kind_s
    between = "restarts" if len(history) > 1 else "start"
    seconds[between] += max(0.0, wall_s - sum(seconds.values()))
    total_s = max(sum(seconds.values()), 1e-9)
    return {kind: kind_s / total_s for kind, kind_s in seconds.items()}


def _parts_of_training(outcome: Outcome) -> Iterator[tuple[str, float]]:
    counted_s = outcome.phases.get("training", 0.0)
    if outcome.cause != "done" and _lost_steps(outcome):
        lost_s = min(outcome.lost_s, counted_s)
        yield "lost", lost_s
        counted_s -= lost_s
    kept = 1.0
    for kind, share in (("waiting", outcome.waited), ("input", outcome.starved)):
        if share is not None:
            yield kind, share * counted_s
            kept -= share
    yield "kept", kept * counted_s


def summarise(history: Sequence[Outcome], wall_s: float) -> list[str]:
    """Return a summary of a job in three lines, or "" if the job's ranks reported no steps."""
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
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    shares = [f"{share:.0%} {kind}" for kind, share in largest_first if share >= _LEAST_SHARE]
    return [
        f"{plural(steps, 'step')} in {format_duration(wall_s)}; {rates} during training",
        ", ".join([f"time: {kept:.0%} in steps that count", *shares]),
        _describe_waiting(history[-1]),
    ]


def _describe_waiting(last: Outcome) -> str:
    if last.waited is None:
        return "the time that ranks waited for each other is unknown"
    waited = f"ranks waited for each other {last.waited:.0%} of training"
    slow = last.straggler
    if slow is None:
        return f"{waited}; no rank was much slower than the others"
    starved = ", mostly waiting for input" if slow.is_starved else ""
    return (
        f"{waited}, mostly for rank {slow.rank} on {last.straggler_host}: it takes "
        f"{slow.own_s:.3g} s per step, {slow.factor:.1f} times the median{starved}"
    )
