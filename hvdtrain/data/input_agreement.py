"""Comparison of the inputs that ranks pass to ``fit``. If they differ, all ranks raise an error."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import DataError

__all__ = ["REMEDIES", "InputReport", "agree", "compare", "raise_if_different"]

REMEDIES = (
    "If the data is shuffled or random, use the same seed on all ranks: "
    "keras.utils.set_random_seed(1) at the start of the program, Dataset.shuffle(..., seed=1), "
    "torch.manual_seed(1). Otherwise pass the same data and arguments on every rank. If every rank "
    "is meant to have different data, pass presharded=True to hvdtrain.distribute."
)
_PRESHARDED_REMEDIES = (
    "With presharded=True, batches must have the same structure on all ranks, and all ranks must "
    "pass the same steps."
)
_MAX_SHOWN = 4


@dataclass(kw_only=True)
class InputReport:
    """A rank's description of its input, which the ranks exchange as JSON."""

    # names and values that must be equal on all ranks
    structure: dict[str, Any] = field(default_factory=dict)
    # names and values that must be equal if all ranks pass the same data
    content: dict[str, Any] = field(default_factory=dict)
    # The number of steps that the ranks need to read this rank's data once. None if unknown or
    # infinite.
    steps: int | None = None
    endless: bool = False  # whether the data is infinite
    # The files that are written while the data is read. Each rank must write different files.
    written_files: list[str] = field(default_factory=list)
    error: str | None = None  # The reason why the input can't be used. None if it can be used.


def agree(collectives: Engine, report: InputReport, *, presharded: bool) -> int | None:
    """Call ``compare`` with the reports of all ranks. All ranks must call this."""
    gathered = collectives.allgather_object(
        dataclasses.asdict(report), name="input of the training loop"
    )
    return compare([InputReport(**entry) for entry in gathered], presharded=presharded)


def compare(reports: Sequence[InputReport], *, presharded: bool) -> int | None:
    """Compare the reports of all ranks.

    Returns:
        The number of steps that the ranks need to read the data once. If each rank has different
        data, it is the number of the rank that needs the most steps. None if unknown or infinite.

    Raises:
        DataError: If the inputs differ, or if a rank can't use its input.
    """
    failed = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error]
    if failed:
        raise DataError("The input can't be used on " + "; ".join(failed))
    _check_written_files(reports)
    parts = [r.structure if presharded else {**r.structure, **r.content} for r in reports]
    raise_if_different(parts, remedies=_PRESHARDED_REMEDIES if presharded else REMEDIES)
    endless = [rank for rank, report in enumerate(reports) if report.endless]
    if 0 < len(endless) < len(reports):
        raise DataError(
            f"The input is endless on {_ranks(endless)} only; repeat it on all ranks "
            "(Dataset.repeat()) or on none."
        )
    if endless or not presharded:
        return reports[0].steps
    unknown = [rank for rank, report in enumerate(reports) if report.steps is None]
    if unknown:
        raise DataError(
            f"With presharded=True the number of batches must be known, but is unknown on "
            f"{_ranks(unknown)}. Use dataset.apply(tf.data.experimental.assert_cardinality(n)), or "
            "Dataset.repeat() on every rank together with steps_per_epoch."
        )
    steps = max(report.steps or 0 for report in reports)
    if not steps:
        raise DataError("The input is empty on all ranks; pass at least one sample.")
    return steps


def _check_written_files(reports: Sequence[InputReport]) -> None:
    writers: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for path in report.written_files:
            writers.setdefault(path, []).append(rank)
    for path, ranks in writers.items():
        if len(ranks) > 1:
            raise DataError(
                f"The file of Dataset.cache must differ between ranks, got {path} on "
                f"{_ranks(ranks)}. Use a file per rank: "
                f'.cache(f"{path}-{{hvdtrain.rank()}}"). Or cache in memory: .cache().'
            )


def raise_if_different(facts: Sequence[dict[str, Any]], *, remedies: str) -> None:
    """Raise an error that lists the differences between ranks, or return if nothing differs.

    Args:
        facts: For each rank, a dictionary that maps names to values.
        remedies: Advice for the user, added at the end of the message.

    Raises:
        DataError: If the values differ.
    """
    names = dict.fromkeys(name for entry in facts for name in entry)
    phrases = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, entry in enumerate(facts):
            ranks_by_value.setdefault(str(entry.get(name, "missing")), []).append(rank)
        if len(ranks_by_value) > 1:
            # The most common value comes first, so that exceptions stand out.
            groups = sorted(ranks_by_value.items(), key=lambda item: -len(item[1]))
            values = [f"{value} on {_ranks(ranks)}" for value, ranks in groups[:_MAX_SHOWN]]
            if len(groups) > _MAX_SHOWN:
                values.append(f"{len(groups) - _MAX_SHOWN} other values elsewhere")
            phrases.append(f"{name} is " + ", ".join(values))
    if not phrases:
        return
    if len(phrases) > _MAX_SHOWN:
        phrases[_MAX_SHOWN:] = [f"and {len(phrases) - _MAX_SHOWN} more"]
    raise DataError(f"The ranks were given different input: {'; '.join(phrases)}. {remedies}")


def _ranks(ranks: Sequence[int]) -> str:
    """Return a text such as ``rank 3`` or ``ranks 0, 1, 2, 3, 4, 5, 6, 7 and 9 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
