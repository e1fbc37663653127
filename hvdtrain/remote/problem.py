"""Problems with hosts, and their remedies."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.remote.host_probe import HostFacts
from hvdtrain.remote.remote_probe import Answer, Failure, FailureKind, Method, ssh_failure
from hvdtrain.text import format_list

__all__ = [
    "Problem",
    "answered",
    "explain_start_failure",
    "failure_problems",
    "format_bytes",
    "format_problem",
    "hosts_by",
    "problem_state",
]

_TEST = "then test with: ssh -o BatchMode=yes {host} true"
# Summary and remedy of each failure. {run} is the command for the launcher's Python on the host.
_FAILURES: dict[FailureKind, tuple[str, str]] = {
    "unknown name": (
        "its name can't be resolved",
        "correct the name in -H or the hostfile, or add it to DNS or /etc/hosts; getent hosts "
        "{host} must find it",
    ),
    "refused": (
        "its ssh port refuses connections",
        "start sshd there (systemctl start ssh), or set its Port for Host {host} in "
        f"~/.ssh/config; {_TEST}",
    ),
    "timed out": (
        "it did not answer in time",
        f"check that it is up (ping -c1 {{host}}) and that no firewall blocks port 22; {_TEST}",
    ),
    "no route": (
        "no network route leads to it",
        "check that it is up and in this network: ping -c1 {host}",
    ),
    "key refused": (
        "it does not accept your ssh key",
        "ssh-copy-id {host} (if you have no key, first: ssh-keygen -t ed25519; for a key with a "
        f"passphrase: ssh-add); {_TEST}",
    ),
    "host key": (
        "ssh does not trust its host key",
        "compare the host's key with its administrator, then run: ssh-keygen -R {host}; "
        "ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
    ),
    "ssh failed": (
        "ssh failed",
        "run ssh -v {host} true for details; if ssh is missing, install openssh-client",
    ),
    "srun failed": (
        "srun can't start a step there",
        "see State and Reason in scontrol show node {host}; until the host is fixed, exclude it "
        "with sbatch --exclude={host}",
    ),
    "no Python": (
        "the launcher's Python can't be started there",
        "put the environment on a file system that all hosts share, or install it there: python3 "
        "-m venv {environment}; then install the same packages",
    ),
    "no hvdtrain": (
        "the launcher's Python starts there, but can't import hvdtrain",
        "{run} -m pip install --upgrade hvdtrain",
    ),
    "no answer": (
        "Python was started there, but did not answer",
        "check whether Python starts: {run} -c pass",
    ),
}
_EXPECTED: dict[FailureKind, str] = {
    "srun failed": "srun starts a step on every host of the job",
    "no Python": "{python}, at the same path on every host",
    "no hvdtrain": "the same version of hvdtrain on every host",
    "no answer": "an answer within half a minute",
}
_EXPECTED_OF_SSH = "ssh logs in without prompting"


# Matches the start of ssh's own connection errors. It must not match the similar errors that MPI
# and the agents print about their connections in the same output.
_SSH = re.compile(r"ssh: |\S+: Permission denied \(|Host key verification failed|Received disc")
# Open MPI's lines about the host where it was started.
_LOCAL_LINE = re.compile(r"\[|\s*Local host:")
_SHELL_NOT_FOUND = re.compile(r"sh: .*: (No such file or directory|not found)$")
_SRUN_NOT_FOUND = re.compile(r"slurmstepd.*: error: (execve\(\): .*)")
# A task exits with ENOENT if its program does not exist.
_SRUN_TASK = re.compile(r"srun: error: (\S+): tasks? \S+: Exited with exit code 2$")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A problem and its remedy."""

    summary: str  # the observed state
    expected: str  # the required state
    remedy: str  # how to fix the problem, with a command if possible
    # the affected hosts; empty if the problem does not concern particular hosts
    hosts: tuple[str, ...] = ()
    is_error: bool = True  # Whether the problem prevents training. Otherwise it is a warning.


def format_problem(problem: Problem) -> str:
    """Format a problem and its remedy as three lines."""
    kind = "problem" if problem.is_error else "warning"
    where = f" on {format_list(problem.hosts)}" if problem.hosts else ""
    return (
        f"{kind}{where}: {problem.summary}\n  expected: {problem.expected}\n  fix: {problem.remedy}"
    )


def problem_state(problems: Collection[Problem]) -> str:
    """Return the state of a host or another item that has these problems.

    The state is ``problem`` if one of the problems is an error, ``warning`` if all of them are
    warnings, and ``ok`` if there are no problems.
    """
    if any(problem.is_error for problem in problems):
        return "problem"
    return "warning" if problems else "ok"


def format_bytes(count: int) -> str:
    """Format a number of bytes in GB or MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def answered(answers: Sequence[Answer]) -> list[tuple[str, HostFacts]]:
    """Return the hosts that answered, with their facts."""
    return [(answer.host, answer.facts) for answer in answers if answer.facts is not None]


def hosts_by(answers: Sequence[Answer], value: Callable[[HostFacts], str]) -> dict[str, list[str]]:
    """Group the hosts by the value of a fact, leaving out hosts that did not answer."""
    groups: dict[str, list[str]] = {}
    for host, facts in answered(answers):
        groups.setdefault(value(facts), []).append(host)
    return groups


def failure_problems(
    answers: Sequence[Answer], *, method: Method, python: str
) -> Iterator[Problem]:
    """Yield a problem for each kind of failure, with all affected hosts."""
    hosts: dict[FailureKind, list[str]] = {}
    messages: dict[FailureKind, str] = {}
    for answer in answers:
        if answer.failure is not None:
            hosts.setdefault(answer.failure.kind, []).append(answer.host)
            messages.setdefault(answer.failure.kind, answer.failure.message)
    for kind, names in hosts.items():
        message = messages[kind]
        # ssh's message contains the login's user name, which may differ from the current user's.
        login = re.search(rf"\S+@{re.escape(names[0])}(?=: Permission denied)", message)
        host = login[0] if login else names[0]
        start = {"local": "", "ssh": f"ssh {host} ", "srun": f"srun -N1 -w {host} "}[method]
        values = {
            "host": host,
            "python": python,
            "run": start + shlex.quote(python),
            "environment": shlex.quote(python.rpartition("/bin/")[0] or python),
        }
        cause: FailureKind = kind
        if kind == "timed out" and method != "ssh":
            cause = "srun failed" if method == "srun" else "no answer"
        yield Problem(
            hosts=tuple(names),
            summary=_FAILURES[kind][0] + (f" ({message})" if message else ""),
            expected=_EXPECTED.get(cause, _EXPECTED_OF_SSH).format_map(values),
            remedy=_FAILURES[cause][1].format_map(values),
        )


def explain_start_failure(
    lines: Sequence[str], hosts: Sequence[str], *, method: Method, python: str
) -> list[Problem]:
    """Find out why ranks did not start on ``hosts``, from the output of mpirun or srun.

    Only English messages are recognized.

    Returns:
        The problems. The list is empty if the output does not show the cause.
    """
    causes = _srun_causes(lines) if method == "srun" else _ssh_causes(lines, python)
    answers: dict[tuple[str, FailureKind], Answer] = {}
    for naming_lines, kind, line in causes:
        for host in _named_hosts(naming_lines, hosts):
            answer = Answer(host=host, failure=Failure(kind=kind, message=line))
            answers.setdefault((host, kind), answer)
    return list(failure_problems(list(answers.values()), method=method, python=python))


def _ssh_causes(
    lines: Sequence[str], python: str
) -> Iterator[tuple[Sequence[str], FailureKind, str]]:
    """Yield lines that name hosts, the kind of failure, and the error, for each error of ssh."""
    others = [line for line in lines if not _LOCAL_LINE.match(line)]
    for line in lines:
        kind = ssh_failure(line) if _SSH.match(line) else None
        if kind is not None:
            # An error about a host key does not name the host, but other lines may.
            yield others if kind == "host key" else [line], kind, line
        elif _SHELL_NOT_FOUND.search(line) and os.path.dirname(python) in line:
            # The program that was not found is Open MPI's helper, which is next to Python.
            yield others, "no Python", line


def _srun_causes(lines: Sequence[str]) -> Iterator[tuple[Sequence[str], FailureKind, str]]:
    errors = [match[1] for line in lines if (match := _SRUN_NOT_FOUND.match(line))]
    if errors:
        yield [line for line in lines if _SRUN_TASK.match(line)], "no Python", errors[0]


def _named_hosts(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    names: set[str] = set()
    for line in lines:
        if match := _SRUN_TASK.match(line):
            with contextlib.suppress(ConfigurationError):
                names.update(host.name for host in parse_hosts(match[1]))
        names.update(word.strip(".:") for word in re.findall(r"[\w.:-]+", line))
    return [host for host in hosts if host in names]
