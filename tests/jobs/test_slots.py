"""Jobs wait for slots of each other; each is a process, as the kernel's locks are theirs."""

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
from hvdtrain.jobs.slots import SlotQueue, await_slots, gpu_variables, slots_of

_WAITS = """
import sys, time
from pathlib import Path
from hvdtrain.jobs.slots import SlotQueue
directory, name, wanted, slots = sys.argv[1:]
queue = SlotQueue(Path(directory), name, wanted={"a": int(wanted)}, slots={"a": int(slots)})
print("waits", flush=True)
while not queue.try_acquire():
    time.sleep(0.01)
print("runs", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, int], subprocess.Popen[str]]]:
    """Starts a job that waits for some of two slots, and goes when its stdin closes."""
    jobs = contextlib.ExitStack()

    def begin(name: str, wanted: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", _WAITS, str(tmp_path / "queue"), name, str(wanted), "2"]
        process = jobs.enter_context(
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        jobs.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        return process

    with jobs:
        yield begin


def _runs(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"


def _places(tmp_path: Path) -> list[str]:
    return sorted(path.name.split("-")[1] for path in (tmp_path / "queue" / "waiting").iterdir())


def test_first_come_first_served(tmp_path: Path, start) -> None:
    first = start("first", 1)
    _runs(first)
    # Needs both; the third would fit in beside the first, and comes later all the same.
    second, third = start("second", 2), start("third", 1)
    time.sleep(0.2)
    assert _places(tmp_path) == ["second", "third"]
    first.stdin.close()
    _runs(second)
    assert _places(tmp_path) == ["third"]
    # However a job ends, its slots are free.
    second.kill()
    _runs(third)
    assert _places(tmp_path) == []


def test_who_dies_in_the_queue_holds_nobody_up(tmp_path: Path, start) -> None:
    first = start("first", 2)
    _runs(first)
    second, third = start("second", 2), start("third", 2)
    second.kill()
    second.wait(timeout=10)
    first.stdin.close()
    _runs(third)


def test_who_needs_more_than_there_are_takes_all(tmp_path: Path) -> None:
    big = SlotQueue(tmp_path, "big", wanted={"a": 5}, slots={"a": 2})
    assert big.try_acquire()
    assert big.held("a") == [0, 1]
    assert big.held("b") == []
    # Other hosts are free.
    other = SlotQueue(tmp_path, "other", wanted={"b": 1}, slots={"b": 1})
    assert other.try_acquire()
    small = SlotQueue(tmp_path, "small", wanted={"a": 1}, slots={"a": 2})
    assert not small.try_acquire()
    # Who waits for one host holds nobody up on another, unless the job needs both.
    free = SlotQueue(tmp_path, "free", wanted={"c": 1}, slots={"c": 1})
    assert free.try_acquire()
    both = SlotQueue(tmp_path, "both", wanted={"a": 1, "d": 1}, slots={"a": 2, "d": 1})
    behind = SlotQueue(tmp_path, "behind", wanted={"d": 1}, slots={"d": 1})
    assert not both.try_acquire()
    assert not behind.try_acquire()
    big.release()
    assert small.try_acquire()
    assert small.try_acquire(), "and still"


def test_a_place_that_is_given_up_is_gone(tmp_path: Path) -> None:
    first = SlotQueue(tmp_path, "first", wanted={"a": 1}, slots={"a": 1})
    second = SlotQueue(tmp_path, "second", wanted={"a": 1}, slots={"a": 1})
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()


def test_a_queue_that_can_not_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match=r"the queue in .*/file can't be used: "):
        SlotQueue(tmp_path / "file", "a", wanted={"a": 1}, slots={"a": 1})


HOSTS = [Host(name="localhost", slots=8), Host(name="node.invalid", slots=4)]


def test_slots_of_this_host_are_its_gpus_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.jobs.slots.available_cores", lambda: 3)
    assert slots_of(HOSTS, gpus=0) == {"localhost": 3, "node.invalid": 4}
    assert slots_of(HOSTS, gpus=2) == {"localhost": 2, "node.invalid": 4}


VISIBLE = {
    "no-gpus": ({}, {"localhost": [0]}, 0, None),
    "all": ({}, {"localhost": [1, 3]}, 4, "1,3"),
    "named": ({"CUDA_VISIBLE_DEVICES": "4,7,GPU-8f"}, {"localhost": [1, 2]}, 3, "7,GPU-8f"),
    "elsewhere": ({}, {"node.invalid": [0]}, 2, None),
    "both": ({}, {"localhost": [1], "node.invalid": [0]}, 2, "1"),
}


@pytest.mark.parametrize(("environ", "taken", "gpus", "seen"), VISIBLE.values(), ids=VISIBLE)
def test_a_job_sees_the_gpus_whose_slots_it_has(environ, taken, gpus, seen) -> None:
    found = gpu_variables(environ, taken, gpus)
    assert found == ({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})


@pytest.mark.timeout(60)
def test_machines_that_share_a_folder_have_slots_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(name: str, received: list[int]) -> object:
        return await_slots(tmp_path / name, {"localhost": 1}, {"localhost": 1}, received)

    assert wait("first", []) == {"localhost": [0]}
    received: list[int] = []
    timer = threading.Timer(0.5, received.append, (signal.SIGTERM,))
    timer.start()
    assert wait("second", received) is None, "the first has the slot"
    timer.join(10)
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("that of another machine")
    monkeypatch.setattr("hvdtrain.jobs.state._BOOT_ID", boot_id)
    assert wait("elsewhere", []) == {"localhost": [0]}
