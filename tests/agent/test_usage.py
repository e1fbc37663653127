from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from hvdtrain.agent import usage
from hvdtrain.agent.messages import JOB, Decoder, encode, format_addresses, receive
from hvdtrain.agent.rank_report import Usage, read_record
from hvdtrain.agent.usage import UNKNOWN, GpuUsage, GpuWatch, UsageWatch, gpu_usage
from hvdtrain.cluster.gpus import GpuState
from hvdtrain.config import LAUNCHER
from tests.harness.fake_driver import FakeDriver
from tests.harness.jobs import REPOSITORY

# Keeps a core busy and 200 MiB allocated, and so does its child.
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


class FixedGpus(GpuWatch):
    """GPUs with fixed usage."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: set[int] = set()

    def look(self, pids: Collection[int]) -> GpuUsage:
        self.pids = set(pids)
        return 50.0, 7


@pytest.mark.slow
def test_usage_of_a_program_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 1.0)
    with subprocess.Popen(
        [sys.executable, "-c", _BUSY, "child"], stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            assert program.stdout is not None
            assert [program.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
            gpus = FixedGpus()
            watch = UsageWatch(gpus)
            assert watch.look(program.pid) is None, "not due"
            time.sleep(1.1)
            watch.look(program.pid)
            assert watch.look(program.pid) is None
            time.sleep(1.1)
            children = {one.pid for one in psutil.Process(program.pid).children()}
            measured = watch.look(program.pid)
        finally:
            for child in psutil.Process(program.pid).children():
                child.kill()
            program.kill()
    assert measured is not None
    assert 400 << 20 <= measured.rss_bytes < 700 << 20
    # Wide limits for a busy machine.
    assert 0.05 < measured.cpu < 2.2
    assert (measured.gpu, measured.gpu_bytes) == (50.0, 7)
    assert gpus.pids == {program.pid, *children}


def test_a_stopped_child_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    watch = UsageWatch(GpuWatch())
    with subprocess.Popen(["sh", "-c", "sleep 60; true"]) as program:
        try:
            deadline = time.monotonic() + 30
            while not (children := psutil.Process(program.pid).children()):
                assert time.monotonic() < deadline
            states = []
            for change in (lambda: None, children[0].suspend, children[0].resume):
                change()
                time.sleep(0.1)
                measured = watch.look(program.pid)
                states.append(measured is not None and measured.stopped)
        finally:
            program.kill()
            children[0].kill()
    assert states == [False, True, False]


def test_a_process_that_has_ended_uses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    assert UsageWatch(GpuWatch()).look(2**22 + 1) == Usage(rss_bytes=0, cpu=0.0)


def test_a_host_without_psutil_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = UsageWatch(GpuWatch())
    assert watch.look(1) is None
    assert watch.look(1) is None


def test_usage_messages() -> None:
    assert read_record(Usage, {"rss_bytes": 7, "cpu": 1}) == Usage(rss_bytes=7, cpu=1.0)
    known = {"rss_bytes": 7, "cpu": 1, "gpu": 30, "gpu_bytes": 9, "stopped": True}
    assert read_record(Usage, known) == Usage(
        rss_bytes=7, cpu=1.0, gpu=30.0, gpu_bytes=9, stopped=True
    )
    invalid_gpu = {**known, "gpu": "30"}
    for message in ({}, invalid_gpu, {"rss_bytes": 1.5, "cpu": 1}, {"rss_bytes": 1, "cpu": "1"}):
        assert read_record(Usage, message) is None


GPUS = [
    GpuState(number="0", id="a", busy=90, used_bytes=70, processes=[(10, "", 30), (20, "", 40)]),
    GpuState(number="1", id="b", busy=20, used_bytes=55, processes=[(11, "", 50)]),
    GpuState(number="2", id="c", used_bytes=5, processes=[(12, "", 5)]),
    GpuState(number="3", faults=["GPU is lost"]),
]


@pytest.mark.parametrize(
    ("pids", "own", "expected"),
    [
        ({10}, "", (90.0, 30)),
        ({10, 20, 99}, "", (90.0, 70)),
        ({10, 11}, "", (55.0, 80)),
        ({11, 12}, "", (20.0, 55)),
        ({12}, "", (None, 5)),
        # The driver's process IDs take precedence.
        ({11}, "a", (20.0, 50)),
        ({1, 2}, "b", (20.0, 55)),
        ({1, 2}, "c", (None, 5)),
        ({1, 2}, "", UNKNOWN),
        ({1, 2}, "d", UNKNOWN),
    ],
)
def test_gpu_usage(pids: set[int], own: str, expected: GpuUsage) -> None:
    assert gpu_usage(GPUS, pids, own) == expected


_LOOK = """
import sys, time
from hvdtrain.agent import usage
usage.PATIENCE_S = 1.0
watch = usage.GpuWatch()
watch.own = "b"
for description in sys.argv[2:]:
    with open(sys.argv[1], "w") as file:
        print(description, file=file)
    started_s = time.monotonic()
    print(*watch.look({1}), time.monotonic() - started_s > 0.9)
"""
_WORKING = "gpu a\ngpu b\nused 2048\nbusy 7"
_MEASURED, _UNKNOWN, _TIMEOUT = "7.0 2048 False", "None None False", "None None True"
_DRIVERS = {
    # A driver that is missing at the start stays missing, but a lost GPU may come back.
    "missing": (["nvml 9", _WORKING], [_UNKNOWN, _UNKNOWN]),
    "lost": (["gpu a\ngpu b\nlost 15", _WORKING], [_UNKNOWN, _MEASURED]),
    "failing": ([_WORKING, "nvml 15", _WORKING], [_MEASURED, _UNKNOWN, _MEASURED]),
    "hanging": ([_WORKING, "hang 1", _WORKING], [_MEASURED, _TIMEOUT, _UNKNOWN]),
}


@pytest.mark.parametrize(("descriptions", "lines"), _DRIVERS.values(), ids=_DRIVERS)
def test_a_broken_driver(
    fake_driver: FakeDriver, run_command, descriptions: list[str], lines: list[str]
) -> None:
    environ = fake_driver.environ("")
    argv = [sys.executable, "-c", _LOOK, environ["FAKE_GPUS"], *descriptions]
    done = run_command(argv, env=environ)
    assert (done.returncode, done.stdout.splitlines()) == (0, lines), done


def test_gpus_without_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = GpuWatch()
    assert watch.look({1}) == UNKNOWN
    assert watch.look({1}) == UNKNOWN


# The fake driver shows children of the calling agent as processes on the second GPU. On the third,
# it shows an unknown process, as in a container.
_GPUS = """
gpu a
busy 10
gpu b
busy 85
process children 3221225472
gpu c
busy 20
used 77
process 1 77
"""


@pytest.mark.slow
def test_agents_report_gpu_usage(fake_driver: FakeDriver) -> None:
    descriptions = {"by process": _GPUS, "by report": _GPUS.replace("children", "1")}
    environs = [fake_driver.environ(text, name) for name, text in descriptions.items()]
    # At the same time, because an agent waits before it reports.
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(_reported_usage, environs)) == [(85.0, 3 << 30), (20.0, 77)]


def _reported_usage(driver: Mapping[str, str]) -> tuple[float, int]:
    """Start an agent, and return the GPU usage that it reports for a program."""
    program = "from hvdtrain.monitor import report; report.bound('c'); import time; time.sleep(60)"
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(20)
        environ = {
            **os.environ,
            **driver,
            "PYTHONPATH": str(REPOSITORY),
            LAUNCHER: format_addresses(["127.0.0.1"], server.getsockname()[1]),
            JOB: "a job",
        }
        agent_argv = [sys.executable, "-m", "hvdtrain.agent.rank_agent"]
        argv = [*agent_argv, sys.executable, "-c", program]
        with subprocess.Popen(argv, env=environ) as agent:
            try:
                connection, _ = server.accept()
                usage = _until(connection, "usage")
                connection.sendall(encode("stop", signal=15, grace_s=1.0))
                _until(connection, "end")
                connection.sendall(encode("bye"))
                agent.wait(20)
            finally:
                agent.kill()
            connection.close()
    return usage["gpu"], usage["gpu_bytes"]


def _until(connection: socket.socket, kind: str) -> dict[str, Any]:
    """Return the first message of a kind."""
    connection.settimeout(20)
    decoder = Decoder()
    while (messages := receive(connection, decoder)) is not None:
        for message in messages:
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no {kind} received")
