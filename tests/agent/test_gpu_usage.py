from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hvdtrain.agent import gpu_usage
from hvdtrain.agent.gpu_usage import Gpu, GpuUsage, GpuWatch, gpus_of, own_gpu
from hvdtrain.agent.messages import JOB, Decoder, encode, format_addresses, receive
from hvdtrain.config import LAUNCHER
from tests.harness.jobs import REPOSITORY

GPUS = [
    Gpu(number=0, uuid="GPU-aa11", busy=90, used_bytes=70, processes={10: 30, 20: 40}),
    Gpu(number=1, uuid="GPU-bb22", busy=20, used_bytes=55, processes={11: 50}),
    Gpu(number=2, uuid="GPU-cc33", busy=None, used_bytes=5, processes={12: 5}),
    Gpu(number=3, uuid="GPU-bb44", busy=0, used_bytes=1),
]


@pytest.mark.parametrize(
    ("pids", "own", "expected"),
    [
        ({10}, "", GpuUsage(gpu=90.0, gpu_bytes=30)),
        ({10, 20, 99}, "", GpuUsage(gpu=90.0, gpu_bytes=70)),
        ({10, 11}, "", GpuUsage(gpu=55.0, gpu_bytes=80)),
        ({11, 12}, "", GpuUsage(gpu=20.0, gpu_bytes=55)),
        ({12}, "", GpuUsage(gpu=None, gpu_bytes=5)),
        # What the driver knows of processes comes first.
        ({11}, "0", GpuUsage(gpu=20.0, gpu_bytes=50)),
        ({1, 2}, "1", GpuUsage(gpu=20.0, gpu_bytes=55)),
        ({1, 2}, "GPU-cc33", GpuUsage(gpu=None, gpu_bytes=5)),
        ({1, 2}, "GPU-bb2", GpuUsage(gpu=20.0, gpu_bytes=55)),
        ({1, 2}, "", None),
        ({1, 2}, "-1", None),
        ({1, 2}, "7", None),
        ({1, 2}, "MIG-0123", None),
    ],
)
def test_what_a_rank_takes_of_gpus(pids: set[int], own: str, expected: GpuUsage | None) -> None:
    assert gpus_of(GPUS, pids, own) == expected


@pytest.mark.parametrize(
    ("shown", "place", "expected"),
    [
        (None, (0, 1), ""),
        ("", (0, 1), ""),
        ("-1", (1, 2), "-1"),
        ("3", (1, 2), "3"),
        ("4,7", (0, 2), "4"),
        ("4, 7", (1, 2), "7"),
        ("GPU-aa,GPU-bb", (1, 2), "GPU-bb"),
        # It is not said which.
        ("4,7", (2, 3), ""),
    ],
)
def test_which_gpu_is_a_ranks(shown: str | None, place: tuple[int, int], expected: str) -> None:
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert own_gpu(environ, *place) == expected


def _driver(**functions: Any) -> ModuleType:
    """A module in the place of ``pynvml``."""
    module: Any = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def test_without_nvidias_package_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    watch = GpuWatch("0")
    assert watch.look({1}) is None
    assert watch.look({1}) is None


def test_without_a_driver_nobody_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def init() -> None:
        asked.append(1)
        raise driver.NVMLError("NVML Shared Library Not Found")

    driver = _driver(nvmlInit=init)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    assert [watch.look({1}) for _ in range(3)] == [None] * 3
    assert asked == [1]


def test_a_gpu_that_is_lost_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Iterator[int | None] = iter([None, 0])

    def count() -> int:
        if (number := next(counts)) is None:
            raise driver.NVMLError("GPU is lost")
        return number

    driver = _driver(nvmlInit=lambda: None, nvmlDeviceGetCount=count)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    assert watch.look({1}) is None
    assert watch.look({1}) is None
    assert next(counts, "asked twice") == "asked twice"


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    over = threading.Event()

    def init() -> None:
        asked.append(1)
        over.wait()
        raise driver.NVMLError("GPU is lost")

    driver = _driver(nvmlInit=init)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    watch = GpuWatch("0")
    began_s = time.monotonic()
    assert [watch.look({1}) for _ in range(5)] == [None] * 5
    # It is waited for once.
    assert time.monotonic() - began_s < 5 * gpu_usage.PATIENCE_S
    assert asked == [1]
    over.set()


# Two GPUs, on the second of which computes whoever's parent is the agent that asks.
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
def test_an_agent_tells_the_gpus_of_its_rank(tmp_path: Path) -> None:
    """A real agent with a rank; as there is no GPU here, NVIDIA's package is a stand-in."""
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
                told = _until(connection, "usage")
                connection.sendall(encode("stop", signal=15, grace_s=1.0))
                _until(connection, "end")
                connection.sendall(encode("bye"))
                agent.wait(20)
            finally:
                agent.kill()
            connection.close()
    assert (told["gpu"], told["gpu_bytes"]) == (85.0, 3 << 30)


def _until(connection: socket.socket, kind: str) -> dict[str, Any]:
    """The first message of a kind that comes."""
    connection.settimeout(20)
    decoder = Decoder()
    while (messages := receive(connection, decoder)) is not None:
        for message in messages:
            if message["kind"] == kind:
                return message
    raise AssertionError(f"no {kind} came")
