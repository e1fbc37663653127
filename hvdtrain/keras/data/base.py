"""The contract between the input of a training loop and the loop: ``Source`` and ``ShardedInput``.

A source looks at what the user passed, says what the ranks have to agree on, and then makes this
rank's share of it. ``shard_input`` drives it; there is one source for each kind of input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdtrain.collectives.base import Collectives

__all__ = ["JOINT_ROWS_UNKNOWN", "Report", "ShardPlan", "ShardedInput", "Source"]

JOINT_ROWS_UNKNOWN = -1
"""``joint_rows`` of an element where only a reduction over the ranks can tell it."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How an input is to be shared out; ``seed``, ``steps`` and ``presharded`` are alike on all.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        seed: Source of every order that hvdtrain chooses.
        steps: Keras' ``steps_per_epoch`` (or ``steps``), None for a whole pass.
        presharded: Each rank passed its own data; nothing is to be shared out.
        collectives: For what the ranks still have to tell each other later.
    """

    rank: int
    size: int
    seed: int
    steps: int | None
    presharded: bool
    collectives: Collectives

    @property
    def shards(self) -> int:
        """Parts that this rank's data is cut into: 1 if it is its own data anyway."""
        return 1 if self.presharded else self.size

    @property
    def shard(self) -> int:
        """Which of the parts is this rank's."""
        return 0 if self.presharded else self.rank


@dataclass(kw_only=True)
class Report:
    """What a rank tells the others about its input; all of it fits into JSON.

    Attributes:
        structure: What must be equal even where each rank passes its own data: names to values.
        content: What must be equal where all ranks pass the same data: names to values.
        steps: Steps of one pass over this rank's data; None where unknown or endless.
        endless: The data never ends.
        error: Why the input can't be used, if it can't; then the rest is empty.
    """

    structure: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    endless: bool = False
    error: str | None = None


class Source(Protocol):
    """One kind of input, before it is shared out."""

    def report(self) -> Report:
        """Look at the input, without talking to other ranks.

        Raises:
            DataError: The input can't be shared out, whatever the others have.
        """
        ...

    def shard(self, steps: int | None) -> ShardedInput:
        """Make this rank's share.

        Args:
            steps: Joint steps of one pass as the ranks agreed on it; None where unknown or
                endless.
        """
        ...


class ShardedInput:
    """One rank's share of an input, in the form in which it enters Keras' loops.

    Attributes:
        dataset: A ``tf.data.Dataset`` of one pass over the data, with elements ``(batch, rows,
            joint_rows)``. ``batch`` is the tuple (x,), (x, y) or (x, y, sample_weight). ``rows``
            (int32) is how many of its rows count: all, or 0 in a step in which this rank has
            nothing and ``batch`` is any batch of the right structure. ``joint_rows`` (int32) is
            the sum of ``rows`` over the ranks, or -1 where it can't be known beforehand.
        steps: Joint steps of one pass, the dataset's cardinality; None where unknown or endless.
        joint_rows_known: Whether ``joint_rows`` is ever other than -1.
        notice: A line that the user should see once, or None.

    Pass ``dataset`` to Keras with the user's ``steps_per_epoch`` unchanged: where that is less
    than a pass, Keras' iterator goes on in the next epoch, alike on every rank.
    The three hooks are collective: every rank calls them at the same points.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        steps: int | None,
        joint_rows_known: bool,
        notice: str | None = None,
    ) -> None:
        self.dataset = dataset
        self.steps = steps
        self.joint_rows_known = joint_rows_known
        self.notice = notice

    def on_epoch_begin(self, epoch: int) -> None:
        """Call before Keras starts to iterate; a pass that starts then has this epoch's order."""

    def verify(self) -> None:
        """Call after the first step of an epoch: do all ranks read the same stream?

        Some inputs show what they hold only when they run. ``on_epoch_end`` does the same; after
        one step the user has waited less.

        Raises:
            DataError: They don't; raised on every rank.
        """

    def on_epoch_end(self) -> None:
        """Call after the last step of an epoch.

        Raises:
            DataError: As ``verify``.
        """
        self.verify()
