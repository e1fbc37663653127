"""The names of ``horovod.tensorflow.elastic``."""

from __future__ import annotations

from hvdtrain.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "hvdtrain.compat.horovod.elastic_state": (
            "HorovodInternalError",
            "HostsUpdatedInterrupt",
            "ObjectState",
            "run",
        ),
        "hvdtrain.compat.horovod.tensorflow_elastic": ("TensorFlowKerasState", "TensorFlowState"),
        "hvdtrain.compat.horovod.broadcast": ("broadcast_object", "broadcast_variables"),
    },
)
