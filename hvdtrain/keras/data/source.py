"""The contract that every kind of input fulfils: ``Source``.

A source looks at what the user passed, says what the ranks have to agree on, and then makes this
rank's share of it. ``shard_input`` drives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hvdtrain.collectives.base import Collectives

if TYPE_CHECKING:
    from hvdtrain.keras.data.base import ShardedInput

__all__ = ["Report", "ShardPlan", "Source"]


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
    """One kind of input, before it is shared out.

    Attributes:
        plan: How it is shared out.
        unit: What it is shared out by: "samples" or "batches".
        units: How many of them a pass over this rank's data has; None where unknown or endless.
        each: How many of them a rank takes in a whole step.
    """

    plan: ShardPlan

    @property
    def unit(self) -> str: ...

    @property
    def units(self) -> int | None: ...

    @property
    def each(self) -> int: ...

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
