"""What the program of a rank reports: how far it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["FIELDS", "RankReport", "read_report"]

_LONGEST_WORD = 500


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The newest state of one rank; ``hvdtrain.monitor.progress`` tells it.

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


FIELDS = tuple(entry.name for entry in fields(RankReport))


def read_report(message: Mapping[str, Any]) -> RankReport | None:
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
    return RankReport(**numbers, **shown)


def _printable(word: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in word[:_LONGEST_WORD])
