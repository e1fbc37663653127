"""Input of training loops, divided among ranks.

``shard_input`` takes the input of ``fit``, ``evaluate`` or ``predict`` and returns one rank's share
for Keras' own loop. All ranks have the same number of steps, and every sample is used exactly once.
In step ``k``, N ranks together use the samples that a single process with N times the batch size
would use in its step ``k``. Such a step of all ranks is called a joint step.
"""

from hvdtrain.keras.data.input_kinds import shard_input
from hvdtrain.keras.data.sharded_input import ShardedInput, ShardPlan, Share

__all__ = ["ShardPlan", "ShardedInput", "Share", "shard_input"]
