from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.launch.turn import await_turn, gpu_variables, slots_of

HOSTS = [Host(name="localhost", slots=8), Host(name="node.invalid", slots=4)]


def test_slots_of_this_host_are_its_gpus_or_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.launch.turn.available_cores", lambda: 3)
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
        return await_turn(tmp_path / name, {"localhost": 1}, {"localhost": 1}, received)

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
