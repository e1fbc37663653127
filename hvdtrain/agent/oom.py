"""Whether the kernel killed a program for lack of memory, as the kernel's own counts tell.

The kernel counts such kills for each control group of processes, and for the whole host. A rise
while the program ran is evidence; it is read without any privilege. Sources: the kernel's
documentation, admin-guide/cgroup-v2 (memory.events), admin-guide/cgroup-v1/memory
(memory.oom_control), cgroups(7), proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hvdtrain.agent.rank_report import OomKills

__all__ = ["ControlGroup", "OomWatch", "count_in", "group_of", "limit_of"]

_COUNTS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# "No limit" is a word in version 2, and the largest multiple of a page below 2**63 in version 1.
_NO_LIMIT = 1 << 60
_MEMBERSHIP = re.compile(r"^\d+:([^:]*):(.*)$", re.MULTILINE)
_MOUNT = re.compile(
    r"^\S+ \S+ \S+ (?P<root>\S+) (?P<mount>\S+) .* - (?P<kind>cgroup2?) .*?(?P<options>\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class ControlGroup:
    """A control group that accounts for memory.

    Attributes:
        mount: Where the hierarchy is mounted.
        folder: The group's own folder; ``mount`` or below it.
    """

    mount: Path
    folder: Path

    def upwards(self) -> list[Path]:
        """Return the folders of the group and its ancestors, as far as they are visible."""
        folders = (self.folder, *self.folder.parents)
        return [folder for folder in folders if folder.is_relative_to(self.mount)]


def group_of(memberships: str, mounts: str) -> ControlGroup | None:
    """The control group that accounts for the memory of a process, by its ``/proc/PID/cgroup``.

    ``mounts`` is ``/proc/self/mountinfo`` of the process that will read the group's files.
    """
    found: dict[str, str] = {}
    for controllers, path in _MEMBERSHIP.findall(memberships):
        if controllers == "":
            found["cgroup2"] = path
        elif "memory" in controllers.split(","):
            found["cgroup"] = path
    # If both versions are mounted, memory belongs to the one that names it.
    for version in ("cgroup", "cgroup2"):
        for mount, root in _mounts(mounts, version):
            if version in found:
                return ControlGroup(mount, mount / _below(root, found[version]))
    return None


def _mounts(text: str, version: str) -> Iterator[tuple[Path, str]]:
    """Yield where hierarchies with memory are mounted, and which of their groups is there."""
    for root, mount, kind, options in _MOUNT.findall(text):
        if kind == version and (kind == "cgroup2" or "memory" in options.split(",")):
            yield Path(_unescaped(mount)), _unescaped(root)


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _below(root: str, path: str) -> PurePosixPath:
    """``path`` as seen from the mounted group; a container may see its own group alone."""
    try:
        below = PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in below.parts else below


def count_in(text: str) -> int | None:
    """The number behind ``oom_kill`` in memory.events, memory.oom_control or /proc/vmstat."""
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _kills_of(group: ControlGroup) -> int | None:
    """Return the kills that the group or its nearest counting ancestor has, or None."""
    for folder in group.upwards():
        for name in _COUNTS:
            if (count := count_in(_read(folder / name))) is not None:
                return count
    return None


def limit_of(group: ControlGroup) -> int | None:
    """Return the smallest limit, in bytes, of the group and its ancestors, or None."""
    texts = [_read(folder / name).strip() for folder in group.upwards() for name in _LIMITS]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(limits, default=None)


class OomWatch:
    """The counts from before a program's start, to compare with those after its end.

    Made before the program starts, by the process that will start it.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._mounts = _read(proc / "self" / "mountinfo")
        self._memberships = ""
        self._group: ControlGroup | None = None
        self._before: int | None = None
        self._before_on_host = self._count_on_host()
        self.look("self")

    def look(self, pid: int | str) -> None:
        """Note which group the program is in: it may be moved, or move itself, as it runs."""
        memberships = _read(self._proc / str(pid) / "cgroup")
        if memberships in ("", self._memberships):
            return
        self._memberships = memberships
        group = group_of(memberships, self._mounts)
        # In version 1 a process that is about to end seems to be at the top of the hierarchy.
        ending = self._group is not None and group is not None and group.folder == group.mount
        if group not in (None, self._group) and not ending:
            self._group, self._before = group, _kills_of(group)

    def kills(self) -> OomKills:
        """Return the kills since the program's start."""
        after = _kills_of(self._group) if self._group else None
        return OomKills(
            in_group=_rise(self._before, after),
            on_host=_rise(self._before_on_host, self._count_on_host()),
            limit_bytes=limit_of(self._group) if self._group else None,
        )

    def _count_on_host(self) -> int | None:
        return count_in(_read(self._proc / "vmstat"))


def _rise(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
