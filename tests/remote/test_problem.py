from __future__ import annotations

import pytest

from hvdtrain.remote.problem import explain_start_failure
from hvdtrain.remote.remote_probe import FailureKind, Method
from tests.check.answers import answer, lost, the_problem

REMEDIES: dict[str, tuple[Method, FailureKind, str]] = {
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


@pytest.mark.parametrize(("method", "kind", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_remedies(method: Method, kind: FailureKind, remedy: str) -> None:
    problem = the_problem(
        answer("a"), lost("b", kind, "its message"), lost("c", kind), method=method
    )
    assert problem.hosts == ("b", "c")
    assert problem.summary.endswith("(its message)")
    assert remedy in problem.remedy
    assert problem.is_error


def test_the_remedy_for_a_refused_key_names_the_user() -> None:
    problem = the_problem(
        answer("a"), lost("b", "key refused", "me@b: Permission denied (publickey).")
    )
    assert problem.remedy.startswith("ssh-copy-id me@b (")
    assert problem.remedy.endswith("ssh -o BatchMode=yes me@b true")


# Real output of mpirun and srun.
PYTHON = "/venv/bin/python"
NODES = ["node1", "node2", "node3"]
BOX = """
--------------------------------------------------------------------------
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable, or the executable was unable to find its
required supporting libraries.
  Local host:    node1
  Remote host:   node2
  Daemon exit status: 255
--------------------------------------------------------------------------
"""
WARNING = (
    "[node1:31710] plm:ssh: Warning: setpgid(2,2) failed in parent with errno=Permission denied(13)"
)
SRUN = """
srun: cluster configuration lacks support for cpu binding
srun: error: node2: task 2: Exited with exit code 2
srun: launch/slurm: _step_signal: Terminating StepId=1.0
slurmstepd{stepd}: error: execve(): /venv/bin/python: No such file or directory
slurmstepd-node1: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-11-21T21:05:18 ***
srun: error: node3: task 3: Terminated
srun: error: node1: tasks 0-1: Terminated
"""

# How the hosts were reached, the output, the hosts that caused the failure, and the problem.
CAUSES: dict[str, tuple[Method, str, list[tuple[tuple[str, ...], str]]]] = {
    "key": (
        "ssh",
        f"{WARNING}\nroot@node2: Permission denied (publickey,keyboard-interactive).\n{BOX}",
        [
            (
                ("node2",),
                "it does not accept your ssh key (root@node2: Permission denied (publickey,",
            )
        ],
    ),
    "keys-of-two": (
        "ssh",
        "me@node3: Permission denied (publickey).\nme@node2: Permission denied (publickey).",
        [(("node3", "node2"), "it does not accept your ssh key")],
    ),
    "host-key": (
        "ssh",
        "No ED25519 host key is known for node2 and you have requested strict checking.\n"
        f"Host key verification failed.\n{BOX}",
        [(("node2",), "ssh does not trust its host key (Host key verification failed.)")],
    ),
    "name": (
        "ssh",
        "ssh: Could not resolve hostname node3: Name or service not known",
        [(("node3",), "its name can't be resolved")],
    ),
    "sshd-and-route": (
        "ssh",
        "ssh: connect to host node1 port 22: Connection refused\r\n"
        "ssh: connect to host node2 port 22: No route to host\r\n",
        [(("node1",), "its ssh port refuses"), (("node2",), "no network route leads to it")],
    ),
    "no-environment": (
        "ssh",
        f"bash: line 1: /venv/bin/prted: No such file or directory\n{BOX}",
        [(("node2",), "the launcher's Python can't be started there (bash: line 1: /venv/bin/")],
    ),
    "no-mpi": ("ssh", f"bash: line 1: /opt/mpi/bin/orted: No such file or directory\n{BOX}", []),
    "no-host-named": ("ssh", "Host key verification failed.", []),
    "another-host": ("ssh", "ssh: connect to host gateway port 22: Connection refused", []),
    "a-longer-name": ("ssh", "ssh: connect to host node22 port 22: Connection refused", []),
    "message-of-an-agent": (
        "ssh",
        "hvdtrain run: on host node2: the launcher can't be reached (head:41: Connection refused).",
        [],
    ),
    "only-a-warning": ("ssh", f"{WARNING}\n{BOX}", []),
    "silence": ("ssh", "", []),
    "srun": (
        "srun",
        SRUN.format(stepd="-node2"),
        [(("node2",), "the launcher's Python can't be started there (execve(): /venv/bin/python")],
    ),
    "srun-by-tasks-alone": (
        "srun",
        SRUN.format(stepd="").replace("node2: task 2", "node[2-3]: tasks 2-3"),
        [(("node2", "node3"), "the launcher's Python can't be started there")],
    ),
    "srun-for-another-reason": ("srun", "srun: error: node2: task 2: Exited with exit code 2", []),
    "srun-nonsense": ("srun", SRUN.format(stepd="").replace("node2", "node[2"), []),
}


@pytest.mark.parametrize(("method", "output", "causes"), CAUSES.values(), ids=CAUSES)
def test_explain_start_failure(
    method: Method, output: str, causes: list[tuple[tuple[str, ...], str]]
) -> None:
    problems = explain_start_failure(output.splitlines(), NODES, method=method, python=PYTHON)
    assert [problem.hosts for problem in problems] == [hosts for hosts, _ in causes]
    for problem, (_, summary) in zip(problems, causes, strict=True):
        assert problem.summary.startswith(summary)
        assert problem.remedy
