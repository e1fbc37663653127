"""Whether a cluster is fit to train: from the hosts' answers to a table, problems and remedies.

Pure functions: nothing is asked or started here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.check.host_checks import CHECKS, MPI, VERSIONED, gpus
from hvdtrain.remote.problem import Problem, remedies_for, show_problem, size, state_word
from hvdtrain.remote.remote_probe import Answer, Way, clock_offset_s
from hvdtrain.text import format_table

__all__ = ["CheckReport", "format_report", "make_report"]

_HEAD = ("host", "state", "ranks", "cores", "load", "GPUs", "/dev/shm", "network", "clock")
_LEFT = (0, 1, 5, 7)


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """The state of a cluster.

    Attributes:
        rows: The rows of the table, one a host, in the order of the hosts.
        versions: The versions that all hosts have in common, in one line.
        problems: Errors first.
    """

    rows: tuple[tuple[str, ...], ...]
    versions: str
    problems: tuple[Problem, ...]

    @property
    def fit(self) -> bool:
        """Whether training can start; warnings don't stand in the way."""
        return not any(problem.error for problem in self.problems)


def make_report(
    here: Answer, answers: Sequence[Answer], *, way: Way, python: str, use_gpus: bool = True
) -> CheckReport:
    """Judge the hosts that ``answers`` came from, against the launcher's own and each other.

    ``use_gpus`` says whether ranks would use GPUs where there are any.
    """
    problems = [*remedies_for(answers, way=way, python=python)]
    for check in CHECKS:
        problems += check(here, answers)
    if use_gpus:
        problems += gpus(here, answers)
    problems.sort(key=lambda problem: not problem.error)
    return CheckReport(
        rows=tuple(_row(answer, problems) for answer in answers),
        versions=_versions(here, answers),
        problems=tuple(problems),
    )


def format_report(report: CheckReport) -> str:
    """The table, and the problems with their remedies."""
    parts = [format_table(_HEAD, report.rows, left=_LEFT)]
    if report.versions:
        parts.append(report.versions)
    for problem in report.problems:
        parts.append(show_problem(problem))
    return "\n\n".join(parts)


def _row(answer: Answer, problems: Iterable[Problem]) -> tuple[str, ...]:
    facts = answer.facts
    if facts is None:
        reason = answer.failure.kind if answer.failure else "no answer"
        return (answer.host, reason, str(answer.ranks), *["-"] * 6)
    mine = [problem for problem in problems if answer.host in problem.hosts]
    offset_s, unsure_s = clock_offset_s(answer)
    offset_s = 0.0 if abs(offset_s) <= unsure_s else offset_s
    return (
        answer.host,
        state_word(mine),
        str(answer.ranks),
        "-" if facts.cores is None else str(facts.cores),
        "-" if facts.load is None else f"{facts.load:.1f}",
        _gpus(facts.gpus),
        "-" if facts.shm_free_bytes is None else size(facts.shm_free_bytes),
        _network(facts.interface, facts.local_address, facts.speed_mbit),
        f"{offset_s:+.1f} s",
    )


def _gpus(gpus: Sequence[Sequence[str]]) -> str:
    if not gpus:
        return "none"
    models = dict.fromkeys(model for model, _ in gpus)
    return f"{len(gpus)} {'/'.join(models)}"


def _network(interface: str, address: str, speed_mbit: int | None) -> str:
    if not address:
        return "-"
    speed = "" if speed_mbit is None else f" {speed_mbit / 1000:g} Gb/s"
    return f"{interface} {address}{speed}".strip()


def _versions(here: Answer, answers: Sequence[Answer]) -> str:
    """Python and libraries with the version that all have."""
    reached = [one for one in (here, *answers) if one.facts is not None]
    shown = []
    for title, version in VERSIONED.items():
        found = {version(one.facts) for one in reached if one.facts is not None}
        if len(found) == 1 and (only := found.pop()):
            shown.append(only if title == MPI else f"{title} {only}")
    missing = len(reached) - 1 < len(answers)
    whom = "all that answered" if missing else "all hosts" if len(answers) > 1 else "this host"
    if len(answers) == 1 and answers[0].host != here.host and not missing:
        whom = answers[0].host
    return f"{whom}: {', '.join(shown)}" if shown else ""
