"""Comparing the ranks' inputs: a difference is an error on every rank that says where."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import DataError
from hvdtrain.keras.data.shard_plan import InputReport

__all__ = ["REMEDIES", "agree", "agreed_steps", "compare", "differences", "raise_if_different"]

REMEDIES = (
    "If the data is drawn or shuffled at random, seed it alike on all ranks: "
    "keras.utils.set_random_seed(1) at the start of the program, Dataset.shuffle(..., seed=1), "
    "torch.manual_seed(1). Otherwise pass the same data with the same arguments on every rank; or, "
    "if every rank has data of its own, pass presharded=True to hvdtrain.distribute."
)
_PRESHARDED_REMEDIES = (
    "With presharded=True ranks may have different samples and different numbers of them, but "
    "their batches must have one structure, and all ranks pass the same steps."
)
_SHOWN = 4
_ABSENT = "nothing"


def agree(collectives: Engine, report: InputReport, *, presharded: bool) -> int | None:
    """Compare the reports of all ranks; one exchange.

    Returns:
        The joint steps of one pass, or None where they are unknown or the data is endless.

    Raises:
        DataError: Ranks differ, or another rank can't use its input; on every rank.
    """
    message = json.loads(json.dumps(dataclasses.asdict(report)))
    gathered = collectives.allgather_object(message, name="input of the training loop")
    reports = [InputReport(**entry) for entry in gathered]
    compare(reports, presharded=presharded)
    return agreed_steps(reports, presharded=presharded)


def compare(reports: Sequence[InputReport], *, presharded: bool) -> None:
    """Raise what is wrong with the reports of all ranks, if anything is."""
    failed = [f"rank {rank}: {report.error}" for rank, report in enumerate(reports) if report.error]
    if failed:
        raise DataError("The input can't be used on " + "; ".join(failed))
    _refuse_shared_files(reports)
    names = ("structure",) if presharded else ("structure", "content")
    facts = [{k: v for name in names for k, v in getattr(r, name).items()} for r in reports]
    raise_if_different(facts, remedies=_PRESHARDED_REMEDIES if presharded else REMEDIES)
    if len({report.endless for report in reports}) > 1:
        endless = _ranks([rank for rank, report in enumerate(reports) if report.endless])
        raise DataError(
            f"The input of {endless} is endless, that of the other ranks is not. "
            "Repeat all of them (Dataset.repeat()) or none."
        )


def _refuse_shared_files(reports: Sequence[InputReport]) -> None:
    writers: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        for path in report.written_files:
            writers.setdefault(path, []).append(rank)
    for path, ranks in writers.items():
        if len(ranks) > 1:
            raise DataError(
                f"The file of Dataset.cache must differ between ranks, got {path} on "
                f'{_ranks(ranks)}; use a file per rank, .cache(f"{path}-{{hvdtrain.rank()}}"), '
                "or cache in memory, .cache()."
            )


def agreed_steps(reports: Sequence[InputReport], *, presharded: bool) -> int | None:
    """Joint steps of one pass: the longest rank's, so that no sample is lost."""
    steps = [report.steps for report in reports]
    if not presharded or all(report.endless for report in reports):
        return steps[0]
    known = [count for count in steps if count is not None]
    if len(known) < len(steps):
        unknown = _ranks([rank for rank, count in enumerate(steps) if count is None])
        raise DataError(
            f"With presharded=True every rank must know how many batches it has; {unknown} "
            "can't tell. Use dataset.apply(tf.data.experimental.assert_cardinality(n)), or "
            "Dataset.repeat() on every rank together with steps_per_epoch."
        )
    if max(known) == 0:
        raise DataError("No rank has any data: expected at least one sample on one rank.")
    return max(known)


def raise_if_different(facts: Sequence[dict[str, Any]], *, remedies: str) -> None:
    """Raise a ``DataError`` that lists what differs between ranks.

    Args:
        facts: For each rank, names to values, in the order in which they matter.
        remedies: Advice to the user, which ends the message.
    """
    found = differences(facts)
    if not found:
        return
    shown = "; ".join(found[:_SHOWN])
    if len(found) > _SHOWN:
        shown += f"; and {len(found) - _SHOWN} more"
    raise DataError(f"The ranks were given different input: {shown}. {remedies}")


def differences(facts: Sequence[dict[str, Any]]) -> list[str]:
    """One phrase for every fact that is not the same on all ranks."""
    names: dict[str, None] = {}
    for entry in facts:
        names.update(dict.fromkeys(entry))
    phrases = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, entry in enumerate(facts):
            holders.setdefault(str(entry.get(name, _ABSENT)), []).append(rank)
        if len(holders) > 1:
            # The usual value first: the eye goes to the ranks that come after it.
            groups = sorted(holders.items(), key=lambda item: -len(item[1]))
            values = [f"{value} on {_ranks(ranks)}" for value, ranks in groups[:_SHOWN]]
            if len(groups) > _SHOWN:
                values.append(f"{len(groups) - _SHOWN} other values elsewhere")
            phrases.append(f"{name} is " + ", ".join(values))
    return phrases


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks in words, for example ``rank 3``, or ``ranks 0, 1, 2 and 9 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"
