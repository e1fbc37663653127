"""What the ranks of a session tell the outer pytest, and each other: one file of lines a rank."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ItemReport", "ReportReader", "ReportWriter", "log_path", "read_log"]


@dataclass(frozen=True, kw_only=True)
class ItemReport:
    """How one item went on one rank; ``outcome`` is pytest's, empty while the item runs.

    ``log_offset`` is where the item's output starts in the rank's log.
    """

    index: int
    rank: int
    time_s: float
    log_offset: int
    outcome: str = ""
    phase: str = ""
    text: str = ""
    xfail: str | None = None


class ReportWriter:
    """Appends this rank's reports; a line is complete or absent for the readers."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _report_path(folder, rank).open("a")

    def write(self, report: ItemReport) -> None:
        self._file.write(json.dumps(dataclasses.asdict(report)) + "\n")
        self._file.flush()


class ReportReader:
    """Follows the reports of all ranks."""

    def __init__(self, folder: Path, size: int) -> None:
        self._paths = [_report_path(folder, rank) for rank in range(size)]
        self._offsets = [0] * size
        self.started: dict[int, dict[int, ItemReport]] = {}
        self.ended: dict[int, dict[int, ItemReport]] = {}

    def poll(self) -> bool:
        """Take in what is new; False when nothing is."""
        found = False
        for rank, path in enumerate(self._paths):
            if not path.exists() or path.stat().st_size == self._offsets[rank]:
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                complete, newline, _ = file.read().rpartition(b"\n")
            self._offsets[rank] += len(complete) + len(newline)
            for line in complete.splitlines():
                report = ItemReport(**json.loads(line))
                reports = self.ended if report.outcome else self.started
                reports.setdefault(report.index, {})[report.rank] = report
                found = True
        return found


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"reports.{rank}.jsonl"


def log_path(folder: Path, rank: int) -> Path:
    """Where the output of ``rank`` goes."""
    return folder / f"rank.{rank}.log"


def read_log(folder: Path, rank: int, offset: int = 0, limit: int = 6000) -> str:
    """The last ``limit`` characters that ``rank`` printed after ``offset``."""
    path = log_path(folder, rank)
    if not path.exists():
        return ""
    text = path.read_bytes()[offset:].decode(errors="replace")
    return text if len(text) <= limit else "...\n" + text[-limit:]
