from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hvdtrain.check.cli import format_report
from hvdtrain.check.host_checks import find_problems
from hvdtrain.cluster.gpus import GpuState
from hvdtrain.remote.remote_probe import Answer, clock_offset_s
from tests.check.answers import GPU, PYTHON, VERSIONS, answer, facts, lost, problems, the_problem

# Facts of a host, summary, whether it is an error, part of the remedy.
CASES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "folder absent": (
        {"folder": "absent"},
        "the working directory does not exist there",
        True,
        "such as one on NFS",
    ),
    "folder not shared": (
        {"folder": "other"},
        "the working directory exists there, but is not shared",
        False,
        "put checkpoints on a file system that all hosts share",
    ),
    "unknown name": (
        {"names": {"a": (), "b": ("10.0.0.2",)}},
        "the name a can't be resolved there",
        True,
        "getent hosts a must find it",
    ),
    "loopback": (
        {"names": {"a": ("127.0.1.1",), "b": ("127.0.1.1",)}},
        "the name a resolves to a loopback address there, which is the host itself",
        True,
        "remove a from the lines of 127.0.0.1",
    ),
    "loopback, IPv6": (
        {"names": {"a": ("10.0.0.1", "::1")}},
        "the name a resolves to a loopback address there, which is the host itself",
        True,
        "remove a from",
    ),
    "no connection": (
        {"back_error": "10.0.0.9: timed out"},
        "it can't connect to the launcher over TCP (10.0.0.9: timed out)",
        True,
        "firewall",
    ),
    "little shared memory": (
        {"shm_bytes": 64_000_000, "shm_free_bytes": 60_000_000},
        "/dev/shm has 60 MB free of 64 MB",
        False,
        "size=1G /dev/shm",
    ),
    "locked memory": (
        {"infiniband": ("mlx5_0",), "memlock_bytes": 65536},
        "InfiniBand is present, but locked memory is limited (ulimit -l)",
        False,
        "memlock unlimited",
    ),
    "clock ahead": (
        {"started_s": 105.5, "ended_s": 106.0},
        "its clock is 5.0 s ahead of the launcher's",
        False,
        "timedatectl set-ntp true",
    ),
    "clock behind": (
        {"started_s": 98.0, "ended_s": 98.5},
        "its clock is 2.5 s behind the launcher's",
        False,
        "timedatectl set-ntp true",
    ),
    "few cores": ({"cores": 1}, "2 ranks share 1 core", False, "-H b:1"),
    "load": ({"load": 9.5}, "it is busy: its load is 9.5 on 8 cores", False, "top"),
    "GPU driver": (
        {"gpu_error": "The GPU driver fails: Driver Not Loaded."},
        "The GPU driver fails: Driver Not Loaded",
        True,
        "CUDA_VISIBLE_DEVICES=-1",
    ),
    "another backend": (
        {"backend": "jax"},
        "Keras' backend differs: tensorflow on a; jax on b",
        True,
        "export KERAS_BACKEND=tensorflow",
    ),
    "no import": (
        {"backend_error": "ImportError: libcudart.so"},
        "TensorFlow can't be imported (ImportError: libcudart.so)",
        True,
        'python -c "import tensorflow"',
    ),
    "GPUs that the framework does not see": (
        {"gpus": (GPU, GPU), "backend_gpus": 0},
        "TensorFlow sees none of its 2 GPUs",
        True,
        "hvdtrain[gpu]",
    ),
    "part failed": (
        {"errors": {"folder": "no answer in time"}},
        "this could not be checked: folder (no answer in time)",
        False,
        "dmesg",
    ),
}


@pytest.mark.parametrize(("changes", "summary", "is_error", "remedy"), CASES.values(), ids=CASES)
def test_a_problem_of_one_host(
    changes: dict[str, Any], summary: str, is_error: bool, remedy: str
) -> None:
    answers = [answer("a"), answer("b", **changes)]
    problem = the_problem(*answers)
    assert (problem.hosts, problem.summary, problem.is_error) == (("b",), summary, is_error)
    assert remedy in problem.remedy
    lines = format_report(answer("a"), answers, [problem]).splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["ok", "problem" if is_error else "warning"]


READY: dict[str, dict[str, Any]] = {
    "loopback for its own name": {"names": {"b": ("127.0.1.1",)}},
    "limited locked memory without InfiniBand": {"memlock_bytes": 65536},
    "InfiniBand without a limit": {"infiniband": ("mlx5_0",), "memlock_bytes": -1},
    "a clock within a second": {"started_s": 101.4, "ended_s": 101.9},
    "just enough shared memory": {"shm_free_bytes": 200_000_000},
    "load equal to the cores": {"load": 8.0},
}


@pytest.mark.parametrize("changes", READY.values(), ids=READY)
def test_no_problem(changes: dict[str, Any]) -> None:
    assert problems(answer("a"), answer("b", **changes)) == []


def test_a_single_rank_needs_no_shared_memory() -> None:
    assert problems(answer("a"), answer("b", 1, shm_free_bytes=0)) == []


def test_a_name_that_the_launcher_can_not_resolve_is_reported_once() -> None:
    problem = the_problem(answer("a", names={"x": ()}), lost("x", "unknown name"))
    assert problem.hosts == ("x",)


def test_two_names_of_one_machine() -> None:
    problem = the_problem(answer("a"), answer("b", machine="a boot"))
    assert (problem.hosts, problem.summary) == (
        ("a", "b"),
        "these names belong to the same machine",
    )
    assert "-H a:2" in problem.remedy


def test_a_read_only_folder() -> None:
    problem = the_problem(answer("a", folder=""), answer("b", folder=""), folder="")
    assert problem.hosts == ()
    assert not problem.is_error


def test_gpus() -> None:
    alike = [answer("a", gpus=(GPU, GPU)), answer("b", gpus=(GPU, GPU))]
    assert problems(*alike) == []
    assert format_report(answer("a"), alike, []).count(" 2 NVIDIA H200 ") == 2
    older = dataclasses.replace(GPU, driver="550")
    few, other = problems(answer("a", gpus=(GPU, GPU)), answer("b", gpus=(older,)), answer("c"))
    assert few.summary == "it has 1 GPU for 2 ranks"
    assert few.is_error
    assert (other.hosts, other.is_error) == (("a", "b"), False)
    assert other.summary == (
        "GPUs differ: NVIDIA H200, driver 570.86 (141 GiB) on a; "
        "NVIDIA H200, driver 550 (141 GiB) on b"
    )
    unused = [answer("a"), answer("b", gpus=(GPU,))]
    assert find_problems(answer("a"), unused, method="ssh", python=PYTHON, use_gpus=False) == []


def test_a_part_of_a_gpu_for_two_ranks() -> None:
    part = dataclasses.replace(GPU, number="0:0", model="NVIDIA H200 MIG 1g.18gb")
    problem = the_problem(answer("a", gpus=(part,)))
    assert "CUDA_VISIBLE_DEVICES=MIG-...,MIG-..." in problem.remedy


def test_faulty_gpus() -> None:
    faulty = dataclasses.replace(GPU, number="1", faults=("2 errors",))
    used = dataclasses.replace(GPU, number="2", processes=((4, "python", 3 << 30),))
    lost = GpuState(number="3", driver="570.86", faults=("GPU is lost",))
    three = problems(answer("a", gpus=(GPU, faulty, faulty, used, lost)))
    assert [(one.hosts, one.is_error) for one in three] == [(("a",), False)] * 3
    assert [one.summary for one in three] == [
        "GPU 1 (NVIDIA H200, GPU-0) is faulty: 2 errors",
        "GPU 2 (NVIDIA H200, GPU-0) is in use by process 4 (python, 3 GiB)",
        "GPU 3 is faulty: GPU is lost",
    ]
    few, _ = problems(answer("a", gpus=(GPU, lost)))
    assert few.summary == "it has 1 GPU for 2 ranks"


def test_a_slow_answer_is_not_a_clock_offset() -> None:
    slow = Answer(
        host="b", ranks=2, facts=facts("b", started_s=108.0, ended_s=108.5),
        asked_s=100.0, answered_s=109.0,
    )  # fmt: skip
    assert clock_offset_s(slow) == (3.75, 4.25)
    assert problems(answer("a"), slow) == []
    assert "  +0.0 s\n" in format_report(answer("a"), [slow], [])


WITHOUT_TENSORFLOW = {name: text for name, text in VERSIONS.items() if name != "tensorflow"}
# Builds of one version don't differ, and neither do frameworks that aren't in use.
ON_TORCH = {
    "backend": "torch",
    "versions": {**WITHOUT_TENSORFLOW, "torch": "2.13.0+cpu", "jax": "0.10.2"},
}
OLDER_TORCH = {**VERSIONS, "torch": "2.3.0"}
# Facts of the launcher and of the hosts, affected hosts, summary, part of the remedy.
DIFFERENCES: dict[str, tuple[dict[str, Any], list[Answer], tuple[str, ...], str, str]] = {
    "one host differs": (
        {},
        [answer("a"), answer("b", versions={**VERSIONS, "keras": "3.12.0"}), answer("c")],
        ("b",),
        "Keras differs: 3.15.1 on a, c; 3.12.0 on b",
        "there: python -m pip install keras==3.15.1",
    ),
    "launcher differs": (
        {"python": "3.12.1"},
        [answer("b"), answer("c")],
        ("b", "c"),
        "Python differs: 3.12.1 on the launcher; 3.11.7 on b, c",
        "use one environment that all hosts share",
    ),
    "missing on one host": (
        {},
        [answer("a"), answer("b", versions=WITHOUT_TENSORFLOW)],
        ("b",),
        "TensorFlow differs: 2.21.0 on a; none on b",
        "there: python -m pip install tensorflow==2.21.0",
    ),
    "missing on the launcher": (
        {"versions": {**VERSIONS, "keras": ""}},
        [answer("b"), answer("c")],
        ("b", "c"),
        "Keras differs: none on the launcher; 3.15.1 on b, c",
        "on the launcher: python -m pip install keras==3.15.1",
    ),
    "missing everywhere": (
        {"versions": WITHOUT_TENSORFLOW},
        [answer(name, versions=WITHOUT_TENSORFLOW) for name in "ab"],
        ("a", "b"),
        "TensorFlow is missing",
        'pip install "hvdtrain[cpu]"',
    ),
    "framework in use": (
        ON_TORCH,
        [answer("a", **ON_TORCH), answer("b", **{**ON_TORCH, "versions": OLDER_TORCH})],
        ("b",),
        "PyTorch differs: 2.13.0 on a; 2.3.0 on b",
        "there: python -m pip install torch==2.13.0",
    ),
    "framework in use missing everywhere": (
        {"backend": "jax"},
        [answer("b", backend="jax")],
        ("b",),
        "JAX is missing",
        'pip install "hvdtrain[jax]"; to compute with another framework: export '
        "KERAS_BACKEND=tensorflow or torch",
    ),
    "MPI can't be loaded": (
        {},
        [answer("a"), answer("b", mpi="", mpi_error="RuntimeError: cannot load MPI library")],
        ("b",),
        "MPI differs: Open MPI v5.0.11 on a; none on b (RuntimeError: cannot load MPI library)",
        "load the same MPI module on all hosts",
    ),
}


@pytest.mark.parametrize(
    ("launcher", "answers", "hosts", "summary", "remedy"), DIFFERENCES.values(), ids=DIFFERENCES
)
def test_different_versions(
    launcher: dict[str, Any],
    answers: list[Answer],
    hosts: tuple[str, ...],
    summary: str,
    remedy: str,
) -> None:
    problem = the_problem(*answers, **launcher)
    assert (problem.hosts, problem.summary) == (hosts, summary)
    assert remedy in problem.remedy


def test_other_frameworks_may_differ() -> None:
    cuda = {"backend": "torch", "versions": {**VERSIONS, "torch": "2.13.0"}}
    answers = [answer("a", **ON_TORCH), answer("b", **cuda)]
    assert problems(*answers, **ON_TORCH) == []
    assert "hvdtrain 0.1.0, PyTorch 2.13.0, Keras" in format_report(
        answer("a", **cuda), answers, []
    )


def test_a_backend_that_hvdtrain_does_not_support() -> None:
    problem = the_problem(answer("a", backend="numpy"), backend="numpy")
    assert problem.summary == "hvdtrain does not support numpy, the backend of Keras here"


def test_errors_come_before_warnings() -> None:
    all_problems = problems(answer("a", folder="other"), answer("b", back_error="no"))
    assert [problem.is_error for problem in all_problems] == [True, False]
