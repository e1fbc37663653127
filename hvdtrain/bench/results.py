"""How results are shown: tables for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdtrain.cluster.ranges import format_table

__all__ = ["BenchReport", "Limit", "format_seconds"]


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A figure beside what hvdtrain asks of itself on a quiet machine."""

    what: str
    measured: float
    limit: float
    unit: str
    bound: Literal["at most", "at least"]

    @property
    def held(self) -> bool:
        """Whether the figure is on the right side."""
        if self.bound == "at most":
            return self.measured <= self.limit
        return self.measured >= self.limit


class BenchReport:
    """Collects what one benchmark found; printed as it comes, written as JSON at the end.

    Args:
        benchmark: Name of the subcommand.
        header: Values for the JSON object: the machine, the ranks, the options.
    """

    def __init__(self, benchmark: str, header: dict[str, Any]) -> None:
        self._content: dict[str, Any] = {"benchmark": benchmark, **header}
        self._limits: list[Limit] = []

    def print(self, text: str = "") -> None:
        """Show a line or a table now."""
        print(text, flush=True)

    def add(self, key: str, value: Any) -> None:
        """Keep ``value`` for the JSON object."""
        self._content[key] = value

    def hold_against(self, limit: Limit) -> None:
        """Remember a figure for the table of limits."""
        self._limits.append(limit)

    def finish(self, json_path: str) -> None:
        """Print the table of limits, and write everything to ``json_path`` if there is one."""
        rows = [
            [
                limit.what,
                f"{limit.measured:.3g} {limit.unit}",
                f"{limit.bound} {limit.limit:g} {limit.unit}",
                "yes" if limit.held else "no",
            ]
            for limit in self._limits
        ]
        if rows:
            self.print()
            self.print(format_table(["figure", "measured", "asked", "held"], rows, left=(0,)))
        if json_path:
            limits = [{**dataclasses.asdict(one), "held": one.held} for one in self._limits]
            text = json.dumps({**self._content, "limits": limits}, indent=2)
            Path(json_path).write_text(text + "\n")
            self.print(f"\nwritten to {json_path}")


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best, with three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
