"""Commands that start the probe of ``hvdtrain check``, and how it went; and which hosts answer."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.cluster.hosts import is_this_host
from hvdtrain.remote.probe_messages import Facts, read_facts

__all__ = [
    "Answer",
    "Failure",
    "FailureKind",
    "Way",
    "clock_offset_s",
    "read_answer",
    "srun_probe",
    "ssh_failure",
    "ssh_probe",
    "unreachable",
]

Way = Literal["here", "ssh", "srun"]
FailureKind = Literal[
    "unknown name",
    "refused",
    "timed out",
    "no route",
    "key refused",
    "host key",
    "ssh failed",
    "srun failed",
    "no Python",
    "no hvdtrain",
    "no answer",
]

# What a program over there needs to load the same libraries as a rank would.
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
_CONNECT_TIMEOUT_S = 10
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
ANSWER_TIMEOUT_S = 20.0
STEP_S = 0.05
ASKED_TIMES = 2

# The first that matches what ssh said; ssh is started in the C locale.
_SSH_WORDS: tuple[tuple[str, FailureKind], ...] = (
    (r"Could not resolve hostname", "unknown name"),
    (r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED", "host key"),
    (r"Permission denied|Too many authentication failures", "key refused"),
    (r"Connection refused", "refused"),
    (r"No route to host|Network is unreachable", "no route"),
    (r"timed out", "timed out"),
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a host gave no answer.

    Attributes:
        kind: The kind of failure, which decides what is advised.
        words: The words of ssh, srun or Python, or their end.
    """

    kind: FailureKind
    words: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of asking one host: its facts, or a failure.

    Attributes:
        host: Its name, as it was spelled; empty for the launcher, where no host is meant.
        ranks: How many ranks it is to take.
        facts: The facts that it answered with; None where it did not.
        failure: Why it did not answer; None where it did.
        asked_s: The launcher's clock when it asked.
        answered_s: The launcher's clock when the answer was complete.
    """

    host: str
    ranks: int = 1
    facts: Facts | None = None
    failure: Failure | None = None
    asked_s: float = 0.0
    answered_s: float = 0.0


def clock_offset_s(answer: Answer) -> tuple[float, float]:
    """Return how far a host's clock is ahead of the launcher's, and by how much that may be wrong.

    As NTP does it: what the host spent on its answer doesn't count, the rest is taken for two
    ways of equal length. Source: RFC 5905, section 8.
    """
    assert answer.facts is not None
    ahead_s = answer.facts.started_s - answer.asked_s
    back_s = answer.facts.ended_s - answer.answered_s
    return (ahead_s + back_s) / 2, abs(ahead_s - back_s) / 2


def ssh_probe(
    host: str,
    program: Sequence[str],
    environ: Mapping[str, str],
    options: Sequence[str] = (),
) -> tuple[str, ...]:
    """The command that runs ``program`` on ``host``, and asks nobody for a password."""
    variables = [f"{name}={environ[name]}" for name in _VARIABLES if environ.get(name)]
    return (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}"),
        # A connection that stays open for later ones would hold on to the output.
        *("-o", "ControlMaster=no", *options, "--", host),
        shlex.join(["env", *variables, *program]),
    )


def srun_probe(host: str, program: Sequence[str]) -> tuple[str, ...]:
    """The command that runs ``program`` on one host of the Slurm job around it."""
    return (
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mpi=none", "--overlap"),
        *("--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *program,
    )


def read_answer(way: Way, code: int | None, stdout: str, stderr: str) -> Facts | Failure:
    """Read the facts or the failure from a probe's end; ``code`` is None if it ran out of time."""
    facts = read_facts(stdout)
    if facts is not None:
        return facts
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    words = lines[-1] if lines else ""
    if code is None:
        return Failure(kind="timed out", words=words)
    if "No module named" in words and "hvdtrain" in words:
        return Failure(kind="no hvdtrain", words=words)
    if way == "srun":
        missing = re.search(r"execve\(\): .*", stderr)
        if missing is not None:
            return Failure(kind="no Python", words=missing[0])
        kind: FailureKind = "srun failed" if "srun: error" in stderr else "no answer"
        # What srun says first is the reason; the rest follows from it.
        errors = [line for line in lines if "error" in line]
        return Failure(kind=kind, words=(errors or [*lines, "no word"])[0])
    if way == "ssh" and code == _SSH_FAILED:
        for _, wanted in _SSH_WORDS:
            said = [line for line in lines if ssh_failure(line) == wanted]
            if said:
                return Failure(kind=wanted, words=said[-1])
        return Failure(kind="ssh failed", words=words)
    if code in _NOT_FOUND:
        return Failure(kind="no Python", words=words)
    return Failure(kind="no answer", words=words or f"exit code {code}")


def ssh_failure(line: str) -> FailureKind | None:
    """Return what kept ssh from a host, by a line of it in the C locale; None for other lines."""
    for pattern, kind in _SSH_WORDS:
        if re.search(pattern, line):
            return kind
    return None


def unreachable(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    *,
    ssh: Sequence[str] = (),
    give_up: Callable[[], bool],
) -> list[str]:
    """The hosts that ssh gets no answer from, asked twice: a busy one may miss one connection.

    All are asked at the same time. Once ``give_up`` says so, nothing is held against who has not
    answered.
    """
    silent = [host for host in hosts if not is_this_host(host)]
    for _ in range(ASKED_TIMES):
        silent = _without_answer(silent, environ, ssh, give_up)
    return [] if give_up() else silent


def _without_answer(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
    give_up: Callable[[], bool],
) -> list[str]:
    asked = {
        host: subprocess.Popen(
            ssh_probe(host, ("true",), environ, options=ssh),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    }
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while any(probe.poll() is None for probe in asked.values()):
        if give_up() or time.monotonic() > deadline:
            break
        time.sleep(STEP_S)
    silent = [host for host, probe in asked.items() if probe.poll() != 0]
    for probe in asked.values():
        probe.kill()
        probe.wait(timeout=ANSWER_TIMEOUT_S)
    return silent
