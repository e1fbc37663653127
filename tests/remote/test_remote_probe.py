"""How the probe is started on a host, and what ssh and srun say where it was not."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from hvdtrain.remote.probe_messages import MARK, read_facts
from hvdtrain.remote.remote_probe import (
    Failure,
    FailureKind,
    Way,
    read_answer,
    srun_probe,
    ssh_probe,
    unreachable,
)
from tests.check.answers import GPU, facts

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
    sent = facts("b", gpus=[list(GPU)], infiniband=["mlx5_0"], names={"a": ["10.0.0.1"]})
    text = json.dumps({**dataclasses.asdict(sent), "of_a_later_version": 1})
    assert read_answer("ssh", 0, f"Welcome to b\n{MARK}{text}\nbye\n", "") == sent
    assert read_facts(f"{MARK}{{broken\n") is None


def test_ssh_command() -> None:
    environ = {"PATH": "/venv/bin:/usr/bin", "HOME": "/root", "PYTHONPATH": "/my code"}
    argv = ssh_probe("b", ["python", "-m", "x", '{"a": 1}'], environ)
    assert argv == (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
        *("-o", "ControlMaster=no", "--", "b"),
        "env PATH=/venv/bin:/usr/bin 'PYTHONPATH=/my code' python -m x '{\"a\": 1}'",
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
    """Of an ssh that writes down its arguments, never reaches b, and reaches c the second time."""
    program = tmp_path / "ssh"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n'
        'case "$*" in\n'
        '*" b "*) exit 255 ;;\n'
        f'*" c "*) rmdir {tmp_path}/again 2>/dev/null || {{ mkdir {tmp_path}/again; exit 255; }}\n'
        "esac\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}


def test_hosts_that_ssh_does_not_reach(environ: dict[str, str], tmp_path: Path) -> None:
    hosts = ["a", "b", "c", "localhost"]
    silent = unreachable(hosts, environ, ssh=("-p", "2222"), give_up=lambda: False)
    assert silent == ["b"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 + 2, "this host needs no ssh, and one that answered is left in peace"
    for line in asked:
        assert " -p 2222 -- " in line
