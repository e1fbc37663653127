"""The position of training in the data, whatever the number of ranks: pure arithmetic."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import DataError

__all__ = ["Position"]

_NAMES = ("epoch", "start", "missed", "joint_batch")


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a pass over the data, in units: samples of arrays, or else batches.

    What is left of the pass is ``missed``, then the pass's order from ``start`` on. No rank is
    named: what is left can be shared out to any number of them.

    Attributes:
        epoch: Whose order the pass has; for a ``tf.data`` pipeline, how many passes over it
            were begun before.
        start: Units of the order that are done, or are in ``missed``.
        missed: Places in the order, ascending and below ``start``, that are still to be done:
            what ranks that died had taken. Ascending, so that one reading of a stream finds them.
        joint_batch: Units in a whole joint step when the pass began, which fixes the order that
            ``shuffle="batch"`` gives; None where a pass is yet to begin.

    Raises:
        DataError: The numbers can't be a position.
    """

    epoch: int
    start: int = 0
    missed: tuple[int, ...] = ()
    joint_batch: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.epoch, self.start, *self.missed)
        if not all(_is_count(number) for number in numbers):
            raise self._nonsense("whole numbers of at least 0")
        if self.joint_batch is not None and not (
            _is_count(self.joint_batch) and self.joint_batch > 0
        ):
            raise self._nonsense("a joint_batch of at least 1, or None")
        rising = all(one < next_ for one, next_ in zip(self.missed, self.missed[1:]))
        if self.missed and not (rising and self.missed[-1] < self.start):
            raise self._nonsense("missed places that rise and lie below start")

    def after(self, units: int) -> Position:
        """The position when ``units`` more of what is left are done, from the front.

        Raises:
            DataError: Not a number of units.
        """
        if not _is_count(units):
            raise DataError(f"{units!r} units can't be done; expected a whole number, at least 0.")
        behind = min(units, len(self.missed))
        return dataclasses.replace(
            self, start=self.start + units - behind, missed=self.missed[behind:]
        )

    def places(self, units: Iterable[int]) -> list[int]:
        """Turn units, counted in what is left here, into places in the pass's order."""
        behind = len(self.missed)
        return [
            self.missed[unit] if unit < behind else self.start + unit - behind for unit in units
        ]

    def missing(self, places: Iterable[int]) -> Position:
        """This position, except that the units at these places were not done after all.

        Raises:
            DataError: They are not done here.
        """
        return dataclasses.replace(self, missed=tuple(sorted({*self.missed, *places})))

    def left_of(self, units: int) -> int:
        """Return the number of units that are left of a pass of ``units``."""
        before = bisect.bisect_left(self.missed, units)
        return before + max(0, units - self.start)

    @classmethod
    def from_json(cls, value: Any) -> Position:
        """The position of which ``dataclasses.asdict`` made this.

        Raises:
            DataError: It is none.
        """
        if not isinstance(value, dict) or sorted(value) != sorted(_NAMES):
            raise DataError(
                f"A position in the data can't be read from {str(value)[:200]}. Expected an "
                f"object with the entries {', '.join(_NAMES)}, as a checkpoint holds it."
            )
        missed = value["missed"]
        if not isinstance(missed, (list, tuple)):
            raise DataError(
                f"A position in the data has missed={str(missed)[:200]}; expected a list."
            )
        return cls(**{**value, "missed": tuple(missed)})

    def _nonsense(self, expected: str) -> DataError:
        text = f"{self!r}"
        return DataError(f"{text[:200]} is no position in the data. Expected {expected}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
