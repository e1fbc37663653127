"""Reports of benchmarks as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hvdtrain.bench.machine import describe_machine, machine_line
from hvdtrain.bench.options import Options
from hvdtrain.text import format_table, plural

__all__ = ["BenchReport", "format_number", "format_seconds"]


class BenchReport:
    """The results of one benchmark, printed immediately and written as JSON at the end.

    The function ``is_writer`` returns whether this process prints and writes.
    """

    def __init__(
        self, benchmark: str, options: Options, ranks: int, is_writer: Callable[[], bool]
    ) -> None:
        machine = describe_machine()
        self._content: dict[str, Any] = {
            "benchmark": benchmark,
            "machine": machine,
            "ranks": ranks,
            "options": dataclasses.asdict(options),
        }
        self._limits: list[dict[str, Any]] = []
        self._is_writer = is_writer
        self.print(f"hvdtrain bench {benchmark}: {plural(ranks, 'rank')}\n{machine_line(machine)}")

    def print(self, text: str = "") -> None:
        """Print text."""
        if self._is_writer():
            print(text, flush=True)

    def print_table(
        self, head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
    ) -> None:
        """Print a table. The columns with the indices in ``left`` are left-aligned."""
        self.print(format_table(head, rows, left=left))

    def add(self, **values: Any) -> None:
        """Add values to the results that are written as JSON."""
        self._content |= values

    def compare(
        self,
        what: str,
        measured: float,
        bound: Literal["at most", "at least"],
        limit: float,
        unit: str,
    ) -> None:
        """Compare a measured value with its target. Targets are for an idle machine."""
        held = measured <= limit if bound == "at most" else measured >= limit
        entry = {"what": what, "measured": measured, "limit": limit, "unit": unit, "bound": bound}
        self._limits.append({**entry, "held": held})

    def finish(self, json_path: str) -> None:
        """Print the table of targets, and write all results to ``json_path`` unless it is empty."""
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
            self.print_table(["figure", "measured", "target", "reached"], rows)
        if json_path and self._is_writer():
            text = json.dumps({**self._content, "limits": self._limits}, indent=2)
            Path(json_path).write_text(text + "\n")
            self.print(f"\nresults written to {json_path}")


def format_number(value: float) -> str:
    """Format a number with three significant digits, or as an integer if it is 100 or more."""
    return f"{value:.0f}" if value >= 99.95 or value == 0 else f"{value:#.3g}"


def format_seconds(seconds: float) -> str:
    """Format seconds with three significant digits in s, ms or us."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{format_number(seconds / unit)} {name}"
    return f"{format_number(seconds * 1e6)} us"
