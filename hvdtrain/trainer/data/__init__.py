"""Input of training loops, divided among ranks.

``shard_input`` takes the input of ``fit``, ``evaluate`` or ``predict``. It returns the share of one
rank, which Keras' own loop can read. All ranks have the same number of steps, and every sample is
used exactly once. In step ``k``, N ranks together use the samples that a single process with N
times the batch size would use in its step ``k``. A step that all ranks take together is called a
joint step. Reading the whole data once is called a pass.
"""

from hvdtrain.trainer.data.host_batches import HostBatches, Share
from hvdtrain.trainer.data.input_kinds import shard_input
from hvdtrain.trainer.data.sharded_input import ShardedInput, ShardPlan

__all__ = ["HostBatches", "ShardPlan", "ShardedInput", "Share", "shard_input"]
