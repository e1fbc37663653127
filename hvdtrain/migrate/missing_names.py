"""Names in Horovod scripts that are missing in hvdtrain, TensorFlow 2 or Keras 3, with advice.

The tests compare Horovod's names with docs/horovod-names.md. They compare TensorFlow's and Keras'
names with the installed packages.
"""

from __future__ import annotations

__all__ = ["MISSING", "advice_on"]

# Modules of Horovod that hvdtrain offers. The table lists names that exist in Horovod's modules,
# but not in hvdtrain's.
_OFFERED = ("__version__", "keras", "tensorflow", "torch")
_PROBLEMS = {
    "horovod": "is not offered by hvdtrain",
    "keras": "was removed in Keras 3",
    "tensorflow": "was removed in TensorFlow 2",
}
_SESSION = "remove it: hvdtrain.init() binds the GPU, and TensorFlow 2 needs no session"

# Each row: a package, names in it, and advice on these names and on all names inside them. `keras`
# also stands for `tensorflow.keras`.
_TABLE = (
    ("horovod", "mxnet", "hvdtrain supports TensorFlow, Keras and PyTorch"),
    ("horovod", "ray run runner spark", "start the script with hvdtrain run, mpirun or srun"),
    (
        "horovod.tensorflow",
        "data functions gradient_aggregation gradient_aggregation_eager mpi_ops sync_batch_norm "
        "util elastic.broadcast_object_fn elastic.init elastic.rank elastic.shutdown",
        "import its names from hvdtrain.tensorflow",
    ),
    (
        "horovod.tensorflow",
        "LocalGradientAggregationHelper check_extension check_num_rank_power_of_2 elastic.run_fn "
        "gpu_available handle_average_backwards_compatibility refs_to_vars split_list vars_to_refs",
        "it is internal to Horovod",
    ),
    (
        "horovod.torch",
        "compression functions mpi_ops optimizer sync_batch_norm elastic.sampler elastic.state",
        "import its names from hvdtrain.torch",
    ),
    ("horovod.torch", "check_extension elastic.run_fn", "it is internal to Horovod"),
    (
        "horovod.keras",
        "broadcast_global_variables",
        "use broadcast_variables, or BroadcastGlobalVariablesCallback in fit",
    ),
    (
        "horovod.keras",
        "is_version_greater_equal_than callbacks.is_version_greater_equal_than",
        "it is internal to Horovod",
    ),
    ("tensorflow", "ConfigProto GPUOptions", _SESSION),
    (
        "tensorflow",
        "Session app flags get_variable gfile global_variables global_variables_initializer "
        "logging placeholder trainable_variables train.AdagradOptimizer "
        "train.AdamOptimizer train.GradientDescentOptimizer train.MomentumOptimizer "
        "train.MonitoredTrainingSession train.RMSPropOptimizer train.Saver train.StopAtStepHook "
        "train.get_or_create_global_step",
        "use tf.compat.v1 (tf_upgrade_v2 changes it), or Keras",
    ),
    ("tensorflow", "layers", "use keras.layers"),
    ("tensorflow", "contrib estimator", "write a Keras model"),
    ("keras", "backend.get_session backend.set_session", _SESSION),
    ("keras", "optimizers.legacy", "use keras.optimizers"),
    ("keras", "utils.np_utils", "use keras.utils.to_categorical"),
)
MISSING = {
    f"{package}.{name}": advice for package, names, advice in _TABLE for name in names.split()
}


def advice_on(name: str) -> str | None:
    """Return why a dotted name is missing and its replacement; None if it isn't missing.

    The text is the end of a sentence that starts with the name, such as "was removed in
    TensorFlow 2; use keras.layers".
    """
    parts = name.split(".")
    if parts[0] == "hvdtrain":
        parts[0] = "horovod"
    if "tensorflow" in parts[:2] and "keras" in parts[1:3]:
        parts.remove("tensorflow")
    for end in range(len(parts), 1, -1):
        advice = MISSING.get(".".join(parts[:end]))
        if advice is not None:
            return f"{_PROBLEMS[parts[0]]}; {advice}"
    is_missing = name.startswith("horovod.") and parts[1] not in _OFFERED
    return _PROBLEMS["horovod"] if is_missing else None
