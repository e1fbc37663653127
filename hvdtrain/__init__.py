"""Synchronous data-parallel training of Keras models on MPI and Slurm clusters.

::

    import keras, hvdtrain

    hvdtrain.init()
    model = keras.Sequential([...])
    model.compile(...)
    hvdtrain.distribute(model)
    model.fit(x, y, batch_size=64)

Names are imported on first use, so importing hvdtrain loads neither TensorFlow nor MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdtrain.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveTimeoutError,
    ConfigurationError,
    DataError,
    HvdtrainError,
    LaunchError,
    MismatchError,
    ModelError,
    NonFiniteError,
    NotInitializedError,
    PeerFailedError,
    PeerLostError,
    Preempted,
    RanksLostError,
    TooFewRanksError,
)
from hvdtrain.lazy import lazy_names
from hvdtrain.version import __version__

if TYPE_CHECKING:
    from hvdtrain.trainer.backends.tensorflow.gradient_tape import DistributedGradientTape
    from hvdtrain.trainer.batch_normalization import SyncBatchNormalization
    from hvdtrain.trainer.custom_loop import DistributedOptimizer, broadcast_variables
    from hvdtrain.trainer.distribute import distribute
    from hvdtrain.trainer.learning_rate import WarmUp, scale_learning_rate
    from hvdtrain.trainer.progress import StepLog
    from hvdtrain.trainer.saving.checkpoint_callback import Checkpoint
    from hvdtrain.world import (
        init,
        is_chief,
        is_initialized,
        local_rank,
        local_size,
        node_rank,
        rank,
        shutdown,
        size,
    )

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DataError",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HvdtrainError",
    "LaunchError",
    "MismatchError",
    "ModelError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerFailedError",
    "PeerLostError",
    "Preempted",
    "RanksLostError",
    "StepLog",
    "SyncBatchNormalization",
    "TooFewRanksError",
    "WarmUp",
    "__version__",
    "broadcast_variables",
    "distribute",
    "init",
    "is_chief",
    "is_initialized",
    "local_rank",
    "local_size",
    "node_rank",
    "rank",
    "scale_learning_rate",
    "shutdown",
    "size",
]

__getattr__, *_ = lazy_names(
    __name__,
    {
        "hvdtrain.trainer.custom_loop": ("DistributedOptimizer", "broadcast_variables"),
        "hvdtrain.trainer.distribute": ("distribute",),
        "hvdtrain.trainer.backends.tensorflow.gradient_tape": ("DistributedGradientTape",),
        "hvdtrain.trainer.batch_normalization": ("SyncBatchNormalization",),
        "hvdtrain.trainer.learning_rate": ("WarmUp", "scale_learning_rate"),
        "hvdtrain.trainer.saving.checkpoint_callback": ("Checkpoint",),
        "hvdtrain.trainer.progress": ("StepLog",),
        "hvdtrain.world": (
            "init",
            "is_chief",
            "is_initialized",
            "local_rank",
            "local_size",
            "node_rank",
            "rank",
            "shutdown",
            "size",
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
