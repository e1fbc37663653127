"""Lines that several ranks write alike, put together into one; nothing is printed here.

Ranks of a job say much the same, each in its own time. What several of them write within moments
of one another is shown once. Each rank's own lines stay in their order: lines wait in groups, and
a rank that writes B after A sets the group of B behind that of A. A line joins a group of the same
text unless that would set a group behind itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.cluster.ranges import number_runs

__all__ = ["Group", "LineCollapse", "describe_ranks"]

# How long a line waits for the same from other ranks.
WINDOW_S = 0.3
# More groups than these don't wait; whoever writes so much is not read line by line.
MOST_WAITING = 500
_MOST_CHARACTERS = 20
# Where a log line begins with the time and perhaps the thread, these don't count: that of
# TensorFlow's C++ ("W0000 00:00:1795552261.046417   17820 port.cc:153] ..."), and of Python's
# logging and of TensorFlow before 2.19 ("2026-11-24 20:29:51.123456: W ...").
_TIME = re.compile(r"(?<=^[IWEF])\d{4} [\d:.]+ +\d+|^\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")


@dataclass(eq=False, kw_only=True)
class Group:
    """One line, and who wrote it.

    Attributes:
        stream: stdout or stderr.
        text: The line, as the first of them wrote it.
        since: When the first of them wrote it, in seconds.
        key: The part that a line of another rank must have in common with it.
        hosts: The host of each rank that wrote it.
        behind: Groups that some rank wrote next.
    """

    stream: str
    text: str
    since: float
    key: tuple[str, str]
    hosts: dict[int, str]
    behind: list[Group] = field(default_factory=list, repr=False)


class LineCollapse:
    """Lines in, groups out; each waits ``WINDOW_S`` at most, and not where no rank is missing."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        # In an order that is right for every rank.
        self._waiting: list[Group] = []
        self._alike: dict[tuple[str, str], list[Group]] = {}
        self._newest: dict[int, Group] = {}

    def add(self, rank: int, host: str, stream: str, text: str, now: float) -> None:
        """Take in a line of a rank."""
        newest = self._newest.get(rank)
        key = (stream, _TIME.sub("", text, count=1))
        alike = self._alike.setdefault(key, [])
        for group in alike:
            # It can't follow itself either, but that takes longer to find out.
            if rank not in group.hosts and self._may_follow(newest, group):
                break
        else:
            group = Group(stream=stream, text=text, since=now, key=key, hosts={})
            alike.append(group)
            self._waiting.append(group)
        group.hosts[rank] = host
        if newest is not None:
            newest.behind.append(group)
        self._newest[rank] = group

    def take(self, now: float) -> list[Group]:
        """Take out the groups that have waited long enough, and those that stand before them."""
        count = max(0, len(self._waiting) - MOST_WAITING)
        for number, group in enumerate(self._waiting, 1):
            if now - group.since >= WINDOW_S:
                count = max(count, number)
        while count < len(self._waiting) and len(self._waiting[count].hosts) == self._ranks:
            count += 1
        return self._release(count)

    def take_all(self) -> list[Group]:
        """Take out all groups, now."""
        return self._release(len(self._waiting))

    def _release(self, count: int) -> list[Group]:
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        for group in released:
            self._alike[group.key].remove(group)
            if not self._alike[group.key]:
                del self._alike[group.key]
            for rank in group.hosts:
                if self._newest.get(rank) is group:
                    del self._newest[rank]
        return released

    def _may_follow(self, newest: Group | None, group: Group) -> bool:
        """Whether ``group`` can stand behind ``newest``; if so, it does from now on."""
        if newest is None:
            return True
        first, last = self._waiting.index(group), self._waiting.index(newest)
        if last < first:
            return True
        bound = _bound_to(group)
        if newest in bound:
            return False
        between = self._waiting[first : last + 1]
        self._waiting[first : last + 1] = [
            *(one for one in between if one not in bound),
            *(one for one in between if one in bound),
        ]
        return True


def _bound_to(group: Group) -> set[Group]:
    """``group`` and all groups that some rank needs behind it."""
    found, open_ = {group}, [group]
    while open_:
        for one in open_.pop().behind:
            if one not in found:
                found.add(one)
                open_.append(one)
    return found


def describe_ranks(ranks: Sequence[int]) -> str:
    """Write ranks as 0-7 or 0,3 or 0-3,7; of a long list the beginning, and how many they are."""
    words = number_runs(ranks)
    text = ",".join(words)
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"{','.join(words[:3])},... {len(ranks)} ranks"
