"""Commands that run the probe on other hosts, and the meaning of their output and exit codes."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.cluster.hosts import is_this_host
from hvdtrain.config.keras_backend import KERAS_BACKEND
from hvdtrain.remote.host_probe import HostFacts, read_facts

__all__ = [
    "Answer",
    "Failure",
    "FailureKind",
    "Method",
    "clock_offset_s",
    "read_answer",
    "srun_probe",
    "ssh_failure",
    "ssh_probe",
    "unreachable",
]

Method = Literal["local", "ssh", "srun"]
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

# Variables that a remote program needs to load the same libraries as a rank.
_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
    *(KERAS_BACKEND, "KERAS_HOME", "JAX_PLATFORMS"),
)
_CONNECT_TIMEOUT_S = 10
_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
ANSWER_TIMEOUT_S = 20.0
STEP_S = 0.05
ATTEMPTS = 2

# Patterns for ssh's messages in the C locale. The first pattern that matches a message is used.
_SSH_MESSAGES: tuple[tuple[str, FailureKind], ...] = (
    (r"Could not resolve hostname", "unknown name"),
    (r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED", "host key"),
    (r"Permission denied|Too many authentication failures", "key refused"),
    (r"Connection refused", "refused"),
    (r"No route to host|Network is unreachable", "no route"),
    (r"timed out", "timed out"),
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a host did not answer."""

    kind: FailureKind  # the kind of failure, which determines the remedy
    message: str = ""  # the line of ssh's, srun's or Python's output that shows the cause


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of probing a host: facts or a failure."""

    host: str  # name of the host, as the user wrote it; empty for the launcher itself
    ranks: int = 1  # number of ranks planned for the host
    facts: HostFacts | None = None  # facts about the host; None if the host did not answer
    failure: Failure | None = None  # reason why the host did not answer; None if the host answered
    asked_s: float = 0.0  # the launcher's clock at the request
    answered_s: float = 0.0  # the launcher's clock at the answer


def clock_offset_s(answer: Answer) -> tuple[float, float]:
    """Return how many seconds a host's clock is ahead of the launcher's, and the maximum error.

    Like NTP (RFC 5905, section 8), this assumes that request and answer take equally long.
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
    """Return the command that runs a program on a host through ssh, without prompts."""
    variables = [f"{name}={environ[name]}" for name in _VARIABLES if environ.get(name)]
    return (
        *("ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_TIMEOUT_S}"),
        # A shared connection would stay open and keep the output pipe open.
        *("-o", "ControlMaster=no", *options, "--", host),
        shlex.join(["env", *variables, *program]),
    )


def srun_probe(host: str, program: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs a program on a host of this Slurm job."""
    return (
        *("srun", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--mpi=none", "--overlap"),
        *("--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
        *program,
    )


def read_answer(method: Method, code: int | None, stdout: str, stderr: str) -> HostFacts | Failure:
    """Return the facts in a probe's output, or why the probe failed.

    The exit ``code`` is None if the probe timed out.
    """
    facts = read_facts(stdout)
    if facts is not None:
        return facts
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    message = lines[-1] if lines else ""
    if code is None:
        return Failure(kind="timed out", message=message)
    if "No module named" in message and "hvdtrain" in message:
        return Failure(kind="no hvdtrain", message=message)
    if method == "srun":
        missing = re.search(r"execve\(\): .*", stderr)
        if missing is not None:
            return Failure(kind="no Python", message=missing[0])
        kind: FailureKind = "srun failed" if "srun: error" in stderr else "no answer"
        # srun's first error is the cause of its other errors.
        errors = [line for line in lines if "error" in line]
        return Failure(kind=kind, message=(errors or [*lines, "no message"])[0])
    if method == "ssh" and code == _SSH_FAILED:
        for _, kind in _SSH_MESSAGES:
            matches = [line for line in lines if ssh_failure(line) == kind]
            if matches:
                return Failure(kind=kind, message=matches[-1])
        return Failure(kind="ssh failed", message=message)
    if code in _NOT_FOUND:
        return Failure(kind="no Python", message=message)
    return Failure(kind="no answer", message=message or f"exit code {code}")


def ssh_failure(line: str) -> FailureKind | None:
    """Return the kind of failure that a line of ssh's output reports; None if it reports none."""
    for pattern, kind in _SSH_MESSAGES:
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
    """Return the hosts that ssh can't reach.

    Each host is tried twice, because a busy host may miss one attempt. If ``give_up()`` returns
    True, stop and return an empty list.
    """
    silent = [host for host in hosts if not is_this_host(host)]
    for _ in range(ATTEMPTS):
        silent = _silent_hosts(silent, environ, ssh, give_up)
    return [] if give_up() else silent


def _silent_hosts(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
    give_up: Callable[[], bool],
) -> list[str]:
    probes = {
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
    while any(probe.poll() is None for probe in probes.values()):
        if give_up() or time.monotonic() > deadline:
            break
        time.sleep(STEP_S)
    silent = [host for host, probe in probes.items() if probe.poll() != 0]
    for probe in probes.values():
        probe.kill()
        probe.wait(timeout=ANSWER_TIMEOUT_S)
    return silent
