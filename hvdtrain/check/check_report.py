"""The report of ``hvdtrain check``: problems, a table of hosts, and common versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hvdtrain.check.host_checks import CHECKS, MPI, VERSIONS, check_gpus
from hvdtrain.remote.problem import (
    Problem,
    answered,
    failure_problems,
    format_bytes,
    format_problem,
    problem_state,
)
from hvdtrain.remote.remote_probe import Answer, Method, clock_offset_s
from hvdtrain.text import format_table

__all__ = ["find_problems", "format_report"]

_HEAD = ("host", "state", "ranks", "cores", "load", "GPUs", "/dev/shm", "network", "clock")
_LEFT = (0, 1, 5, 7)


def find_problems(
    launcher: Answer,
    answers: Sequence[Answer],
    *,
    method: Method,
    python: str,
    use_gpus: bool = True,
) -> list[Problem]:
    """Compare the hosts with the launcher and with each other; return errors, then warnings.

    Args:
        launcher: The launcher's own answer.
        answers: The answers of the hosts.
        method: How the hosts were reached.
        python: The launcher's Python.
        use_gpus: Whether ranks would use GPUs.
    """
    problems = [*failure_problems(answers, method=method, python=python)]
    for check in (*CHECKS, *([check_gpus] if use_gpus else [])):
        problems += check(launcher, answers)
    return sorted(problems, key=lambda problem: not problem.is_error)


def format_report(launcher: Answer, answers: Sequence[Answer], problems: Sequence[Problem]) -> str:
    """Format the table of hosts, their common versions, and the problems."""
    table = format_table(_HEAD, [_row(answer, problems) for answer in answers], left=_LEFT)
    parts = [table, _versions(launcher, answers), *map(format_problem, problems)]
    return "\n\n".join(filter(None, parts))


def _row(answer: Answer, problems: Iterable[Problem]) -> tuple[str, ...]:
    facts = answer.facts
    if facts is None:
        state = answer.failure.kind if answer.failure else "no answer"
        return (answer.host, state, str(answer.ranks), *["-"] * 6)
    offset_s, error_s = clock_offset_s(answer)
    speed = "" if facts.speed_mbit is None else f" {facts.speed_mbit / 1000:g} Gb/s"
    models = "/".join(dict.fromkeys(model for model, _ in facts.gpus))
    return (
        answer.host,
        problem_state([problem for problem in problems if answer.host in problem.hosts]),
        str(answer.ranks),
        "-" if facts.cores is None else str(facts.cores),
        "-" if facts.load is None else f"{facts.load:.1f}",
        f"{len(facts.gpus)} {models}" if facts.gpus else "none",
        "-" if facts.shm_free_bytes is None else format_bytes(facts.shm_free_bytes),
        f"{facts.interface} {facts.local_address}{speed}".strip() if facts.local_address else "-",
        f"{0.0 if abs(offset_s) <= error_s else offset_s:+.1f} s",
    )


def _versions(launcher: Answer, answers: Sequence[Answer]) -> str:
    """Return the versions that the launcher and all hosts share, after a name for the hosts."""
    facts = [facts for _, facts in answered([launcher, *answers])]
    shared = []
    for title, version in VERSIONS.items():
        versions = {version(one) for one in facts}
        if len(versions) == 1 and (only := versions.pop()):
            shared.append(only if title == MPI else f"{title} {only}")
    hosts = "all hosts"
    if len(facts) - 1 < len(answers):
        hosts = "all that answered"
    elif len(answers) == 1:
        hosts = answers[0].host
    return f"{hosts}: {', '.join(shared)}" if shared else ""
