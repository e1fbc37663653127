from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection

import psutil
import pytest

from hvdtrain.agent import usage
from hvdtrain.agent.gpu_usage import GpuUsage, GpuWatch
from hvdtrain.agent.rank_report import Usage, read_usage
from hvdtrain.agent.usage import UsageWatch

# Keeps a core busy, holds 200 MiB, and has a child that does so, too.
_BUSY = """
import subprocess, sys, time
child = None
if sys.argv[1:]:
    code = open("/proc/self/cmdline").read().split(chr(0))[2]
    child = subprocess.Popen([sys.executable, "-c", code])
held = bytearray(200 << 20)
held[::4096] = b"x" * (len(held) // 4096)
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end and (child is None or child.poll() is None):
    pass
"""


class Gpus(GpuWatch):
    """A driver that answers at once."""

    def __init__(self) -> None:
        super().__init__("")
        self.pids: set[int] = set()

    def look(self, pids: Collection[int]) -> GpuUsage:
        self.pids = set(pids)
        return GpuUsage(gpu=50.0, gpu_bytes=7)


@pytest.mark.slow
def test_a_program_and_its_children_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 1.0)
    with subprocess.Popen(
        [sys.executable, "-c", _BUSY, "child"], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            gpus = Gpus()
            watch = UsageWatch(gpus)
            assert watch.look(program.pid) is None, "it is not time"
            time.sleep(1.1)
            watch.look(program.pid)
            assert watch.look(program.pid) is None
            time.sleep(1.1)
            children = {one.pid for one in psutil.Process(program.pid).children()}
            found = watch.look(program.pid)
        finally:
            for child in psutil.Process(program.pid).children():
                child.kill()
            program.kill()
    assert found is not None
    assert 400 << 20 <= found.rss_bytes < 700 << 20
    # However busy the machine is otherwise.
    assert 0.05 < found.cpu < 2.2
    assert (found.gpu, found.gpu_bytes) == (50.0, 7)
    assert gpus.pids == {program.pid, *children}


def test_a_stopped_program_is_told_from_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    watch = UsageWatch(GpuWatch(""))
    # The child of a program that waits for it, as where a shell starts Python.
    with subprocess.Popen(["sh", "-c", "sleep 60; true"]) as program:
        try:
            deadline = time.monotonic() + 30
            while not (children := psutil.Process(program.pid).children()):
                assert time.monotonic() < deadline
            seen = []
            for act in (lambda: None, children[0].suspend, children[0].resume):
                act()
                time.sleep(0.1)
                found = watch.look(program.pid)
                seen.append(found is not None and found.stopped)
        finally:
            program.kill()
            children[0].kill()
    assert seen == [False, True, False]


def test_who_is_gone_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    assert UsageWatch(GpuWatch("")).look(2**22 + 1) == Usage(rss_bytes=0, cpu=0.0)


def test_a_host_without_psutil_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = UsageWatch(GpuWatch(""))
    assert watch.look(1) is None
    assert watch.look(1) is None


def test_messages_are_read_or_refused() -> None:
    assert read_usage({"rss_bytes": 7, "cpu": 1}) == Usage(rss_bytes=7, cpu=1.0)
    known = {"rss_bytes": 7, "cpu": 1, "gpu": 30, "gpu_bytes": 9, "stopped": True}
    assert read_usage(known) == Usage(rss_bytes=7, cpu=1.0, gpu=30.0, gpu_bytes=9, stopped=True)
    unknown = {"rss_bytes": 7, "cpu": 1, "gpu": "30", "gpu_bytes": 1.5, "stopped": 1}
    assert read_usage(unknown) == Usage(rss_bytes=7, cpu=1.0)
    for message in ({}, {"rss_bytes": 1.5, "cpu": 1}, {"rss_bytes": 1, "cpu": "1"}):
        assert read_usage(message) is None
