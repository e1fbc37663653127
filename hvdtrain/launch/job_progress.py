"""How far a job is, as the programs of its ranks report it; no input and no output here."""

from __future__ import annotations

from collections.abc import Iterable

from hvdtrain.agent.rank_report import RankReport

__all__ = ["JobProgress"]


class JobProgress:
    """The newest report of each rank; times are the caller's clock.

    Attributes:
        latest: By rank.
        moved: When the step or the phase of each rank was last new.
        saved_at: When a checkpoint was last written; None for never.
    """

    def __init__(self) -> None:
        self.latest: dict[int, RankReport] = {}
        self.moved: dict[int, float] = {}
        self.saved_at: float | None = None

    def note(self, rank: int, report: RankReport, now: float) -> None:
        """Take in a report of ``rank``."""
        before = self.latest.get(rank, RankReport())
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
