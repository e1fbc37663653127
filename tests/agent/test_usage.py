from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from hvdtrain.agent import usage
from hvdtrain.agent.messages import JOB, Decoder, encode, format_addresses, receive
from hvdtrain.agent.rank_report import Usage, read_record
from hvdtrain.agent.usage import UNKNOWN, Gpu, GpuUsage, GpuWatch, UsageWatch, gpu_usage, own_gpu
from hvdtrain.config import LAUNCHER
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
        super().__init__("")
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
    watch = UsageWatch(GpuWatch(""))
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
    assert UsageWatch(GpuWatch("")).look(2**22 + 1) == Usage(rss_bytes=0, cpu=0.0)


def test_a_host_without_psutil_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "INTERVAL_S", 0.0)
    monkeypatch.setitem(sys.modules, "psutil", None)
    watch = UsageWatch(GpuWatch(""))
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
    Gpu(number=0, uuid="GPU-aa11", busy=90, used_bytes=70, processes={10: 30, 20: 40}),
    Gpu(number=1, uuid="GPU-bb22", busy=20, used_bytes=55, processes={11: 50}),
    Gpu(number=2, uuid="GPU-cc33", busy=None, used_bytes=5, processes={12: 5}),
    Gpu(number=3, uuid="GPU-bb44", busy=0, used_bytes=1),
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
        ({11}, "0", (20.0, 50)),
        ({1, 2}, "1", (20.0, 55)),
        ({1, 2}, "GPU-cc33", (None, 5)),
        ({1, 2}, "GPU-bb2", (20.0, 55)),
        ({1, 2}, "", UNKNOWN),
        ({1, 2}, "-1", UNKNOWN),
        ({1, 2}, "7", UNKNOWN),
        ({1, 2}, "MIG-0123", UNKNOWN),
    ],
)
def test_gpu_usage(pids: set[int], own: str, expected: GpuUsage) -> None:
    assert gpu_usage(GPUS, pids, own) == expected


@pytest.mark.parametrize(
    ("visible", "place", "expected"),
    [
        (None, (0, 1), ""),
        ("", (0, 1), ""),
        ("-1", (1, 2), "-1"),
        ("3", (1, 2), "3"),
        ("4,7", (0, 2), "4"),
        ("4, 7", (1, 2), "7"),
        ("GPU-aa,GPU-bb", (1, 2), "GPU-bb"),
        ("4,7", (2, 3), ""),
    ],
)
def test_own_gpu(visible: str | None, place: tuple[int, int], expected: str) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert own_gpu(environ, *place) == expected


def _driver(**functions: Any) -> ModuleType:
    """Return a replacement of the module ``pynvml``."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_gpus_without_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = GpuWatch("0")
    assert watch.look({1}) == UNKNOWN
    assert watch.look({1}) == UNKNOWN


def test_a_missing_driver_is_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = []

    def init() -> None:
        queries.append(1)
        raise driver.NVMLError("NVML Shared Library Not Found")

    driver = _driver(nvmlInit=init)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    assert [watch.look({1}) for _ in range(3)] == [UNKNOWN] * 3
    assert queries == [1]


def test_a_lost_gpu_is_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Iterator[int | None] = iter([None, 0])

    def count() -> int:
        if (number := next(counts)) is None:
            raise driver.NVMLError("GPU is lost")
        return number

    driver = _driver(nvmlInit=lambda: None, nvmlDeviceGetCount=count)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    assert watch.look({1}) == UNKNOWN
    assert watch.look({1}) == UNKNOWN
    assert next(counts, "end") == "end"


def test_a_hanging_driver_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    queries = []
    finished = threading.Event()

    def init() -> None:
        queries.append(1)
        finished.wait()
        raise driver.NVMLError("GPU is lost")

    driver = _driver(nvmlInit=init)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    assert [watch.look({1}) for _ in range(5)] == [UNKNOWN] * 5
    assert queries == [1]
    finished.set()


# A pynvml with two GPUs; children of the calling agent compute on the second.
_PYNVML = """
import os
from pathlib import Path
from types import SimpleNamespace

class NVMLError(Exception):
    pass

def nvmlInit(): pass
def nvmlDeviceGetCount(): return 2
def nvmlDeviceGetHandleByIndex(number): return number
def nvmlDeviceGetUUID(handle): return f"GPU-{handle}"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(used=9 << 30)

def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=[10, 85][handle])

def nvmlDeviceGetComputeRunningProcesses(handle):
    if handle == 0:
        return [SimpleNamespace(pid=1, usedGpuMemory=None)]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [SimpleNamespace(pid=int(pid), usedGpuMemory=3 << 30) for pid in children]
"""


@pytest.mark.slow
def test_an_agent_reports_gpu_usage(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(_PYNVML)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(20)
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)]),
            LAUNCHER: format_addresses(["127.0.0.1"], server.getsockname()[1]),
            JOB: "a job",
        }
        argv = [sys.executable, "-m", "hvdtrain.agent.rank_agent", "sleep", "60"]
        with subprocess.Popen(argv, env=environ) as agent:
            try:
                connection, _ = server.accept()
                usage_message = _until(connection, "usage")
                connection.sendall(encode("stop", signal=15, grace_s=1.0))
                _until(connection, "end")
                connection.sendall(encode("bye"))
                agent.wait(20)
            finally:
                agent.kill()
            connection.close()
    assert (usage_message["gpu"], usage_message["gpu_bytes"]) == (85.0, 3 << 30)


def _until(connection: socket.socket, kind: str) -> dict[str, Any]:
    """Return the first message of a kind."""
    connection.settimeout(20)
    decoder = Decoder()
    while (messages := receive(connection, decoder)) is not None:
        for message in messages:
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no {kind} received")
