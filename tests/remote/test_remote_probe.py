from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hvdtrain.remote.host_probe import MARK, read_facts
from hvdtrain.remote.remote_probe import (
    Failure,
    FailureKind,
    Method,
    read_answer,
    srun_probe,
    ssh_probe,
    unreachable,
)
from tests.check.answers import GPU, facts

SSH_MESSAGES: dict[str, FailureKind] = {
    "ssh: Could not resolve hostname b: Name or service not known": "unknown name",
    "ssh: connect to host b port 22: Connection refused": "refused",
    "ssh: connect to host b port 22: Connection timed out": "timed out",
    "Connection timed out during banner exchange": "timed out",
    "ssh: connect to host b port 22: No route to host": "no route",
    "root@b: Permission denied (publickey).": "key refused",
    "No ED25519 host key is known for b.\nHost key verification failed.": "host key",
    "Connection closed by 10.0.0.2 port 22": "ssh failed",
}


@pytest.mark.parametrize(("message", "kind"), SSH_MESSAGES.items(), ids=list(SSH_MESSAGES.values()))
def test_failures_of_ssh(message: str, kind: FailureKind) -> None:
    last = message.splitlines()[-1]
    answer = read_answer("ssh", 255, "", f"Welcome!\n{message}\n")
    assert answer == Failure(kind=kind, message=last)


OTHER_MESSAGES: dict[str, tuple[Method, int | None, str, FailureKind]] = {
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


@pytest.mark.parametrize(
    ("method", "code", "message", "kind"), OTHER_MESSAGES.values(), ids=OTHER_MESSAGES
)
def test_other_failures(method: Method, code: int | None, message: str, kind: FailureKind) -> None:
    answer = read_answer(method, code, "", message)
    assert isinstance(answer, Failure)
    assert answer.kind == kind


def test_facts_among_other_output() -> None:
    sent = facts("b", gpus=(GPU,), infiniband=["mlx5_0"], names={"a": ["10.0.0.1"]})
    text = json.dumps({**dataclasses.asdict(sent), "of_a_later_version": 1})
    assert read_answer("ssh", 0, f"Welcome to b\n{MARK}{text}\nbye\n", "") == sent
    assert read_facts(f"{MARK}{{broken\n") is None
    other_version = json.dumps({"gpus": [["NVIDIA H200", "570.86"], {"number": "1", "later": 2}]})
    (gpu,) = read_facts(f"{MARK}{other_version}").gpus
    assert gpu.number == "1"


def test_ssh_command() -> None:
    environ = {"PATH": "/venv/bin:/usr/bin", "HOME": "/root", "PYTHONPATH": "/my code"}
    argv = ssh_probe(
        "b", ["python", "-m", "x", '{"a": 1}'], environ | {"CUDA_VISIBLE_DEVICES": "2"}
    )
    assert argv == (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ControlMaster=no", "--", "b"),
        "env PATH=/venv/bin:/usr/bin 'PYTHONPATH=/my code' CUDA_VISIBLE_DEVICES=2 "
        "python -m x '{\"a\": 1}'",
    )


def test_ssh_command_with_options() -> None:
    argv = ssh_probe("b", ["true"], {}, options=("-p", "2222"))
    assert argv[-5:] == ("-p", "2222", "--", "b", "env true")


def test_srun_command() -> None:
    assert srun_probe("b", ["python", "-m", "x", "{}"]) == (
        *("srun", "--nodes=1", "--ntasks=1", "--nodelist=b", "--mpi=none", "--overlap"),
        *("--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *("python", "-m", "x", "{}"),
    )


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment whose ssh logs its arguments, fails for b, and fails once for c."""
    program = tmp_path / "ssh"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/calls\n'
        'case "$*" in\n'
        '*" b "*) exit 255 ;;\n'
        f'*" c "*) rmdir {tmp_path}/again 2>/dev/null || {{ mkdir {tmp_path}/again; exit 255; }}\n'
        "esac\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}


def test_unreachable(environ: dict[str, str], tmp_path: Path) -> None:
    hosts = ["a", "b", "c", "localhost"]
    silent = unreachable(hosts, environ, ssh=("-p", "2222"), give_up=lambda: False)
    assert silent == ["b"]
    calls = (tmp_path / "calls").read_text().splitlines()
    # Three hosts, then b and c again; this host needs no ssh.
    assert len(calls) == 3 + 2
    for line in calls:
        assert " -p 2222 -- " in line
