"""The inputs of ``fit``, ``evaluate`` and ``predict``, shared out among the ranks there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.collectives.interface import Collectives
from hvdtrain.errors import DataError
from hvdtrain.keras.data import ShardedInput, ShardPlan, Share, shard_input
from hvdtrain.keras.membership import Membership

__all__ = ["FitInputs"]

Result = TypeVar("Result")


class FitInputs:
    """Shares out what a model is given.

    Args:
        seed: The source of the data's orders, the same on all ranks.
        watches: Whether this rank's own data count for nothing: what it evaluates and predicts is
            that of the others, at whose side it does every step.
    """

    def __init__(
        self,
        collectives: Collectives,
        membership: Membership,
        *,
        seed: int,
        presharded: bool,
        notice: Callable[[str | None], None],
        watches: bool = False,
    ) -> None:
        self._collectives = collectives
        self._membership = membership
        self.seed = seed
        self.presharded = presharded
        self._notice = notice
        self._watches = watches

    def share(self, x: Any, y: Any = None, sample_weight: Any = None, **given: Any) -> ShardedInput:
        """This rank's share of an input; ``given`` are fields of ``ShardPlan``. Collective.

        Raises:
            DataError: The input can't be shared out.
        """
        self._membership.renew()
        plan = ShardPlan(
            rank=self._membership.rank,
            size=self._membership.size,
            seed=self.seed,
            collectives=self._collectives,
            presharded=self.presharded,
            **given,
        )
        sharded = shard_input(x, y, sample_weight, plan=plan)
        self._notice(sharded.notice)
        return sharded

    def check_repeatable(self, sharded: ShardedInput) -> None:
        """Check that the rest of a pass can be shared out anew, where ranks may be lost.

        Raises:
            DataError: It can't.
        """
        if self._membership.elastic and not sharded.repeatable:
            raise DataError(
                "In an elastic job (--elastic) a pass over the tf.data pipeline must be able to "
                "begin again when a rank is lost, and its shuffle has another order then. Use "
                "Dataset.shuffle(..., reshuffle_each_iteration=False), or shuffle in the pipeline "
                "itself and once; or pass arrays or a keras.utils.PyDataset, which hvdtrain "
                "shuffles; or use --max-restarts in place of --elastic."
            )

    def whole_pass(self, sharded: ShardedInput, run: Callable[[tf.data.Dataset], Result]) -> Result:
        """Return what ``run`` makes of a whole input, on all ranks; anew if one was lost meanwhile.

        Args:
            sharded: This rank's share, perhaps from when there were more ranks.
            run: Takes this rank's part as ``ShardedInput.dataset``.
        """
        while True:
            sharded = sharded.reshard(rank=self._membership.rank, size=self._membership.size)
            sharded.on_epoch_begin(0)
            dataset = sharded.dataset
            result = run(dataset.map(_without_rows) if self._watches else dataset)
            sharded.on_epoch_end()
            if not self._membership.renew():
                return result


def _without_rows(share: Share) -> Share:
    """Return a share in which nothing counts."""
    return share._replace(rows=tf.zeros_like(share.rows))
