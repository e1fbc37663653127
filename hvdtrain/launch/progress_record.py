"""Events on a job's progress, from the reports of ranks and agents."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from hvdtrain.launch.job_progress import JobProgress, held_by
from hvdtrain.launch.observer import CheckpointSaved, Observer, Progress, RankTable
from hvdtrain.launch.rank_pace import find_straggler

__all__ = ["ProgressRecord"]

INTERVAL_S = 1.0
# Without a step for so long the job stands still, which need not be for good.
HELD_S = 5.0
# Rows that tell of each rank are long, and the longer the more ranks there are.
RANKS_INTERVAL_S = 10.0
_RANKS_PER_S = 10
_SELDOM_KNOWN = ("input_s", "reduced_bytes", "gpu", "gpu_mb")

_Value = TypeVar("_Value")


class ProgressRecord:
    """Looks at the reports of one attempt, and says what is new in them.

    Args:
        observer: Receives the events.
        reports: The newest of each rank.
        ranks: How many ranks there are.
        hosts: Tells the host of each that has begun.
        running: Tells which have begun and not ended.
    """

    def __init__(
        self,
        observer: Observer,
        reports: JobProgress,
        ranks: int,
        *,
        hosts: Callable[[], Mapping[int, str]],
        running: Callable[[], Collection[int]],
    ) -> None:
        self._observer = observer
        self._reports = reports
        self._ranks = ranks
        self._hosts = hosts
        self._running = running
        self._due_at = 0.0
        self._ranks_due_at = 0.0
        self._told: tuple[int | None, int | None, list[int]] = (None, None, [])
        self._saved = reports.saved

    def review(self, now: float, *, last: bool = False) -> None:
        """Write what is new, if it is time for that, or if this is the ``last`` chance."""
        if now < self._due_at and not last:
            return
        self._due_at = now + INTERVAL_S
        reports = self._reports
        if reports.saved != self._saved:
            self._saved = reports.saved
            self._observer.on_event(CheckpointSaved(step=reports.saved))
        held = held_by(reports, self._running(), now, HELD_S)
        if (told := (reports.step, reports.epoch, held)) != self._told:
            self._told = told
            self._observer.on_event(self._progress(held))
        if reports.latest and (now >= self._ranks_due_at or last):
            self._ranks_due_at = now + max(RANKS_INTERVAL_S, self._ranks / _RANKS_PER_S)
            self._observer.on_event(RankTable(columns=self._of_ranks()))

    def _progress(self, held: list[int]) -> Progress:
        reports = self._reports
        paces = reports.paces.of_late()
        slow = find_straggler(paces)
        host = self._hosts().get(slow.rank) if slow is not None else None
        return Progress(
            step=reports.step,
            epoch=reports.epoch,
            total_steps=reports.total_steps,
            own_s=[pace.own_s for pace in paces.values()],
            reduced_bytes_per_s=round(sum(pace.reduced_per_s for pace in paces.values())),
            slow=(slow.rank, round(slow.factor, 2), host) if slow is not None else None,
            samples=reports.samples,
            loss=reports.loss,
            held_by=held,
        )

    def _of_ranks(self) -> Mapping[str, Any]:
        """A list for each thing, with a value for each rank; None where it is not known.

        What is known of no rank, as GPUs often are, has no list.
        """
        latest, usage = self._reports.latest, self._reports.usage
        paces = self._reports.paces.of_late()
        lists = {
            "step": self._list(latest, lambda report: report.step),
            "phase": self._list(latest, lambda report: report.phase),
            "own_s": self._list(paces, lambda pace: float(f"{pace.own_s:.4g}")),
            "waited_s": self._list(latest, lambda report: report.waited_s),
            "input_s": self._list(latest, lambda report: report.input_s),
            "reduced_bytes": self._list(latest, lambda report: report.reduced_bytes),
            "rss_mb": self._list(usage, lambda taken: _mebibytes(taken.rss_bytes)),
            "cpu": self._list(usage, lambda taken: taken.cpu),
            "gpu": self._list(usage, lambda taken: taken.gpu),
            "gpu_mb": self._list(usage, lambda taken: _mebibytes(taken.gpu_bytes)),
        }
        unknown = [None] * self._ranks
        return {
            name: values
            for name, values in lists.items()
            if name not in _SELDOM_KNOWN or values != unknown
        }

    def _list(self, of: Mapping[int, _Value], value: Callable[[_Value], Any]) -> list[Any]:
        return [value(of[rank]) if rank in of else None for rank in range(self._ranks)]


def _mebibytes(size: int | None) -> int | None:
    return None if size is None else size >> 20
