"""What the chaos test does to a training, and when: decided by a seed alone.

The launcher leaves out for good a host that was lost. So links are cut for good, too, as far as the
launcher is concerned, and as many as ``--min-np`` allows; the link comes back after a while, to see
that what had run on the host disturbs nobody. A link that is interrupted for a moment costs nothing
but that moment, so there may be any number of those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "LOSES_HOST", "Fault", "Kind", "make_plan"]

Kind = Literal[
    "kill",  # SIGKILL to the rank on a host
    "stop",  # SIGSTOP to the rank on a host
    "full disk",  # the checkpoints' disk takes nothing more, for a while
    "interruption",  # the link of a host is down for a moment
    "cut",  # the link of a host is down until the host is given up, and then for a while
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ENDS_ATTEMPT: tuple[Kind, ...] = ("kill", "stop", "cut")
LOSES_HOST: Kind = "cut"

# The ranks need most of that to start again.
EVERY_S = 20.0
# One host is lost in a run of two minutes, more of them in a longer one.
CUT_EVERY_S = 240.0
# A disk that is full takes part of a checkpoint, or none of it.
MOST_ROOM_BYTES = 48 * 1024
LASTS_S: dict[Kind, tuple[float, float]] = {
    "full disk": (6.0, 25.0),
    "interruption": (0.5, 2.0),
    "cut": (20.0, 60.0),
}
MOST_CALM_S = 5.0
# So often a rank is killed that has only just been started.
EARLY = 0.3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens to the job.

    Attributes:
        at_s: After the first checkpoint; later where the job is not training by then.
        kind: What happens.
        host: Where; of a full disk, the host that writes to it.
        calm_s: For how long the ranks have been training before, or are starting up.
        early: The ranks are still starting, after the fault before.
        lasts_s: After which time it is put back; 0 for never.
        room_bytes: What a full disk still takes.
    """

    at_s: float
    kind: Kind
    host: str
    calm_s: float = 0.0
    early: bool = False
    lasts_s: float = 0.0
    room_bytes: int = 0

    def __str__(self) -> str:
        words = [self.kind, self.host]
        if self.kind == "full disk":
            words.append(f"with room for {self.room_bytes} bytes")
        if self.lasts_s:
            words.append(f"for {self.lasts_s:.1f} s")
        if self.early:
            words.append("while the ranks start")
        return " ".join(words)


def make_plan(
    seed: int,
    duration_s: float,
    hosts: Sequence[str],
    *,
    min_hosts: int,
    elastic: bool = False,
) -> list[Fault]:
    """The faults of a run, in their order; every kind is among them from 120 s on.

    Args:
        seed: Another one gives other faults.
        duration_s: About how long they go on.
        hosts: Those of the job. The first has the chief, which writes the checkpoints, and keeps
            its link.
        min_hosts: Fewer than that must not be left; two at least, so that a link is left.
        elastic: The job goes on without a rank that was killed, as long as ``min_hosts`` have one,
            and starts again on all hosts that are left otherwise.
    """
    chance = random.Random(seed)
    kinds = _kinds(chance, duration_s, spare=len(hosts) - min_hosts)
    width_s = duration_s / max(1, len(kinds))
    left = list(hosts)
    running = list(hosts)
    starts = False
    plan: list[Fault] = []
    for number, kind in enumerate(kinds):
        host = chance.choice(_targets(kind, left, running, elastic=elastic))
        fault = Fault(
            at_s=round((number + chance.random()) * width_s, 1),
            kind=kind,
            host=host,
            calm_s=round(chance.uniform(0, MOST_CALM_S), 1),
            early=kind == "kill" and starts and chance.random() < EARLY,
            lasts_s=round(chance.uniform(*LASTS_S[kind]), 1) if kind in LASTS_S else 0.0,
            room_bytes=chance.randrange(MOST_ROOM_BYTES) if kind == "full disk" else 0,
        )
        plan.append(fault)
        if kind == LOSES_HOST:
            left.remove(host)
        if kind == "kill" and elastic:
            running.remove(host)
        starts = kind in ENDS_ATTEMPT and not (
            kind == "kill" and elastic and len(running) >= min_hosts
        )
        if starts:
            running = list(left)
    return plan


def _targets(
    kind: Kind, left: Sequence[str], running: Sequence[str], *, elastic: bool
) -> Sequence[str]:
    """Where it may happen: on hosts that are ``left``, or have a rank that is ``running``."""
    if kind == "full disk":
        return left[:1]
    if kind in ("kill", "stop"):
        # Of those that go on alone the chief has the disk.
        return running[1:] if elastic and kind == "kill" else running
    return left[1:]


def _kinds(chance: random.Random, duration_s: float, *, spare: int) -> list[Kind]:
    """What happens, in which order: each kind once before any comes again."""
    count = int(duration_s / EVERY_S)
    cuts = min(spare, max(1, int(duration_s / CUT_EVERY_S)))
    others = [kind for kind in KINDS if kind != LOSES_HOST]
    first: list[Kind] = [*others, *[LOSES_HOST] * cuts]
    chance.shuffle(first)
    more = [chance.choice(others) for _ in range(count - len(first))]
    kinds = [*first, *more][:count]
    chance.shuffle(kinds)
    return kinds
