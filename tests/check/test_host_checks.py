"""What can be wrong with hosts that answered, what is no problem, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.check.check_report import make_report
from hvdtrain.remote.problem import Problem
from hvdtrain.remote.remote_probe import Answer, clock_offset_s
from tests.check.answers import GPU, PYTHON, VERSIONS, answer, facts, lost, problems, the_problem

# What a host says, what is found, whether that is an error, a piece of the remedy.
CASES: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "no folder": (
        {"folder": "absent"},
        "the current folder does not exist there",
        True,
        "such as one on NFS",
    ),
    "another folder": (
        {"folder": "other"},
        "a folder of this path exists there, but it is another one",
        False,
        "put checkpoints on a file system that all hosts share",
    ),
    "unknown name": (
        {"names": {"a": (), "b": ("10.0.0.2",)}},
        "the name a is unknown there",
        True,
        "getent hosts a must find it",
    ),
    "loopback": (
        {"names": {"a": ("127.0.1.1",), "b": ("127.0.1.1",)}},
        "there, the name a means the host itself: it has a loopback address",
        True,
        "take a out of the lines of 127.0.0.1",
    ),
    "loopback, IPv6": (
        {"names": {"a": ("10.0.0.1", "::1")}},
        "there, the name a means the host itself: it has a loopback address",
        True,
        "take a out",
    ),
    "no way back": (
        {"back": "", "back_error": "10.0.0.9: timed out"},
        "the launcher can't be reached from there over TCP (10.0.0.9: timed out)",
        True,
        "firewall",
    ),
    "little shared memory": (
        {"shm_bytes": 64_000_000, "shm_free_bytes": 60_000_000},
        "/dev/shm has 60 MB free of 64 MB",
        False,
        "size=1G /dev/shm",
    ),
    "hardly any shared memory": (
        {"shm_bytes": 64_000_000, "shm_free_bytes": 23_000_000},
        "/dev/shm has 23 MB free of 64 MB",
        False,
        "--shm-size=1g",
    ),
    "locked memory": (
        {"infiniband": ("mlx5_0",), "memlock_bytes": 65536},
        "there is InfiniBand, but programs may lock little memory (ulimit -l)",
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
    "few cores": ({"cores": 1}, "2 ranks are to share 1 cores", False, "-H b:1"),
    "load": ({"load": 9.5}, "others compute there: its load is 9.5 on 8 cores", False, "top"),
    "nvidia-smi": (
        {"gpu_error": "Driver/library version mismatch"},
        "nvidia-smi is there, but fails: Driver/library version mismatch",
        True,
        "CUDA_VISIBLE_DEVICES=-1",
    ),
    "unanswered": (
        {"errors": {"folder": "no answer in time"}},
        "this could not be found out: folder (no answer in time)",
        False,
        "dmesg",
    ),
}


@pytest.mark.parametrize(("changes", "found", "error", "remedy"), CASES.values(), ids=CASES)
def test_what_a_host_can_have(
    changes: dict[str, Any], found: str, error: bool, remedy: str
) -> None:
    answers = [answer("a"), answer("b", **changes)]
    problem = the_problem(*answers)
    assert (problem.hosts, problem.found, problem.error) == (("b",), found, error)
    assert remedy in problem.remedy
    diagnosis = make_report(answer("a"), answers, way="ssh", python=PYTHON)
    assert diagnosis.fit is not error
    assert [row[1] for row in diagnosis.rows] == ["ok", "problem" if error else "warning"]


NOTHING: dict[str, dict[str, Any]] = {
    "its own name may be a loopback": {"names": {"b": ("127.0.1.1",)}},
    "little locked memory without InfiniBand": {"memlock_bytes": 65536},
    "InfiniBand without a limit": {"infiniband": ("mlx5_0",), "memlock_bytes": -1},
    "a clock within a second": {"started_s": 101.4, "ended_s": 101.9},
    "just enough shared memory": {"shm_free_bytes": 200_000_000},
    "a load that is its own size": {"load": 8.0},
}


@pytest.mark.parametrize("changes", NOTHING.values(), ids=NOTHING)
def test_what_is_no_problem(changes: dict[str, Any]) -> None:
    assert problems(answer("a"), answer("b", **changes)) == []


def test_shared_memory_matters_between_ranks_of_one_host() -> None:
    assert problems(answer("a"), answer("b", 1, shm_free_bytes=0)) == []


def test_a_name_that_not_even_the_launcher_knows_is_told_once() -> None:
    found = the_problem(answer("a", names={"x": ()}), lost("x", "unknown name"))
    assert found.hosts == ("x",)


def test_two_names_of_one_machine() -> None:
    found = the_problem(answer("a"), answer("b", machine="a boot"))
    assert (found.hosts, found.found) == (("a", "b"), "these names mean one machine")
    assert "-H a:2" in found.remedy


def test_a_folder_that_can_not_be_written() -> None:
    found = the_problem(answer("a", folder=""), answer("b", folder=""), folder="")
    assert found.hosts == ()
    assert not found.error


def test_gpus() -> None:
    alike = [answer("a", gpus=(GPU, GPU)), answer("b", gpus=(GPU, GPU))]
    diagnosis = make_report(answer("a"), alike, way="ssh", python=PYTHON)
    assert diagnosis.problems == ()
    assert [row[5] for row in diagnosis.rows] == ["2 NVIDIA H200"] * 2
    few, other = problems(answer("a", gpus=(GPU, GPU)), answer("b", gpus=((GPU[0], "550"),)))
    assert few.found == "2 ranks, but GPUs: 1"
    assert few.error
    assert other.found == (
        "GPUs differ: NVIDIA H200, driver 570.86 on a; NVIDIA H200, driver 550 on b"
    )
    assert not other.error
    unused = [answer("a"), answer("b", gpus=(GPU,))]
    assert not make_report(answer("a"), unused, way="ssh", python=PYTHON, use_gpus=False).problems


def test_a_slow_answer_is_no_wrong_clock() -> None:
    slow = Answer(
        host="b", ranks=2, facts=facts("b", started_s=108.0, ended_s=108.5),
        asked_s=100.0, answered_s=109.0,
    )  # fmt: skip
    assert clock_offset_s(slow) == (3.75, 4.25)
    assert problems(answer("a"), slow) == []
    assert make_report(answer("a"), [slow], way="ssh", python=PYTHON).rows[0][-1] == "+0.0 s"


def test_versions_that_differ_name_who_has_what() -> None:
    other = answer("b", versions={**VERSIONS, "keras": "3.12.0"})
    assert the_problem(answer("a"), other, answer("c")) == Problem(
        hosts=("b",),
        found="Keras differs: 3.15.1 on a, c; 3.12.0 on b",
        expected="3.15.1 everywhere, as on the launcher",
        remedy="there: python -m pip install keras==3.15.1",
    )


def test_a_launcher_that_differs_from_all() -> None:
    found = the_problem(answer("b"), answer("c"), python="3.12.1")
    assert found.hosts == ("b", "c")
    assert found.found == "Python differs: 3.12.1 on the launcher; 3.11.7 on b, c"


def test_a_missing_package_is_a_difference() -> None:
    found = the_problem(answer("a"), answer("b", versions={**VERSIONS, "tensorflow": ""}))
    assert found.found == "TensorFlow differs: 2.21.0 on a; none on b"


def test_what_only_the_launcher_lacks() -> None:
    found = the_problem(answer("b"), answer("c"), versions={**VERSIONS, "keras": ""})
    assert found.found == "Keras differs: none on the launcher; 3.15.1 on b, c"
    assert found.remedy == "on the launcher: python -m pip install keras==3.15.1"


def test_what_nobody_has() -> None:
    without = {name: version for name, version in VERSIONS.items() if name != "tensorflow"}
    changes: dict[str, Any] = {"versions": without}
    found = the_problem(answer("a", **changes), answer("b", **changes), **changes)
    assert found.found == "TensorFlow is missing"
    assert found.hosts == ("a", "b")
    assert 'pip install "hvdtrain[cpu]"' in found.remedy


def test_an_mpi_that_can_not_be_loaded_says_why() -> None:
    broken = answer("b", mpi="", mpi_error="RuntimeError: cannot load MPI library")
    found = the_problem(answer("a"), broken)
    assert found.found == (
        "MPI differs: Open MPI v5.0.11 on a; none on b (RuntimeError: cannot load MPI library)"
    )
