"""What hvdtrain check has to say of something that is not as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.cluster.ranges import listing
from hvdtrain.remote.probe_messages import Facts
from hvdtrain.remote.remote_probe import Answer

__all__ = ["Problem", "answered", "show_problem", "size"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it should be.

    Attributes:
        hosts: The hosts where it is so.
        found: Says how it is.
        expected: Says how it should be.
        remedy: Says how to mend it, by a command where one does it.
        error: Whether training can't be relied on; otherwise it is a warning.
    """

    hosts: tuple[str, ...]
    found: str
    expected: str
    remedy: str
    error: bool = True


def show_problem(problem: Problem) -> str:
    """One problem, with what to do."""
    kind = "problem" if problem.error else "warning"
    where = f" on {listing(problem.hosts)}" if problem.hosts else ""
    return "\n".join(
        [
            f"{kind}{where}: {problem.found}",
            f"  expected: {problem.expected}",
            f"  do: {problem.remedy}",
        ]
    )


def size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def answered(answers: Sequence[Answer]) -> list[tuple[str, Facts]]:
    """Hosts that answered, and what they said."""
    return [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
