"""Restarts of a job that ended, and its summary; pure functions of its attempts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import max_ranks
from hvdtrain.launch.failure import Outcome
from hvdtrain.text import format_duration, format_list, plural

__all__ = [
    "Decision",
    "account",
    "announce",
    "decide",
    "fitting",
    "goodput",
    "remains",
    "summarise",
    "without",
]

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
# Jobs that failed together shall not come back together.
SPREAD = 0.25


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision on what follows an attempt.

    Attributes:
        again: Whether there is another one.
        delay_s: Seconds until it starts.
        why_not: Says why there is none; empty where it needs no saying.
    """

    again: bool
    delay_s: float = 0.0
    why_not: str = ""


def decide(
    history: Sequence[Outcome],
    max_restarts: int,
    *,
    in_slurm: bool,
    chance: float,
    hosts_return: bool = False,
) -> Decision:
    """Decide what follows the last attempt of ``history``.

    With ``in_slurm`` a job that was preempted is not started again here: Slurm preempts the job
    around it as a whole. With ``hosts_return`` it always is: who took its hosts gives it others.
    ``chance``, from 0 to 1, varies the delay.
    """
    last = history[-1]
    delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(_idle_attempts(history), 10))
    later = Decision(again=True, delay_s=delay_s * (1 - SPREAD * chance))
    if last.cause == "preempted" and hosts_return:
        return later
    if last.cause in ("done", "ordered") or max_restarts == 0:
        return Decision(again=False)
    if last.cause == "preempted" and in_slurm:
        return Decision(again=False)
    if last.cause == "own code":
        return _over(f"exit code {last.code} is what the program chose to end with")
    if last.cause == "exception" and _repeats(history):
        step = last.failed_after
        after = "before its first step" if step is None else f"after step {step}"
        return _over(f"the program raised an exception {after} before, too")
    if _counting(history) > max_restarts:
        return _over(f"--max-restarts {max_restarts} are used up")
    return later


def announce(
    history: Sequence[Outcome],
    max_restarts: int,
    *,
    delay_s: float,
    hosts: Sequence[str],
    ranks: int,
) -> str:
    """Tell what is to come, and what the last attempt lost."""
    number = len(history) + 1
    most = max(number, max_restarts + number - _counting(history))
    on = f"on {format_list(hosts, 'hosts')} ({plural(ranks, 'rank')})"
    return f"attempt {number} of {most} starts in {delay_s:.0f} s {on}; {_lost(history)}"


def account(history: Sequence[Outcome]) -> str:
    """Tell what all attempts lost; empty where there was one."""
    if len(history) < 2:
        return ""
    failed = [outcome for outcome in history if outcome.cause != "done"]
    steps = sum(_lost_steps(outcome) for outcome in failed)
    seconds = sum(outcome.lost_s for outcome in failed)
    return f"{len(history)} attempts; lost in all: {plural(steps, 'step')}, {seconds:.0f} s"


def remains(history: Sequence[Outcome]) -> str:
    """Tell what a failed job leaves to go on from; empty for nothing, or where it is told."""
    if history[-1].cause in ("done", "ordered", "preempted") or not (newest := _newest(history)):
        return ""
    return f"the newest checkpoint is of step {newest}; the next start goes on from it"


def without(hosts: Sequence[Host], gone: Collection[str]) -> list[Host]:
    """The hosts that are left."""
    names = {name.lower() for name in gone}
    return [host for host in hosts if host.name.lower() not in names]


def fitting(hosts: Sequence[Host], ranks: int, *, oversubscribe: bool) -> int:
    """Return how many of ``ranks`` the hosts take."""
    most = max_ranks(hosts, oversubscribe=oversubscribe)
    return ranks if most is None else min(ranks, most)


def _over(why: str) -> Decision:
    return Decision(again=False, why_not=f"the job is not started again: {why}")


def _advances(history: Sequence[Outcome]) -> list[bool]:
    """Returns whether each attempt saved a checkpoint later than those before it."""
    return [(last.saved or 0) > _newest(history[:number]) for number, last in enumerate(history)]


def _counting(history: Sequence[Outcome]) -> int:
    """Returns how many attempts count; preemptions don't, if work was done between."""
    advances = _advances(history)
    return sum(last.cause != "preempted" or not more for last, more in zip(history, advances))


def _repeats(history: Sequence[Outcome]) -> bool:
    last = history[-1]
    return any(
        earlier.cause == "exception" and earlier.failed_after == last.failed_after
        for earlier in history[:-1]
    )


def _idle_attempts(history: Sequence[Outcome]) -> int:
    """Returns how many attempts came after the last that saved a later checkpoint, or the first."""
    advances = _advances(history)
    return advances[::-1].index(True) if any(advances) else len(history) - 1


def _newest(history: Sequence[Outcome]) -> int:
    """Step of the newest checkpoint; 0 for none."""
    return max((outcome.saved or 0 for outcome in history), default=0)


def _lost_steps(outcome: Outcome) -> int:
    return max(0, (outcome.step or 0) - (outcome.saved or 0))


def _lost(history: Sequence[Outcome]) -> str:
    """Tell what the last attempt lost."""
    outcome = history[-1]
    if outcome.saved is not None:
        since = f"the checkpoint of step {outcome.saved}"
    elif outcome.step is None and (newest := _newest(history)):
        since = f"its start; the newest checkpoint is of step {newest}"
    else:
        since = "the beginning: no checkpoint is known of"
    return f"lost: {plural(_lost_steps(outcome), 'step')}, {outcome.lost_s:.0f} s, since {since}"


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
        f"{steps} steps in {format_duration(wall_s)}; {rates} in training",
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
