"""The faults of a chaos test, determined by a seed.

The launcher excludes a lost host permanently, so ``--min-np`` limits the number of links that are
cut. A cut link is repaired later, to check that leftovers on that host do no harm. Short
interruptions of a link only cost time, so their number is unlimited.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["KINDS", "LASTS_S", "LOSES_HOST", "MAX_CALM_S", "Fault", "Kind", "make_plan"]

Kind = Literal[
    "kill",  # SIGKILL to the rank on a host
    "stop",  # SIGSTOP to the rank on a host
    "full disk",  # the disk with the checkpoints is full for a while
    "interruption",  # the link of a host is down for a moment
    "cut",  # the link of a host is down until the launcher excludes the host, and longer
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ENDS_ATTEMPT: tuple[Kind, ...] = ("kill", "stop", "cut")
LOSES_HOST: Kind = "cut"

# The ranks need most of it to restart. On a busy machine, they need more, and faults are later.
EVERY_S = 12.0
# A run of two minutes loses one host, a longer one more.
CUT_EVERY_S = 240.0
# A full disk has room for part of a checkpoint at most.
MAX_ROOM_BYTES = 48 * 1024
LASTS_S: dict[Kind, tuple[float, float]] = {
    "full disk": (4.0, 12.0),
    "interruption": (0.5, 2.0),
    "cut": (15.0, 30.0),
}
MAX_CALM_S = 5.0
# The probability that a rank is killed while it starts.
EARLY = 0.3


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    at_s: float  # after the first checkpoint, or later if the job is not training then
    kind: Kind
    host: str  # for a full disk, the host that writes to it
    calm_s: float = 0.0  # how long the ranks train before it, or start up
    early: bool = False  # whether the ranks are still starting, after the previous fault
    lasts_s: float = 0.0  # until it is repaired; 0 for never
    room_bytes: int = 0  # free space on a full disk

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
    seed: int, duration_s: float, hosts: Sequence[str], *, min_hosts: int, elastic: bool = False
) -> list[Fault]:
    """Return the faults of a run in order. In runs of 120 s or more, every kind occurs.

    Args:
        seed: The seed.
        duration_s: The approximate duration.
        hosts: The hosts of the job. The first one runs the chief and keeps its link.
        min_hosts: The minimum number of hosts to keep, at least two.
        elastic: Whether the job continues without killed ranks, as long as ``min_hosts`` hosts have
            a rank. After that, it restarts on all remaining hosts.
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
            calm_s=round(chance.uniform(0, MAX_CALM_S), 1),
            early=kind == "kill" and starts and chance.random() < EARLY,
            lasts_s=round(chance.uniform(*LASTS_S[kind]), 1) if kind in LASTS_S else 0.0,
            room_bytes=chance.randrange(MAX_ROOM_BYTES) if kind == "full disk" else 0,
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
    """Return the hosts where a fault may occur."""
    if kind == "full disk":
        return left[:1]
    if kind in ("kill", "stop"):
        # The chief writes to the disk, so it must survive.
        return running[1:] if elastic and kind == "kill" else running
    return left[1:]


def _kinds(chance: random.Random, duration_s: float, *, spare: int) -> list[Kind]:
    """Return the kinds of faults. Each kind occurs once before any kind is repeated."""
    count = int(duration_s / EVERY_S)
    cuts = min(spare, max(1, int(duration_s / CUT_EVERY_S)))
    others = [kind for kind in KINDS if kind != LOSES_HOST]
    first: list[Kind] = [*others, *[LOSES_HOST] * cuts]
    chance.shuffle(first)
    more = [chance.choice(others) for _ in range(count - len(first))]
    kinds = [*first, *more][:count]
    chance.shuffle(kinds)
    return kinds
