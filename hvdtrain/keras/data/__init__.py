"""Input of training loops, divided among ranks.

``shard_input`` takes the input of ``fit``, ``evaluate`` or ``predict`` and returns one rank's share
for Keras' own loop. All ranks have the same number of steps, every sample is used exactly once, and
joint step ``k`` of N ranks consists of the samples of step ``k`` in a single process with N times
the batch size.
"""

from hvdtrain.keras.data.input_kinds import shard_input
from hvdtrain.keras.data.sharded_input import ShardedInput, ShardPlan, Share

__all__ = ["ShardPlan", "ShardedInput", "Share", "shard_input"]
