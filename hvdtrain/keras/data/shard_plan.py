"""The plan for sharing out an input, and the ranks' reports to each other about it before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hvdtrain.collectives.engine import Engine
from hvdtrain.keras.data.partition import Shuffle

__all__ = ["InputReport", "ShardPlan"]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """The plan for sharing out an input among ranks.

    ``size``, ``seed``, ``steps``, ``presharded`` and ``trains`` are alike on all ranks.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        seed: At least 0; with the epoch it determines every order that hvdtrain chooses.
        collectives: The ranks' connection.
        steps: ``steps_per_epoch`` in ``fit``, ``steps`` in ``evaluate`` and ``predict``; None for
            a whole pass.
        batch_size: Rows per rank and step, for arrays; None for Keras' choice.
        shuffle: Whether each epoch has an order of its own; for arrays and PyDatasets.
            A ``tf.data.Dataset`` shuffles itself.
        class_weight: The weight of each class; the argument of ``fit``.
        presharded: Every rank passes its own data, which is used whole. A rank that has fewer
            batches than others takes part in the rest of an epoch with rows = 0.
        trains: Whether ``EpochIterator`` reads it, which asks before each block of steps.
    """

    rank: int
    size: int
    seed: int
    collectives: Engine
    steps: int | None = None
    batch_size: int | None = None
    shuffle: Shuffle = False
    class_weight: Any = None
    presharded: bool = False
    trains: bool = False

    @property
    def shards(self) -> int:
        """Parts that this rank's data is cut into: 1 if it is its own data anyway."""
        return 1 if self.presharded else self.size

    @property
    def shard(self) -> int:
        """The number of this rank's part, from 0."""
        return 0 if self.presharded else self.rank


@dataclass(kw_only=True)
class InputReport:
    """A rank's report to the others about its input; all of it fits into JSON.

    Attributes:
        structure: Names and values that must be equal even where each rank passes its own data.
        content: Names and values that must be equal where all ranks pass the same data.
        steps: Steps of one pass over this rank's data; None where unknown or endless.
        endless: The data never ends.
        written_files: Files that reading the data writes; no two ranks may write the same one.
        error: Why the input can't be used, if it can't; then the rest is empty.
    """

    structure: dict[str, Any] = field(default_factory=dict)
    content: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    endless: bool = False
    written_files: list[str] = field(default_factory=list)
    error: str | None = None
