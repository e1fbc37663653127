"""Reports of the ranks of a session to the outer pytest and to each other, as files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ItemReport", "ReportReader", "ReportWriter", "log_path", "read_log"]


@dataclass(frozen=True, kw_only=True)
class ItemReport:
    """The result of an item on one rank.

    ``outcome`` is pytest's outcome, and empty while the item runs. ``log_offset`` is the position
    of the item's output in the rank's log.
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
    """Writer of this rank's reports, one line each."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = _report_path(folder, rank).open("a")

    def write(self, report: ItemReport) -> None:
        self._file.write(json.dumps(dataclasses.asdict(report)) + "\n")
        self._file.flush()


class ReportReader:
    """Reader of the reports of all ranks."""

    def __init__(self, folder: Path, size: int) -> None:
        self._paths = [_report_path(folder, rank) for rank in range(size)]
        self._offsets = [0] * size
        self.started: dict[int, dict[int, ItemReport]] = {}
        self.ended: dict[int, dict[int, ItemReport]] = {}

    def poll(self) -> bool:
        """Read new reports, and return whether any were found."""
        is_new = False
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
                is_new = True
        return is_new


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"reports.{rank}.jsonl"


def log_path(folder: Path, rank: int) -> Path:
    """Return the path of the rank's log."""
    return folder / f"rank.{rank}.log"


def read_log(folder: Path, rank: int, offset: int = 0, limit: int = 6000) -> str:
    """Return the last ``limit`` characters of the rank's log after ``offset``."""
    path = log_path(folder, rank)
    if not path.exists():
        return ""
    text = path.read_bytes()[offset:].decode(errors="replace")
    return text if len(text) <= limit else "...\n" + text[-limit:]
