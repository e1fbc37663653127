"""How far the ranks are, as their programs report it; no input and no output here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["FIELDS", "Report", "Reports", "read_report"]

_LONGEST_WORD = 500


@dataclass(frozen=True, kw_only=True)
class Report:
    """The newest state of one rank; ``hvdtrain.monitor.report`` tells it.

    Attributes:
        pid: The process that prints its stacks at SIGQUIT; None for none.
        step: Optimizer steps that are complete; None before the first.
        epoch: Of the last step.
        phase: What it does; steps come in ``"training"`` alone.
        saved: Step of the newest checkpoint that this run of the program wrote.
        resumed: Step of the checkpoint that it began from.
        waiting_in: The operation in which it waits for other ranks; empty for none.
    """

    pid: int | None = None
    step: int | None = None
    epoch: int | None = None
    phase: str = ""
    saved: int | None = None
    resumed: int | None = None
    waiting_in: str = ""


FIELDS = tuple(entry.name for entry in fields(Report))


def read_report(message: Mapping[str, Any]) -> Report | None:
    """The report in a message; None where it holds something else: a program may write anything."""
    numbers: dict[str, Any] = {
        name: message.get(name) for name in ("pid", "step", "epoch", "saved", "resumed")
    }
    words = {name: message.get(name, "") for name in ("phase", "waiting_in")}
    if not all(value is None or type(value) is int for value in numbers.values()):
        return None
    if not all(isinstance(word, str) for word in words.values()):
        return None
    shown: dict[str, Any] = {name: _printable(word) for name, word in words.items()}
    return Report(**numbers, **shown)


def _printable(word: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in word[:_LONGEST_WORD])


class Reports:
    """The newest report of each rank; times are the caller's clock.

    Attributes:
        latest: By rank.
        moved: When the step or the phase of each rank was last new.
        saved_at: When a checkpoint was last written; None for never.
    """

    def __init__(self) -> None:
        self.latest: dict[int, Report] = {}
        self.moved: dict[int, float] = {}
        self.saved_at: float | None = None

    def note(self, rank: int, report: Report, now: float) -> None:
        """Take in a report of ``rank``."""
        before = self.latest.get(rank, Report())
        if (report.step, report.phase) != (before.step, before.phase) or rank not in self.latest:
            self.moved[rank] = now
        self.latest[rank] = report
        if report.saved is not None and report.saved != before.saved:
            self.saved_at = now

    @property
    def moved_at(self) -> float | None:
        """When a step, a phase or a rank was last new; None where nothing was reported."""
        return max(self.moved.values(), default=None)

    @property
    def step(self) -> int | None:
        """The most that a rank has done."""
        return self._most(report.step for report in self.latest.values())

    @property
    def stepped(self) -> bool:
        """Whether a rank has done a step that an earlier run of the program had not saved."""
        return any(
            report.step is not None and report.step > (report.resumed or 0)
            for report in self.latest.values()
        )

    @property
    def saved(self) -> int | None:
        """Step of the newest checkpoint that there is."""
        found = [step for report in self.latest.values() for step in (report.saved, report.resumed)]
        return self._most(found)

    @staticmethod
    def _most(steps: Iterable[int | None]) -> int | None:
        return max((step for step in steps if step is not None), default=None)
