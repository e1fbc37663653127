"""Sharing out what a training loop reads: arrays, ``tf.data`` and ``PyDataset`` to N ranks.

``shard_input`` takes what a user passes to ``fit``, ``evaluate`` or ``predict`` and returns one
rank's share as a dataset for Keras' own loop. Every rank has the same number of steps; no sample
is lost and none comes twice; joint step ``k`` of N ranks holds what one process with N times the
batch would see at step ``k``.
"""

from hvdtrain.keras.data.input_kinds import shard_input
from hvdtrain.keras.data.shard_plan import ShardPlan
from hvdtrain.keras.data.sharded_input import ShardedInput, Share

__all__ = ["ShardPlan", "ShardedInput", "Share", "shard_input"]
