from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.agent.oom import ControlGroup, OomWatch, find_group, memory_limit, parse_count
from hvdtrain.agent.rank_report import OomKills
from tests.agent.cgroups import ENTER, FILL, LIMIT_BYTES

V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "41 31 0:38 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = "41 31 0:38 {root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
OTHERS = (
    "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    "36 31 0:33 / /sys/fs/cgroup/devices rw,relatime - cgroup cgroup rw,devices\n"
)
SLURM = "/slurm/uid_0/job_7/step_0"
V1_MEMORY, V2_UNIFIED = "/sys/fs/cgroup/memory", "/sys/fs/cgroup"

# Contents of /proc/PID/cgroup and mountinfo; the mount point and the group's folder below it.
GROUPS: dict[str, tuple[str, str, tuple[str, str] | None]] = {
    "version-1": (f"5:devices:/\n4:memory:{SLURM}\n", V1.format(root="/"), (V1_MEMORY, SLURM)),
    "among-others": ("4:cpu,memory:/a:b c\n0::/x\n", V1.format(root="/"), (V1_MEMORY, "/a:b c")),
    "version-2": (
        "0::/user.slice/a.scope\n",
        V2.format(root="/"),
        (V2_UNIFIED, "/user.slice/a.scope"),
    ),
    "both": (
        "4:memory:/a\n0::/b\n",
        f"{HYBRID.format(root='/')}\n{V1.format(root='/')}",
        (V1_MEMORY, "/a"),
    ),
    "both-without-memory-in-1": (
        "4:devices:/a\n0::/b\n",
        f"{HYBRID.format(root='/')}\n{V1.format(root='/').replace('memory', 'devices')}",
        ("/sys/fs/cgroup/unified", "/b"),
    ),
    "container": ("4:memory:/pod/c1\n", V1.format(root="/pod/c1"), (V1_MEMORY, "")),
    "below-a-container": ("4:memory:/pod/c1/d\n", V1.format(root="/pod/c1"), (V1_MEMORY, "/d")),
    "outside-the-namespace": ("0::/../other\n", V2.format(root="/"), (V2_UNIFIED, "")),
    "mounted-elsewhere": (
        "0::/a\n",
        V2.format(root="/").replace("/sys/fs/cgroup", r"/my\040groups"),
        ("/my groups", "/a"),
    ),
    "not-mounted": ("4:memory:/a\n", "", None),
    "no-groups": ("", V1.format(root="/"), None),
    "nonsense": ("memory\n\n:::\n", "nonsense - cgroup\n - - -\n", None),
}


@pytest.mark.parametrize(("memberships", "mounts", "group"), GROUPS.values(), ids=GROUPS)
def test_find_group(memberships: str, mounts: str, group: tuple[str, str] | None) -> None:
    expected = group and ControlGroup(Path(group[0]), Path(group[0] + group[1]))
    assert find_group(memberships, f"{OTHERS}{mounts}\n") == expected


COUNTS: dict[str, tuple[str, int | None]] = {
    "version-1": ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3),
    "version-2": ("low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0\n", 1),
    "vmstat": ("pgfault 5\noom_kill 70\nnuma_hit 1\n", 70),
    "before-linux-4.13": ("oom_kill_disable 0\nunder_oom 0\n", None),
}


@pytest.mark.parametrize(("text", "count"), COUNTS.values(), ids=COUNTS)
def test_parse_count(text: str, count: int | None) -> None:
    assert parse_count(text) == count


def group_with(tmp_path: Path, files: dict[str, str]) -> ControlGroup:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    return ControlGroup(tmp_path, tmp_path / "job" / "step")


NO_LIMIT = str((1 << 63) - 4096)
LIMITS: dict[str, tuple[dict[str, str], int | None]] = {
    "own": ({"job/memory.max": "max", "job/step/memory.max": "4096"}, 4096),
    "parent": ({"job/memory.max": "8192", "job/step/memory.max": "max"}, 8192),
    "smallest": ({"job/memory.max": "4096", "job/step/memory.max": "8192"}, 4096),
    "version-1": (
        {"job/step/memory.limit_in_bytes": "4096", "memory.limit_in_bytes": NO_LIMIT},
        4096,
    ),
    "none": ({"job/memory.max": "max", "memory.limit_in_bytes": NO_LIMIT}, None),
    "unreadable": ({}, None),
}


@pytest.mark.parametrize(("files", "limit"), LIMITS.values(), ids=LIMITS)
def test_the_smallest_limit_is_used(
    tmp_path: Path, files: dict[str, str], limit: int | None
) -> None:
    assert memory_limit(group_with(tmp_path, files)) == limit


class Kernel:
    """Files of a host with cgroup version 2 and one process."""

    def __init__(self, tmp_path: Path) -> None:
        self.proc, self.groups = tmp_path / "proc", tmp_path / "groups"
        for folder in (self.proc / "self", self.proc / "7", self.groups / "a", self.groups / "b"):
            folder.mkdir(parents=True)
        mounts = V2.format(root="/").replace("/sys/fs/cgroup", str(self.groups))
        (self.proc / "self" / "mountinfo").write_text(mounts + "\n")
        self.move("self", "/a")
        self.move("7", "/a")
        self.count(a=5, b=6, host=11)

    def move(self, pid: str, group: str) -> None:
        (self.proc / pid / "cgroup").write_text(f"0::{group}\n")

    def count(self, *, host: int, **groups: int) -> None:
        (self.proc / "vmstat").write_text(f"oom_kill {host}\n")
        for name, count in groups.items():
            (self.groups / name / "memory.events").write_text(f"oom_kill {count}\n")


def test_kills_since_the_start(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    watch = OomWatch(kernel.proc)
    watch.look(7)
    assert watch.kills() == OomKills(in_group=0, on_host=0)
    kernel.count(a=7, b=6, host=14)
    assert watch.kills() == OomKills(in_group=2, on_host=3)


def test_kills_in_the_last_group_of_a_process_are_counted(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    watch = OomWatch(kernel.proc)
    kernel.move("7", "/b")
    watch.look(7)
    # In version 1, the process moves to another group when it is about to end. Then it ends.
    kernel.move("7", "/")
    watch.look(7)
    watch.look(8)
    kernel.count(a=9, b=7, host=16)
    assert watch.kills() == OomKills(in_group=1, on_host=5)


def test_the_counter_of_the_parent_group(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    kernel.move("self", "/b/below")
    watch = OomWatch(kernel.proc)
    kernel.count(a=5, b=8, host=13)
    assert watch.kills() == OomKills(in_group=2, on_host=2)


def test_a_removed_group_is_unknown(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    watch = OomWatch(kernel.proc)
    kernel.count(host=12)
    (kernel.groups / "a" / "memory.events").unlink()
    assert watch.kills() == OomKills(on_host=1)


def test_kills_are_unknown_without_the_kernels_files(tmp_path: Path) -> None:
    watch = OomWatch(tmp_path)
    watch.look(os.getpid())
    assert watch.kills() == OomKills()


@pytest.mark.parametrize("fills", [True, False], ids=["out-of-memory", "sigkill"])
def test_a_real_out_of_memory_kill(cgroup: Path, fills: bool) -> None:
    watch = OomWatch()
    action = FILL if fills else "os.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", f"import os, time; {ENTER}; {action}"]) as child:
        deadline = time.monotonic() + 30
        while child.poll() is None and time.monotonic() < deadline:
            watch.look(child.pid)
            time.sleep(0.02)
        child.kill()
    assert child.returncode == -9
    kills = watch.kills()
    assert (kills.in_group, kills.limit_bytes) == (int(fills), LIMIT_BYTES)
    assert kills.on_host is not None
    assert kills.on_host >= int(fills)
