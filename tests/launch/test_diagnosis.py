"""What hvdtrain check makes of the hosts' answers, exactly; nothing is asked or started."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from hvdtrain.launch.allreduce import Measured, judge_allreduce, show_allreduce
from hvdtrain.launch.diagnosis import diagnose, show, show_problem
from hvdtrain.launch.facts import MARK, Facts, read_facts
from hvdtrain.launch.problem import Problem
from hvdtrain.launch.reach import (
    Answer,
    Failure,
    FailureKind,
    Way,
    clock_offset_s,
    read_answer,
    srun_probe,
    ssh_probe,
)

PYTHON = "/venv/bin/python"
VERSIONS = {"hvdtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "mpi4py": "4.1.2"}
GPU = ("NVIDIA H200", "570.86")


def facts(name: str, **changes: Any) -> Facts:
    well = Facts(
        hostname=name,
        machine=f"{name} boot",
        started_s=100.5,
        ended_s=101.0,
        python="3.11.7",
        versions=VERSIONS,
        mpi="Open MPI v5.0.11",
        folder="same",
        memlock_bytes=-1,
        shm_bytes=1_000_000_000,
        shm_free_bytes=500_000_000,
        names={"a": ("10.0.0.1",), "b": ("10.0.0.2",), "c": ("10.0.0.3",)},
        back="10.0.0.9",
        local_address=f"10.0.0.{' abc'.index(name)}",
        interface="eth0",
        speed_mbit=10000,
        cores=8,
        load=0.25,
    )
    return dataclasses.replace(well, **changes)


def answer(name: str, ranks: int = 2, **changes: Any) -> Answer:
    return Answer(
        host=name, ranks=ranks, facts=facts(name, **changes), asked_s=100.0, answered_s=101.5
    )


def lost(name: str, kind: FailureKind, words: str = "") -> Answer:
    return Answer(host=name, ranks=2, failure=Failure(kind=kind, words=words))


def problems(*answers: Answer, way: Way = "ssh", **here: Any) -> list[Problem]:
    launcher = answer("a", **here)
    return list(diagnose(launcher, answers, way=way, python=PYTHON).problems)


def the_problem(*answers: Answer, way: Way = "ssh", **here: Any) -> Problem:
    found = problems(*answers, way=way, **here)
    assert len(found) == 1, found
    return found[0]


def test_all_well() -> None:
    found = diagnose(answer("a"), [answer("a"), answer("b", 4)], way="ssh", python=PYTHON)
    assert found.fit
    assert (
        show(found)
        == """\
host  state  ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok         2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     ok         4      8   0.2  none    500 MB  eth0 10.0.0.2 10 Gb/s  +0.0 s

all hosts: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, mpi4py 4.1.2, \
Open MPI v5.0.11"""
    )


def test_a_lost_host() -> None:
    words = "ssh: connect to host b port 22: Connection refused"
    answers = [answer("a"), lost("b", "refused", words)]
    found = diagnose(answer("a"), answers, way="ssh", python=PYTHON)
    assert not found.fit
    assert (
        show(found)
        == """\
host  state    ranks  cores  load  GPUs  /dev/shm  network                 clock
a     ok           2      8   0.2  none    500 MB  eth0 10.0.0.1 10 Gb/s  +0.0 s
b     refused      2      -     -  -            -  -                           -

all that answered: Python 3.11.7, hvdtrain 0.1.0, TensorFlow 2.21.0, Keras 3.15.1, \
mpi4py 4.1.2, Open MPI v5.0.11

problem on b: it refuses connections to its ssh port \
(ssh: connect to host b port 22: Connection refused)
  expected: ssh logs in without a question
  do: start sshd there (systemctl start ssh), or give its port as Port below Host b in \
~/.ssh/config; then try: ssh -o BatchMode=yes b true"""
    )


REMEDIES: dict[str, tuple[Way, FailureKind, str]] = {
    "unknown name": ("ssh", "unknown name", "getent hosts b must find it"),
    "timed out": ("ssh", "timed out", "ping -c1 b"),
    "no route": ("ssh", "no route", "ping -c1 b"),
    "key refused": ("ssh", "key refused", "ssh-copy-id b"),
    "host key": ("ssh", "host key", "ssh-keyscan -H b >> ~/.ssh/known_hosts"),
    "ssh failed": ("ssh", "ssh failed", "ssh -v b true"),
    "srun failed": ("srun", "srun failed", "scontrol show node b"),
    "srun timed out": ("srun", "timed out", "scontrol show node b"),
    "no Python": ("ssh", "no Python", "python3 -m venv /venv"),
    "no hvdtrain": ("ssh", "no hvdtrain", "ssh b /venv/bin/python -m pip install"),
    "no hvdtrain, srun": ("srun", "no hvdtrain", "srun -N1 -w b /venv/bin/python -m pip"),
    "no answer": ("ssh", "no answer", "ssh b /venv/bin/python -c pass"),
}


@pytest.mark.parametrize(("way", "kind", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_every_way_of_being_lost_has_a_remedy(way: Way, kind: FailureKind, remedy: str) -> None:
    found = the_problem(answer("a"), lost("b", kind, "so it said"), lost("c", kind), way=way)
    assert found.hosts == ("b", "c")
    assert found.found.endswith("(so it said)")
    assert remedy in found.remedy
    assert found.error


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
        True,
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
    diagnosis = diagnose(answer("a"), answers, way="ssh", python=PYTHON)
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
    diagnosis = diagnose(answer("a"), alike, way="ssh", python=PYTHON)
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
    assert not diagnose(answer("a"), unused, way="ssh", python=PYTHON, use_gpus=False).problems


def test_errors_come_before_warnings() -> None:
    found = problems(answer("a", folder="other"), answer("b", back="", back_error="no"))
    assert [problem.error for problem in found] == [True, False]


def test_a_slow_answer_is_no_wrong_clock() -> None:
    slow = Answer(
        host="b", ranks=2, facts=facts("b", started_s=108.0, ended_s=108.5),
        asked_s=100.0, answered_s=109.0,
    )  # fmt: skip
    assert clock_offset_s(slow) == (3.75, 4.25)
    assert problems(answer("a"), slow) == []
    assert diagnose(answer("a"), [slow], way="ssh", python=PYTHON).rows[0][-1] == "+0.0 s"


SSH_WORDS: dict[str, FailureKind] = {
    "ssh: Could not resolve hostname b: Name or service not known": "unknown name",
    "ssh: connect to host b port 22: Connection refused": "refused",
    "ssh: connect to host b port 22: Connection timed out": "timed out",
    "Connection timed out during banner exchange": "timed out",
    "ssh: connect to host b port 22: No route to host": "no route",
    "root@b: Permission denied (publickey).": "key refused",
    "No ED25519 host key is known for b.\nHost key verification failed.": "host key",
    "Connection closed by 10.0.0.2 port 22": "ssh failed",
}


@pytest.mark.parametrize(("words", "kind"), SSH_WORDS.items(), ids=list(SSH_WORDS.values()))
def test_what_ssh_says(words: str, kind: FailureKind) -> None:
    last = words.splitlines()[-1]
    assert read_answer("ssh", 255, "", f"Welcome!\n{words}\n") == Failure(kind=kind, words=last)


OTHER_WORDS: dict[str, tuple[Way, int | None, str, FailureKind]] = {
    "env": ("ssh", 127, "env: '/venv/bin/python': No such file or directory", "no Python"),
    "not executable": ("ssh", 126, "env: '/venv/bin/python': Permission denied", "no Python"),
    "module": ("ssh", 1, "/venv/bin/python: No module named hvdtrain", "no hvdtrain"),
    "crash": ("ssh", 1, "Fatal Python error", "no answer"),
    "too long": ("ssh", None, "", "timed out"),
    "execve": (
        "srun",
        2,
        "slurmstepd: error: execve(): /venv/bin/python: No such file or directory",
        "no Python",
    ),
    "srun": ("srun", 1, "srun: error: Unable to create step", "srun failed"),
}


@pytest.mark.parametrize(("way", "code", "words", "kind"), OTHER_WORDS.values(), ids=OTHER_WORDS)
def test_what_others_say(way: Way, code: int | None, words: str, kind: FailureKind) -> None:
    found = read_answer(way, code, "", words)
    assert isinstance(found, Failure)
    assert found.kind == kind


def test_an_answer_is_found_among_other_words() -> None:
    sent = facts("b", gpus=(GPU,), infiniband=("mlx5_0",))
    text = json.dumps({**dataclasses.asdict(sent), "of_a_later_version": 1})
    assert read_answer("ssh", 0, f"Welcome to b\n{MARK}{text}\nbye\n", "") == sent
    assert read_facts(f"{MARK}{{broken\n") is None


def test_ssh_command() -> None:
    environ = {"PATH": "/venv/bin:/usr/bin", "HOME": "/root", "PYTHONPATH": "/my code"}
    argv = ssh_probe("b", ["python", "-m", "x", '{"a": 1}'], environ, connect_timeout_s=10)
    assert argv == (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ControlMaster=no", "--", "b"),
        "env PATH=/venv/bin:/usr/bin 'PYTHONPATH=/my code' python -m x '{\"a\": 1}'",
    )


def test_srun_command() -> None:
    assert srun_probe("b", ["python", "-m", "x", "{}"]) == (
        *("srun", "--nodes=1", "--ntasks=1", "--nodelist=b", "--mpi=none", "--overlap"),
        *("--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *("python", "-m", "x", "{}"),
    )


MEASURED = Measured(
    ranks=4, engine="mpi", nbytes=4_000_000, best_s=0.01, latency_s=2.5e-4, bus_bandwidth=6e8
)


def test_a_good_allreduce() -> None:
    assert judge_allreduce(MEASURED, []) is None
    assert show_allreduce(MEASURED) == (
        "allreduce over 4 ranks (mpi): 4.0 MB in 10 ms, 0.40 GB/s (bus 0.60 GB/s); 4 bytes in "
        "250 us"
    )


def test_an_allreduce_that_fails() -> None:
    failed = Measured(code=125, words="hvdtrain run: rank 1 did not start")
    problem = judge_allreduce(failed, [answer("a"), answer("b")])
    assert problem is not None
    assert show_problem(problem) == (
        "problem: the hosts are well one by one, but an allreduce over all failed (exit code "
        "125):\n    rank 1 did not start\n"
        "  expected: all ranks reduce an array together\n"
        "  do: let the hosts reach each other at all ports, and keep MPI to one network, such as "
        "eth0: export OMPI_MCA_btl_tcp_if_include=eth0 (Open MPI) or FI_TCP_IFACE=eth0 (MPICH, "
        "Intel MPI)"
    )


def test_an_allreduce_that_hangs_or_is_wrong() -> None:
    hangs = judge_allreduce(Measured(code=124), [answer("a")])
    assert hangs is not None
    assert "did not end in time" in hangs.found
    wrong = judge_allreduce(dataclasses.replace(MEASURED, right=False), [])
    assert wrong is not None
    assert "wrong sums" in wrong.found
