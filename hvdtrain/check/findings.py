"""What was looked at in a namespace, how it is, and what is wrong with it; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdtrain.cluster.ranges import format_table
from hvdtrain.remote.problem import Problem

__all__ = ["UNKNOWN", "Finding", "format_findings"]

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: What it is, as ``quota gpus``.
        found: How it is, in a few words.
        problems: What is wrong with it.
        missing_right: Without which its state is unknown, as ``list nodes``.
    """

    what: str
    found: str
    problems: tuple[Problem, ...] = ()
    missing_right: str = ""

    @property
    def state(self) -> str:
        """One word for it."""
        if any(problem.error for problem in self.problems):
            return "problem"
        if self.problems:
            return "warning"
        return UNKNOWN if self.missing_right else "ok"


def format_findings(findings: Iterable[Finding]) -> str:
    """A table of what was looked at."""
    rows: list[Sequence[str]] = [(one.what, one.state, one.found) for one in findings]
    return format_table(("what", "state", "found"), rows, left=(0, 1, 2))
