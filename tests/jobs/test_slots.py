"""The slots of this host, which jobs wait for.

Each job of these tests is a process, because file locks belong to processes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.errors import JobError
from hvdtrain.jobs.slots import SlotQueue, acquire_slots, gpu_variables, slots_by_host

_WAIT = """
import sys, time
from pathlib import Path
from hvdtrain.jobs.slots import SlotQueue
directory, name, wanted, slots = sys.argv[1:]
queue = SlotQueue(Path(directory), name, wanted={"a": int(wanted)}, slots={"a": int(slots)})
print("waiting", flush=True)
while not queue.try_acquire():
    time.sleep(0.01)
print("running", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, int], subprocess.Popen[str]]]:
    """Start a job that needs one or both of two slots. It ends when its stdin is closed."""
    jobs = contextlib.ExitStack()

    def begin(name: str, wanted: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", _WAIT, str(tmp_path / "queue"), name, str(wanted), "2"]
        process = jobs.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        jobs.callback(process.kill)
        _expect(process, "waiting")
        return process

    with jobs:
        yield begin


def _expect(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


def _waiting(tmp_path: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (tmp_path / "queue" / "waiting").iterdir())


def test_first_come_first_served(tmp_path: Path, start) -> None:
    first = start("first", 1)
    _expect(first, "running")
    # The second job needs both slots. The third would fit next to the first, but it came later.
    second, third = start("second", 2), start("third", 1)
    time.sleep(0.2)
    assert _waiting(tmp_path) == ["second", "third"]
    first.stdin.close()
    _expect(second, "running")
    assert _waiting(tmp_path) == ["third"]
    # The slots of a killed job are free.
    second.kill()
    _expect(third, "running")
    assert _waiting(tmp_path) == []


def test_a_killed_waiting_job_does_not_block_the_queue(start) -> None:
    first = start("first", 2)
    _expect(first, "running")
    second, third = start("second", 2), start("third", 2)
    second.kill()
    second.wait(timeout=10)
    first.stdin.close()
    _expect(third, "running")


def test_a_job_that_needs_more_slots_than_exist_takes_all(tmp_path: Path) -> None:
    def queue(name: str, slots: dict[str, int], **wanted: int) -> SlotQueue:
        return SlotQueue(tmp_path, name, wanted=wanted, slots=slots)

    big = queue("big", {"a": 2}, a=5)
    assert big.try_acquire()
    assert (big.held("a"), big.held("b")) == ([0, 1], [])
    assert queue("other host", {"b": 1}, b=1).try_acquire()
    small = queue("small", {"a": 2}, a=1)
    assert not small.try_acquire()
    # A waiting job blocks only the hosts that it needs.
    assert queue("free host", {"c": 1}, c=1).try_acquire()
    both = queue("both", {"a": 2, "d": 1}, a=1, d=1)
    behind = queue("behind", {"d": 1}, d=1)
    assert not both.try_acquire()
    assert not behind.try_acquire()
    big.release()
    assert small.try_acquire()
    assert small.try_acquire(), "it keeps its slot"


def test_an_unusable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"the queue in .*/file can't be used: "):
        SlotQueue(tmp_path / "file", "a", wanted={"a": 1}, slots={"a": 1})


def test_slots_of_this_host_are_its_gpus_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.jobs.slots.available_cores", lambda: 3)
    hosts = [Host(name="localhost", slots=8), Host(name="node.invalid", slots=4)]
    assert slots_by_host(hosts, gpus=0) == {"localhost": 3, "node.invalid": 4}
    assert slots_by_host(hosts, gpus=2) == {"localhost": 2, "node.invalid": 4}


VISIBLE = {
    "no-gpus": ({}, {"localhost": [0]}, 0, None),
    "all": ({}, {"localhost": [1, 3]}, 4, "1,3"),
    "restricted": ({"CUDA_VISIBLE_DEVICES": "4,7,GPU-8f"}, {"localhost": [1, 2]}, 3, "7,GPU-8f"),
    "remote": ({}, {"node.invalid": [0]}, 2, None),
    "both": ({}, {"localhost": [1], "node.invalid": [0]}, 2, "1"),
}


@pytest.mark.parametrize(("environ", "taken", "gpus", "visible"), VISIBLE.values(), ids=VISIBLE)
def test_a_job_sees_the_gpus_of_its_slots(environ, taken, gpus, visible) -> None:
    variables = gpu_variables(environ, taken, gpus)
    assert variables == ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})


@pytest.mark.timeout(60)
def test_machines_that_share_a_folder_have_their_own_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def acquire(name: str, received: list[int]) -> object:
        return acquire_slots(tmp_path / name, {"localhost": 1}, {"localhost": 1}, received)

    assert acquire("first", []) == {"localhost": [0]}
    received: list[int] = []
    timer = threading.Timer(0.5, received.append, (signal.SIGTERM,))
    timer.start()
    assert acquire("second", received) is None, "the first has the slot"
    timer.join(10)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("another machine")
    monkeypatch.setattr("hvdtrain.jobs.state._BOOT_ID", boot_id)
    assert acquire("elsewhere", []) == {"localhost": [0]}
