"""How an input is to be shared out, and what the ranks tell each other about it before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.collectives.interface import Collectives

__all__ = ["InputReport", "ShardPlan"]


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
class InputReport:
    """What a rank tells the others about its input; all of it fits into JSON.

    Attributes:
        structure: Names and values that must be equal even where each rank passes its own data.
        content: Names and values that must be equal where all ranks pass the same data.
        steps: Steps of one pass over this rank's data; None where unknown or endless.
        endless: The data never ends.
        error: Why the input can't be used, if it can't; then the rest is empty.
    """

    structure: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    endless: bool = False
    error: str | None = None
