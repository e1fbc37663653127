"""Problems that ``hvdtrain check`` finds, and what to do about them; pure functions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.remote.probe_messages import Facts
from hvdtrain.remote.remote_probe import Answer, FailureKind, Way
from hvdtrain.text import format_list

__all__ = ["Problem", "answered", "remedies_for", "show_problem", "size", "state_word"]

_FOUND: dict[FailureKind, str] = {
    "unknown name": "its name is unknown",
    "refused": "it refuses connections to its ssh port",
    "timed out": "it did not answer in time",
    "no route": "no network leads to it",
    "key refused": "ssh does not accept your key",
    "host key": "ssh does not trust the host's key",
    "ssh failed": "ssh failed",
    "srun failed": "srun could not start a step there",
    "no Python": "the launcher's Python can't be started there",
    "no hvdtrain": "the launcher's Python is there, but not this hvdtrain",
    "no answer": "Python was started, but gave no answer",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        found: Says how it is.
        expected: Says how it should be.
        remedy: Says how to mend it, by a command where one does it.
        hosts: The hosts where it is so; empty if it is not a matter of hosts.
        error: Whether training can't be relied on; otherwise it is a warning.
    """

    found: str
    expected: str
    remedy: str
    hosts: tuple[str, ...] = ()
    error: bool = True


def show_problem(problem: Problem) -> str:
    """One problem, with what to do."""
    kind = "problem" if problem.error else "warning"
    where = f" on {format_list(problem.hosts)}" if problem.hosts else ""
    told = f"{kind}{where}: {problem.found}"
    return f"{told}\n  expected: {problem.expected}\n  do: {problem.remedy}"


def state_word(problems: Collection[Problem]) -> str:
    """Return the word for the state of something with these problems, for tables."""
    if any(problem.error for problem in problems):
        return "problem"
    return "warning" if problems else "ok"


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def answered(answers: Sequence[Answer]) -> list[tuple[str, Facts]]:
    """Hosts that answered, and what they said."""
    return [(answer.host, answer.facts) for answer in answers if answer.facts is not None]


def remedies_for(answers: Sequence[Answer], *, way: Way, python: str) -> Iterator[Problem]:
    """Yields one problem for each reason that hosts gave no answer, with all that gave it."""
    hosts: dict[FailureKind, list[str]] = {}
    words: dict[FailureKind, str] = {}
    for answer in answers:
        if answer.failure is not None:
            hosts.setdefault(answer.failure.kind, []).append(answer.host)
            words.setdefault(answer.failure.kind, answer.failure.words)
    for kind, named in hosts.items():
        # ssh says as whom it was to log in, which need not be this user.
        login = re.search(rf"\S+@{re.escape(named[0])}(?=: Permission denied)", words[kind])
        expected, remedy = _advice(kind, login[0] if login else named[0], way, python)
        said = f" ({words[kind]})" if words[kind] else ""
        yield Problem(
            hosts=tuple(named), found=_FOUND[kind] + said, expected=expected, remedy=remedy
        )


def _advice(kind: FailureKind, host: str, way: Way, python: str) -> tuple[str, str]:
    """Return what should be, and what to do, with ``host`` as the example."""
    if kind == "no Python":
        return (
            f"{python}, at the same path on every host",
            f"put the environment on a file system that all hosts have, or install it there: "
            f"python3 -m venv {shlex.quote(_environment(python))}; then the same packages",
        )
    if kind == "no hvdtrain":
        return (
            "the same version of hvdtrain on every host",
            f"{_on(way, host)} {shlex.quote(python)} -m pip install --upgrade hvdtrain",
        )
    if kind == "no answer" or (kind == "timed out" and way == "here"):
        return (
            "an answer within half a minute",
            f"see whether Python starts: {_on(way, host)} {shlex.quote(python)} -c pass".replace(
                "  ", " "
            ),
        )
    if way == "srun":
        return (
            "srun starts a step on every host of the job",
            f"scontrol show node {host} (its State and Reason); leave it out with "
            f"sbatch --exclude={host} until it is well",
        )
    login = f"ssh -o BatchMode=yes {host} true"
    remedies: dict[FailureKind, str] = {
        "unknown name": f"correct the name in -H or the hostfile, or add it to DNS or /etc/hosts; "
        f"getent hosts {host} must find it",
        "refused": f"start sshd there (systemctl start ssh), or give its port as Port below "
        f"Host {host} in ~/.ssh/config; then try: {login}",
        "timed out": f"see whether it is up (ping -c1 {host}) and whether a firewall lets port 22 "
        f"through; then try: {login}",
        "no route": f"see whether it is up and in this network: ping -c1 {host}",
        "key refused": f"ssh-copy-id {host} (without a key of your own, first: ssh-keygen -t "
        f"ed25519); for a key with a passphrase: ssh-add; then try: {login}",
        "host key": f"compare the host's key with its administrator, then: ssh-keygen -R {host}; "
        f"ssh-keyscan -H {host} >> ~/.ssh/known_hosts",
        "ssh failed": f"ssh -v {host} true tells more; where there is no ssh at all, install "
        "openssh-client",
    }
    return "ssh logs in without a question", remedies[kind]


def _environment(python: str) -> str:
    """The folder of the environment that a Python belongs to."""
    return python.rpartition("/bin/")[0] or python


def _on(way: Way, host: str) -> str:
    return {"here": "", "ssh": f"ssh {host}", "srun": f"srun -N1 -w {host}"}[way]
