"""Reports of results: tables for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hvdtrain.bench.machine import describe_machine, machine_line
from hvdtrain.bench.options import Options
from hvdtrain.text import format_table

__all__ = ["BenchReport", "format_seconds"]


class BenchReport:
    """Collects what one benchmark found; printed as it comes, written as JSON at the end.

    Args:
        benchmark: Name of the subcommand.
        options: What it was told.
        ranks: How many it measures on.
        shown: Whether this process prints and writes, asked each time.
    """

    def __init__(
        self, benchmark: str, options: Options, ranks: int, shown: Callable[[], bool]
    ) -> None:
        machine = describe_machine()
        self._content: dict[str, Any] = {
            "benchmark": benchmark,
            "machine": machine,
            "ranks": ranks,
            "options": dataclasses.asdict(options),
        }
        self._limits: list[dict[str, Any]] = []
        self._shown = shown
        self.print(f"hvdtrain bench {benchmark}: {ranks} ranks\n{machine_line(machine)}")

    def print(self, text: str = "") -> None:
        """Show some lines now."""
        if self._shown():
            print(text, flush=True)

    def print_table(
        self, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
    ) -> None:
        """Show a table now, with the columns ``left`` aligned to the left."""
        self.print(format_table(head, rows, left=left))

    def add(self, **values: Any) -> None:
        """Keep values for the JSON object."""
        self._content |= values

    def hold_against(
        self,
        what: str,
        measured: float,
        bound: Literal["at most", "at least"],
        limit: float,
        unit: str,
    ) -> None:
        """Set a figure beside what hvdtrain asks of itself on a quiet machine."""
        held = measured <= limit if bound == "at most" else measured >= limit
        entry = {"what": what, "measured": measured, "limit": limit, "unit": unit, "bound": bound}
        self._limits.append({**entry, "held": held})

    def finish(self, json_path: str) -> None:
        """Print the table of limits, if any, and write all to ``json_path``, if there is one."""
        rows = [
            [
                entry["what"],
                f"{entry['measured']:.3g} {entry['unit']}",
                f"{entry['bound']} {entry['limit']:g} {entry['unit']}",
                "yes" if entry["held"] else "no",
            ]
            for entry in self._limits
        ]
        if rows:
            self.print()
            self.print_table(["figure", "measured", "asked", "held"], rows)
        if json_path and self._shown():
            text = json.dumps({**self._content, "limits": self._limits}, indent=2)
            Path(json_path).write_text(text + "\n")
            self.print(f"\nwritten to {json_path}")


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that reads best, with three digits."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 1e-6:.3g} us"
