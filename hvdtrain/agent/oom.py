"""Detects out-of-memory kills with the kernel's counters.

The kernel counts kills per control group and for the whole host. If a counter has increased during
the program's run, a process was killed. The counters can be read without privileges. Sources: the
kernel's documentation, admin-guide/cgroup-v2 (memory.events) and admin-guide/cgroup-v1/memory
(memory.oom_control); cgroups(7), proc_pid_mountinfo(5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hvdtrain.agent.rank_report import OomKills

__all__ = ["ControlGroup", "OomWatch", "find_group", "memory_limit", "parse_count"]

_COUNTS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# If there is no limit, the file contains "max" in version 2. In version 1, it contains the largest
# multiple of a page below 2**63.
_NO_LIMIT = 1 << 60
_MEMBERSHIP = re.compile(r"^\d+:([^:]*):(.*)$", re.MULTILINE)
_MOUNT = re.compile(
    r"^\S+ \S+ \S+ (?P<root>\S+) (?P<mount>\S+) .* - (?P<kind>cgroup2?) .*?(?P<options>\S+)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class ControlGroup:
    """A control group that accounts for memory."""

    mount: Path  # mount point of the hierarchy that contains the group
    folder: Path  # folder of the group

    def ancestors(self) -> list[Path]:
        """Return the folders of the group and its visible ancestors."""
        folders = (self.folder, *self.folder.parents)
        return [folder for folder in folders if folder.is_relative_to(self.mount)]


def find_group(memberships: str, mounts: str) -> ControlGroup | None:
    """Return the control group that accounts for a process's memory.

    Args:
        memberships: Content of the process's ``/proc/PID/cgroup``.
        mounts: Content of ``/proc/self/mountinfo``.
    """
    paths: dict[str, str] = {}
    for controllers, path in _MEMBERSHIP.findall(memberships):
        if controllers == "":
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    # If both versions are mounted, version 1 accounts for memory if it has the memory controller.
    for version in ("cgroup", "cgroup2"):
        for root, mount, kind, options in _MOUNT.findall(mounts):
            accounts = kind == "cgroup2" or "memory" in options.split(",")
            if kind == version and version in paths and accounts:
                folder = Path(_unescape(mount))
                return ControlGroup(folder, folder / _below(_unescape(root), paths[version]))
    return None


def _unescape(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _below(root: str, path: str) -> PurePosixPath:
    """Return a group's path relative to ``root``, which is the part that a container can see."""
    try:
        below = PurePosixPath(path).relative_to(root)
    except ValueError:
        return PurePosixPath()
    return PurePosixPath() if ".." in below.parts else below


def parse_count(text: str) -> int | None:
    """Return the ``oom_kill`` counter in the text of a kernel file; None if the text has none.

    The file is memory.events, memory.oom_control or /proc/vmstat.
    """
    match = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(match[1]) if match else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _count_kills(group: ControlGroup) -> int | None:
    """Return the ``oom_kill`` counter of the group, or of the nearest ancestor that has one."""
    counts = (parse_count(_read(f / name)) for f in group.ancestors() for name in _COUNTS)
    return next((count for count in counts if count is not None), None)


def memory_limit(group: ControlGroup) -> int | None:
    """Return the lowest memory limit of the group and its ancestors, in bytes; None without one."""
    texts = [_read(folder / name).strip() for folder in group.ancestors() for name in _LIMITS]
    limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
    return min(limits, default=None)


class OomWatch:
    """Compares the kernel's counters before and after a program's run.

    Create an ``OomWatch`` before the program starts, in the process that starts the program.
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
        """Look up the program's control group, which may change while the program runs."""
        memberships = _read(self._proc / str(pid) / "cgroup")
        if memberships in ("", self._memberships):
            return
        self._memberships = memberships
        group = find_group(memberships, self._mounts)
        # In version 1, a process that is about to end appears at the top of the hierarchy.
        is_ending = self._group is not None and group is not None and group.folder == group.mount
        if group is not None and group != self._group and not is_ending:
            self._group, self._before = group, _count_kills(group)

    def kills(self) -> OomKills:
        """Return the number of out-of-memory kills during the run, and the memory limit."""
        return OomKills(
            in_group=_increase(self._before, _count_kills(self._group) if self._group else None),
            on_host=_increase(self._before_on_host, self._count_on_host()),
            limit_bytes=memory_limit(self._group) if self._group else None,
        )

    def _count_on_host(self) -> int | None:
        return parse_count(_read(self._proc / "vmstat"))


def _increase(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
