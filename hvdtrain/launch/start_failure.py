"""Reasons why ranks did not start, as far as mpirun's or srun's words tell; pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.errors import ConfigurationError
from hvdtrain.remote.problem import Problem, failure_problems
from hvdtrain.remote.remote_probe import Answer, Failure, FailureKind, Method, ssh_failure

__all__ = ["explain_start_failure"]

# How ssh begins a line about a connection that came to nothing; MPI and agents, whose lines end
# up among these, speak of other connections in the same words.
_SSH = re.compile(r"ssh: |\S+: Permission denied \(|Host key verification failed|Received disc")
# Open MPI's lines about the host where it was started.
_OF_THIS_HOST = re.compile(r"\[|\s*Local host:")
_SHELL_FOUND_NOTHING = re.compile(r"sh: .*: (No such file or directory|not found)$")
_SRUN_FOUND_NOTHING = re.compile(r"slurmstepd.*: error: (execve\(\): .*)")
# ENOENT, with which a task ends whose program is not there.
_SRUN_TASK = re.compile(r"srun: error: (\S+): tasks? \S+: Exited with exit code 2$")

# Lines that name the hosts, what happened to them, and the words for it.
_Cause = tuple[Sequence[str], FailureKind, str]


def explain_start_failure(
    words: Sequence[str], hosts: Sequence[str], *, method: Method, python: str
) -> list[Problem]:
    """Find what kept ranks from starting on ``hosts``; empty where the words don't tell.

    The words are the lines that mpirun or srun printed; only English is understood.
    """
    causes = _srun_causes(words) if method == "srun" else _ssh_causes(words, python)
    answers: dict[tuple[str, FailureKind], Answer] = {}
    for lines, kind, said in causes:
        for host in _named(lines, hosts):
            answer = Answer(host=host, failure=Failure(kind=kind, message=said))
            answers.setdefault((host, kind), answer)
    return list(failure_problems(list(answers.values()), method=method, python=python))


def _ssh_causes(words: Sequence[str], python: str) -> Iterator[_Cause]:
    others = [line for line in words if not _OF_THIS_HOST.match(line)]
    for line in words:
        kind = ssh_failure(line) if _SSH.match(line) else None
        if kind is not None:
            # Not every complaint names its host; another line may.
            yield others if kind == "host key" else [line], kind, line
        elif _SHELL_FOUND_NOTHING.search(line) and os.path.dirname(python) in line:
            # Open MPI's own helper, which is in the same environment.
            yield others, "no Python", line


def _srun_causes(words: Sequence[str]) -> Iterator[_Cause]:
    said = [match[1] for line in words if (match := _SRUN_FOUND_NOTHING.match(line))]
    if said:
        yield [line for line in words if _SRUN_TASK.match(line)], "no Python", said[0]


def _named(lines: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """The hosts that these lines name."""
    found: set[str] = set()
    for line in lines:
        if match := _SRUN_TASK.match(line):
            found.update(_expanded(match[1]))
        found.update(word.strip(".:") for word in re.findall(r"[\w.:-]+", line))
    return [host for host in hosts if host in found]


def _expanded(names: str) -> list[str]:
    """The hosts of a list as Slurm writes it."""
    try:
        return [host.name for host in parse_hosts(names)]
    except ConfigurationError:
        return []
