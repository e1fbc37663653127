"""The GPUs of a host, through a fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cluster.placement import visible_entries
from tests.harness.fake_driver import GIB, FakeDriver, uuid_of

A, B, C = uuid_of("a"), uuid_of("b"), uuid_of("c")
PART0, PART1 = uuid_of("0", "MIG"), uuid_of("1", "MIG")

# The GPU with the highest bus ID is the fastest.
MIXED = f"""
driver 570.86
gpu {A}
model NVIDIA T4
bus 0000:3B:00.0
memory {16 * GIB}
gpu {B}
model NVIDIA H100
bus 0000:5E:00.0
memory {80 * GIB}
used {3 * GIB}
busy 40
speed 9
process 1 {2 * GIB}
ecc 0
gpu {C}
model NVIDIA T4
bus 0000:AF:00.0
memory {16 * GIB}
"""
DIVIDED = f"""
gpu {A}
model NVIDIA A100
bus 0000:3B:00.0
memory {40 * GIB}
busy 50
ecc 3
part {PART0}
model NVIDIA A100 MIG 3g.20gb
memory {20 * GIB}
part {PART1}
model NVIDIA A100 MIG 3g.20gb
memory {20 * GIB}
used {GIB}
process 1 {GIB}
"""


@pytest.fixture
def read(fake_driver: FakeDriver, run_command) -> Callable[..., Any]:
    """Return a function that evaluates an expression in a process with fake GPUs."""

    def evaluate(description: str, expression: str, **variables: str) -> Any:
        program = (
            "import dataclasses, json, os\n"
            "from hvdtrain.cluster.gpus import *\n"
            "from hvdtrain.cluster.gpus import LaunchError\n"
            f"try: print(json.dumps({expression}))\n"
            "except LaunchError as error: print(json.dumps(str(error)))"
        )
        environ = {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None, **variables}
        environ |= fake_driver.environ(description)
        done = run_command([sys.executable, "-c", program], env=environ)
        assert done.returncode == 0, done
        return json.loads(done.stdout)

    return evaluate


def test_cuda_describes_gpus_in_its_own_order(read) -> None:
    gpus = read(MIXED, "cuda_gpus()")
    assert gpus[0] == [B, "0000:5E:00.0", "NVIDIA H100", 80 * GIB]
    assert [gpu[0] for gpu in gpus] == [B, A, C]
    by_bus = read(MIXED, "cuda_gpus()", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert [gpu[0] for gpu in by_bus] == [A, B, C]


VISIBLE = {
    "numbers": ("2,0", [C, B]),
    "spaces": (" 1", [A]),
    "UUIDs": (f"{A},{B}", [A, B]),
    "abbreviated": ("GPU-c,GPU-aaaa", [C, A]),
    "minus one": ("-1", []),
    "empty": ("", []),
    "ended by an invalid entry": ("0,-1,1", [B]),
}


@pytest.mark.parametrize(("value", "ids"), VISIBLE.values(), ids=VISIBLE)
def test_visible_gpus(read, value: str, ids: list[str]) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": value.strip()}
    entries = visible_entries({"CUDA_VISIBLE_DEVICES": value})
    assert entries is not None
    assert len(entries) == len(ids)
    cuda, driver = read(
        MIXED,
        "[[gpu.id for gpu in cuda_gpus()], "
        "[one.id for one in visible_states(GpuReader().read(9), os.environ)]]",
        **environ,
    )
    assert cuda == ids
    assert sorted(driver) == sorted(ids)


def test_all_gpus_are_visible_by_default(read) -> None:
    assert visible_entries({}) is None
    states = read(MIXED, "[one.id for one in visible_states(GpuReader().read(9), os.environ)]")
    assert states == [A, B, C]


@pytest.mark.parametrize(
    ("variables", "part"),
    [({}, PART0), ({"CUDA_VISIBLE_DEVICES": f"{PART1},{PART0}"}, PART1)],
    ids=["default", "listed"],
)
def test_cuda_shows_one_part_of_a_divided_gpu(read, variables, part: str) -> None:
    gpus = read(DIVIDED, "cuda_gpus()", **variables)
    assert gpus == [[part, "0000:3B:00.0", "NVIDIA A100 MIG 3g.20gb", 20 * GIB]]


@pytest.mark.parametrize(
    ("value", "ids"),
    [(None, [PART0]), ("0", [PART0]), (f"{PART1},{PART0}", [PART0, PART1]), ("MIG-1", [PART1])],
)
def test_parts_that_ranks_can_use(read, value: str | None, ids: list[str]) -> None:
    variables = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    expression = "[one.id for one in visible_states(GpuReader().read(9), os.environ)]"
    assert read(DIVIDED, expression, **variables) == ids


def test_a_failure_of_cuda(read) -> None:
    message = read(f"cuda 802\n{MIXED}", "cuda_gpus()")
    assert message.startswith("CUDA fails: system not yet initialized (code 802).")
    assert read("", "cuda_gpus()") == [], "no device"


def test_a_wrong_list_of_gpus(read) -> None:
    expression = "visible_states(GpuReader().read(9), os.environ)"
    assert "CUDA shows none" in read(MIXED, expression, CUDA_VISIBLE_DEVICES="7")
    assert read(MIXED, expression, CUDA_VISIBLE_DEVICES="-1") == []


STATES = "[dataclasses.asdict(one) for one in GpuReader().read(9)]"


def test_the_driver_describes_gpus(read) -> None:
    states = read(MIXED, STATES)
    assert [(one["number"], one["id"], one["model"]) for one in states] == [
        ("0", A, "NVIDIA T4"),
        ("1", B, "NVIDIA H100"),
        ("2", C, "NVIDIA T4"),
    ]
    name = Path("/proc/1/comm").read_text().strip()
    assert states[1] == {
        "number": "1",
        "id": B,
        "model": "NVIDIA H100",
        "driver": "570.86",
        "memory_bytes": 80 * GIB,
        "used_bytes": 3 * GIB,
        "busy": 40,
        "processes": [[1, name, 2 * GIB]],
        "faults": [],
    }


def test_parts_share_the_faults_of_their_gpu(read) -> None:
    states = read(DIVIDED, STATES)
    assert [(one["number"], one["id"]) for one in states] == [("0:0", PART0), ("0:1", PART1)]
    assert [one["busy"] for one in states] == [None, None]
    assert [one["used_bytes"] for one in states] == [0, GIB]
    assert [len(one["processes"]) for one in states] == [0, 1]
    expected = ["3 uncorrectable memory errors since the driver was loaded"]
    assert [one["faults"] for one in states] == [expected] * 2


FAULTS = {
    "ecc 2": "2 uncorrectable memory errors since the driver was loaded",
    "ecc 0\npending_rows 1": "faulty memory rows will be remapped at the next reset",
    "ecc 0\npending_rows 1\nfailed_rows 1": "faulty memory rows could not be remapped",
    "ecc 0\npending_pages 1": "faulty memory pages will be retired at the next reset",
    "lost 15": "GPU is lost",
}


@pytest.mark.parametrize(("lines", "fault"), FAULTS.items(), ids=FAULTS.values())
def test_faults(read, lines: str, fault: str) -> None:
    healthy, faulty = read(f"gpu {A}\necc 0\ngpu {B}\n{lines}", STATES)
    assert (healthy["faults"], faulty["faults"]) == ([], [fault])
    assert faulty["number"] == "1"


def test_a_gpu_without_memory_of_its_own(read) -> None:
    (state,) = read(f"gpu {A}\nmodel NVIDIA GB10\nshared 1", STATES)
    assert (state["id"], state["model"]) == (A, "NVIDIA GB10")
    assert (state["memory_bytes"], state["faults"]) == (0, [])


def test_a_process_with_a_shortened_name(read) -> None:
    name = "a学習プログラム".encode()[:15]
    code = "import sys, time; open('/proc/self/comm', 'wb').write(bytes.fromhex(sys.argv[1]))"
    argv = [sys.executable, "-c", f"{code}; print(flush=True); time.sleep(60)", name.hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            (state,) = read(f"gpu {A}\nprocess {process.pid} 1", STATES)
        finally:
            process.kill()
    assert state["processes"] == [[process.pid, name.decode(errors="replace"), 1]]


def test_the_counters_of_faults_are_optional(read) -> None:
    (state,) = read(f"gpu {A}\necc 2", STATES.replace("()", "(faults=False)"))
    assert state["faults"] == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [("nvml 18", "RM has detected an NVML/RM version mismatch."), ("hang 1", "within 0.2 s")],
)
def test_a_failure_of_the_driver(read, lines: str, message: str) -> None:
    assert message in read(f"{lines}\n{MIXED}", "GpuReader().read(0.2)")


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
def test_a_host_without_a_driver(run_command) -> None:
    program = "from hvdtrain.cluster.gpus import *; print(cuda_gpus(), GpuReader().read(9))"
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "[] []\n"), done
