"""Names that scripts for Horovod use and that are gone, with what takes their place.

Gone are they from TensorFlow 2.16 and later with Keras 3, or hvdtrain doesn't offer them. The
tests look all of them up in the installed TensorFlow and Keras, and those that take their place.
"""

from __future__ import annotations

__all__ = [
    "GRAPHS",
    "HOROVOD",
    "KERAS",
    "KERAS_ALONE",
    "OFFERED_MODULES",
    "SWITCHES",
    "TENSORFLOW",
    "why_gone",
]

_NO_SESSION = "TensorFlow 2 needs no session: call your functions, under tf.function to be fast"
_NO_GRAPH = "TensorFlow 2 needs no graph of your own: tf.function makes one of a function"
_NO_INITIALIZER = "variables have their values as soon as they are made"
_NO_COLLECTION = "take variables from your model: model.variables, model.trainable_variables"
_NO_HOOK = "use a keras.callbacks.Callback, or plain code in your training loop"
_NO_STEP = "count steps in a tf.Variable, or take the optimizer's iterations"
_NO_CONFIG = "drop it: hvdtrain.init() binds the GPU and takes its memory as it is needed"
_NO_ESTIMATOR = "write a Keras model and train it with fit"

# Of TensorFlow 1's graphs and sessions. They are still in tf.compat.v1, and hvdtrain trains there,
# except for what its layers were. All names stand after `tensorflow.`.
GRAPHS: dict[str, str] = {
    "ConfigProto": _NO_CONFIG,
    "GPUOptions": _NO_CONFIG,
    "GraphKeys": _NO_COLLECTION,
    "InteractiveSession": _NO_SESSION,
    "Session": _NO_SESSION,
    "add_to_collection": _NO_COLLECTION,
    "assign": "use the method assign of tf.Variable",
    "assign_add": "use the method assign_add of tf.Variable",
    "get_collection": _NO_COLLECTION,
    "get_default_graph": _NO_GRAPH,
    "get_default_session": _NO_SESSION,
    "get_variable": "use tf.Variable, or the method add_weight of a keras.layers.Layer",
    "global_variables": _NO_COLLECTION,
    "global_variables_initializer": _NO_INITIALIZER,
    "initialize_all_variables": _NO_INITIALIZER,
    "layers": "use the layers in keras.layers",
    "layers.average_pooling2d": "use keras.layers.AveragePooling2D",
    "layers.batch_normalization": "use keras.layers.BatchNormalization",
    "layers.conv1d": "use keras.layers.Conv1D",
    "layers.conv2d": "use keras.layers.Conv2D",
    "layers.conv2d_transpose": "use keras.layers.Conv2DTranspose",
    "layers.conv3d": "use keras.layers.Conv3D",
    "layers.dense": "use keras.layers.Dense",
    "layers.dropout": "use keras.layers.Dropout",
    "layers.flatten": "use keras.layers.Flatten",
    "layers.max_pooling2d": "use keras.layers.MaxPooling2D",
    "layers.separable_conv2d": "use keras.layers.SeparableConv2D",
    "local_variables_initializer": _NO_INITIALIZER,
    "losses.absolute_difference": "use keras.losses.MeanAbsoluteError",
    "losses.add_loss": "use the method add_loss of a keras.layers.Layer",
    "losses.compute_weighted_loss": "give sample_weight to a loss of keras.losses",
    "losses.get_losses": "take the attribute losses of your model",
    "losses.get_regularization_loss": "take the attribute losses of your model",
    "losses.get_regularization_losses": "take the attribute losses of your model",
    "losses.get_total_loss": "take the attribute losses of your model, and add your own",
    "losses.hinge_loss": "use keras.losses.Hinge, which takes labels of -1, 0 and 1",
    "losses.huber_loss": "use keras.losses.Huber",
    "losses.log_loss": "use keras.losses.BinaryCrossentropy",
    "losses.sigmoid_cross_entropy": "use keras.losses.BinaryCrossentropy(from_logits=True)",
    "losses.softmax_cross_entropy": "use keras.losses.CategoricalCrossentropy(from_logits=True)",
    "losses.sparse_softmax_cross_entropy": (
        "use keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
    ),
    "placeholder": "use arguments of a function, or keras.Input for a model",
    "placeholder_with_default": "use arguments of a function",
    "reset_default_graph": _NO_GRAPH,
    "summary.FileWriter": "use tf.summary.create_file_writer",
    "summary.merge_all": "use tf.summary.scalar within tf.summary.create_file_writer",
    "tables_initializer": _NO_INITIALIZER,
    "train.AdadeltaOptimizer": "use keras.optimizers.Adadelta",
    "train.AdagradOptimizer": "use keras.optimizers.Adagrad",
    "train.AdamOptimizer": "use keras.optimizers.Adam",
    "train.CheckpointSaverHook": "use hvdtrain.Checkpoint, or keras.callbacks.ModelCheckpoint",
    "train.ChiefSessionCreator": _NO_SESSION,
    "train.FtrlOptimizer": "use keras.optimizers.Ftrl",
    "train.GradientDescentOptimizer": "use keras.optimizers.SGD",
    "train.LoggingTensorHook": _NO_HOOK,
    "train.MomentumOptimizer": "use keras.optimizers.SGD, with momentum",
    "train.MonitoredSession": _NO_SESSION,
    "train.MonitoredTrainingSession": _NO_SESSION,
    "train.NanTensorHook": "use keras.callbacks.TerminateOnNaN",
    "train.Optimizer": "use keras.optimizers.Optimizer",
    "train.RMSPropOptimizer": "use keras.optimizers.RMSprop",
    "train.Saver": "use tf.train.Checkpoint, or hvdtrain.Checkpoint",
    "train.Scaffold": _NO_SESSION,
    "train.SessionRunHook": _NO_HOOK,
    "train.StopAtStepHook": "give fit epochs and steps_per_epoch, or end your loop",
    "train.SummarySaverHook": "use keras.callbacks.TensorBoard",
    "train.SyncReplicasOptimizer": "drop it: ranks always average their gradients",
    "train.create_global_step": _NO_STEP,
    "train.get_global_step": _NO_STEP,
    "train.get_or_create_global_step": _NO_STEP,
    "train.replica_device_setter": "drop it: hvdtrain run --mode async-ps places the variables",
    "train.start_queue_runners": "read your data with tf.data",
    "trainable_variables": _NO_COLLECTION,
    "variable_scope": "layers keep their variables: use keras.layers",
}

# The others that left TensorFlow with version 2. All names stand after `tensorflow.`.
TENSORFLOW: dict[str, str] = {
    "FixedLenFeature": "use tf.io.FixedLenFeature",
    "TFRecordReader": "use tf.data.TFRecordDataset",
    "VarLenFeature": "use tf.io.VarLenFeature",
    "app": "use tf.compat.v1.app, or call main() yourself",
    "compat.v1.estimator": _NO_ESTIMATOR,
    "contrib": "what is in use of it has moved: look for the name in TensorFlow 2's reference",
    "contrib.data": "use tf.data",
    "contrib.layers": "use the layers in keras.layers",
    "contrib.learn": _NO_ESTIMATOR,
    "data.make_one_shot_iterator": "loop over the dataset: for batch in dataset",
    "decode_raw": "use tf.io.decode_raw",
    "enable_eager_execution": "drop it: TensorFlow 2 always computes eagerly",
    "estimator": _NO_ESTIMATOR,
    "flags": "use tf.compat.v1.flags, or argparse",
    "gfile": "use tf.io.gfile",
    "global_norm": "use tf.linalg.global_norm",
    "image.resize_images": "use tf.image.resize",
    "log": "use tf.math.log",
    "logging": "use tf.compat.v1.logging, or tf.get_logger",
    "nn.softmax_cross_entropy_with_logits_v2": "use tf.nn.softmax_cross_entropy_with_logits",
    "parse_single_example": "use tf.io.parse_single_example",
    "py_func": "use tf.numpy_function",
    "python_io": "use tf.io.TFRecordWriter, or tf.data.TFRecordDataset",
    "random_normal": "use tf.random.normal",
    "random_uniform": "use tf.random.uniform",
    "read_file": "use tf.io.read_file",
    "set_random_seed": "use tf.random.set_seed",
    "to_float": "use tf.cast",
    "to_int32": "use tf.cast",
    "to_int64": "use tf.cast",
    "train.cosine_decay": "use keras.optimizers.schedules.CosineDecay",
    "train.exponential_decay": "use keras.optimizers.schedules.ExponentialDecay",
    "train.inverse_time_decay": "use keras.optimizers.schedules.InverseTimeDecay",
    "train.piecewise_constant": "use keras.optimizers.schedules.PiecewiseConstantDecay",
    "train.polynomial_decay": "use keras.optimizers.schedules.PolynomialDecay",
    "truncated_normal": "use tf.random.truncated_normal",
}

# These switch off what hvdtrain and Keras 3 rely on. Names stand after `tensorflow.`.
SWITCHES = {
    "disable_eager_execution": "drop it: Keras 3 needs eager execution",
    "disable_v2_behavior": "drop it: Keras 3 needs the behaviour of TensorFlow 2",
}

# Gone from Keras, whether it is imported as keras or as tf.keras. Names stand after `keras.`.
KERAS: dict[str, str] = {
    "backend.function": "call the model, or make a keras.Model of its layers",
    "backend.get_session": _NO_SESSION,
    "backend.learning_phase": "pass training=True or training=False to the model",
    "backend.placeholder": "use keras.Input",
    "backend.set_learning_phase": "pass training=True or training=False to the model",
    "backend.set_session": _NO_CONFIG,
    "engine": "take its classes from keras and keras.layers",
    "estimator": _NO_ESTIMATOR,
    "experimental": "what is in use of it has moved: look for the name in Keras 3's reference",
    "layers.CuDNNGRU": "use keras.layers.GRU, which takes cuDNN where it can",
    "layers.CuDNNLSTM": "use keras.layers.LSTM, which takes cuDNN where it can",
    "layers.DenseFeatures": "use keras.utils.FeatureSpace",
    "layers.LocallyConnected1D": "Keras 3 has nothing in its place",
    "layers.LocallyConnected2D": "Keras 3 has nothing in its place",
    "layers.advanced_activations": "take its layers from keras.layers",
    "layers.convolutional": "take its layers from keras.layers",
    "layers.core": "take its layers from keras.layers",
    "layers.embeddings": "take its layers from keras.layers",
    "layers.experimental": "take its layers from keras.layers",
    "layers.merge": "take its layers from keras.layers",
    "layers.normalization": "take its layers from keras.layers",
    "layers.pooling": "take its layers from keras.layers",
    "layers.recurrent": "take its layers from keras.layers",
    "mixed_precision.experimental": "use keras.mixed_precision.set_global_policy",
    "models.model_from_yaml": "use keras.models.model_from_json",
    "objectives": "use keras.losses",
    "optimizers.experimental": "take its optimizers from keras.optimizers",
    "utils.HDF5Matrix": "read the file with h5py, in a keras.utils.PyDataset",
    "utils.generic_utils": "take its functions from keras.utils",
    "utils.multi_gpu_model": "drop it: start one rank for each GPU",
    "utils.np_utils": "use keras.utils.to_categorical",
    "utils.vis_utils": "use keras.utils.plot_model",
    "wrappers.scikit_learn": (
        "use keras.wrappers.SKLearnClassifier or keras.wrappers.SKLearnRegressor"
    ),
}

# Still there by name, but making one raises ImportError.
_LEGACY_OPTIMIZERS = "optimizers.legacy"

# Functions of keras.backend that only tf.keras.backend still has.
_BACKEND = """
abs all any arange argmax argmin batch_dot batch_flatten batch_get_value batch_normalization
batch_set_value bias_add binary_crossentropy cast cast_to_floatx categorical_crossentropy clip
concatenate constant conv1d conv2d conv2d_transpose conv3d cos count_params ctc_batch_cost
ctc_decode cumprod cumsum depthwise_conv2d dot dropout dtype elu equal eval exp expand_dims eye
flatten foldl foldr gather get_value gradients greater greater_equal hard_sigmoid in_top_k
int_shape is_sparse l2_normalize less less_equal log map_fn max maximum mean min minimum
moving_average_update name_scope ndim not_equal one_hot ones ones_like permute_dimensions pool2d
pool3d pow prod random_bernoulli random_normal random_uniform relu repeat repeat_elements reshape
resize_images resize_volumes reverse rnn round separable_conv2d set_value shape sigmoid sign sin
softmax softplus softsign sparse_categorical_crossentropy spatial_2d_padding spatial_3d_padding
sqrt square squeeze stack std stop_gradient sum switch tanh temporal_padding tile to_dense
transpose truncated_normal update update_add update_sub var variable zeros zeros_like
"""

# Gone from keras alone: tf.keras still has them. Names stand after `keras.`.
KERAS_ALONE: dict[str, str] = {
    name: f"tf.keras.{name} still does it"
    for name in (
        *(f"backend.{name}" for name in _BACKEND.split()),
        "layers.ThresholdedReLU",
        "preprocessing.image.DirectoryIterator",
        "preprocessing.image.ImageDataGenerator",
        "preprocessing.sequence.TimeseriesGenerator",
        "preprocessing.text",
    )
}

# What hvdtrain offers in the place of Horovod's modules, with `hvdtrain` for `horovod`.
OFFERED_MODULES = frozenset(
    {
        "horovod.keras",
        "horovod.keras.callbacks",
        "horovod.keras.elastic",
        "horovod.tensorflow",
        "horovod.tensorflow.elastic",
        "horovod.tensorflow.keras",
        "horovod.tensorflow.keras.callbacks",
        "horovod.tensorflow.keras.elastic",
    }
)

_NO_FRAMEWORK = "hvdtrain trains Keras models on TensorFlow alone"
_NO_STARTER = "start the script with hvdtrain run, mpirun or srun"
_BROADCAST = "use broadcast_variables, or in fit the callback BroadcastGlobalVariablesCallback"
_IN_TENSORFLOW = "take its names from hvdtrain.tensorflow"
_OF_ELASTIC = "broadcast_object_fn init rank shutdown"
_OWN = "it is a part of Horovod's own making"

# Helpers that Horovod's modules happen to show.
_HELPERS = {
    "tensorflow": """
        LocalGradientAggregationHelper check_extension check_num_rank_power_of_2 gpu_available
        handle_average_backwards_compatibility refs_to_vars split_list vars_to_refs
    """,
    "tensorflow.elastic": "run_fn",
    **dict.fromkeys(
        ("keras", "keras.callbacks", "tensorflow.keras", "tensorflow.keras.callbacks"),
        "is_version_greater_equal_than",
    ),
}

# Of Horovod, and not offered. Names stand after `horovod.`; others of its modules aren't, either.
HOROVOD: dict[str, str] = {
    "keras.broadcast_global_variables": _BROADCAST,
    "mxnet": _NO_FRAMEWORK,
    "ray": _NO_STARTER,
    "run": _NO_STARTER,
    "runner": _NO_STARTER,
    "spark": _NO_STARTER,
    "tensorflow.compression": _IN_TENSORFLOW,
    "tensorflow.functions": _IN_TENSORFLOW,
    "tensorflow.keras.broadcast_global_variables": _BROADCAST,
    "tensorflow.mpi_ops": _IN_TENSORFLOW,
    "tensorflow.sync_batch_norm": _IN_TENSORFLOW,
    "torch": _NO_FRAMEWORK,
    **{f"tensorflow.elastic.{name}": _IN_TENSORFLOW for name in _OF_ELASTIC.split()},
    **{f"{module}.{name}": _OWN for module, names in _HELPERS.items() for name in names.split()},
}


def why_gone(name: str) -> str | None:
    """Tell why a dotted name such as ``tensorflow.train.AdamOptimizer`` is gone, and what to use.

    Args:
        name: The full name, which begins with the package that it is imported from.

    Returns:
        What follows the name in a sentence; None if nothing is known to be wrong with the name.
    """
    package, _, rest = name.partition(".")
    if package in ("horovod", "hvdtrain"):
        return _of_horovod(rest)
    if package == "keras":
        return _of_keras(rest, alone=True)
    if package != "tensorflow":
        return None
    if rest.partition(".")[0] == "keras":
        return _of_keras(rest.partition(".")[2], alone=False)
    return _of_tensorflow(rest)


def _of_horovod(name: str) -> str | None:
    advice = _longest(HOROVOD, name)
    return None if advice is None else f"is not offered by hvdtrain; {advice}"


def _of_tensorflow(name: str) -> str | None:
    old = name.removeprefix("compat.v1.")
    classic, is_layer = old != name, old.partition(".")[0] == "layers"
    advice = _longest(SWITCHES, old)
    if classic and advice is not None:
        return f"is for scripts without Keras; where there is Keras, {advice}"
    advice = advice or _longest(GRAPHS, old)
    if classic and is_layer:
        return f"is gone since Keras 3; {advice}"
    if classic or advice is None:
        advice = _longest(TENSORFLOW, name)
    elif not is_layer and old not in SWITCHES:
        advice += "; or take it from tf.compat.v1"
    if advice is not None:
        return f"is gone since TensorFlow 2; {advice}"
    # Another name of tf.keras.optimizers.
    return _of_keras(name, alone=False) if name.startswith("optimizers.") else None


def _of_keras(name: str, *, alone: bool) -> str | None:
    if name.startswith(f"{_LEGACY_OPTIMIZERS}."):
        new = f"keras.optimizers.{name.removeprefix(_LEGACY_OPTIMIZERS + '.')}"
        return f"can't be made since Keras 3; use {new}"
    advice = _longest(KERAS, name)
    if advice is None and alone:
        advice = _longest(KERAS_ALONE, name)
    return None if advice is None else f"is gone since Keras 3; {advice}"


def _longest(table: dict[str, str], name: str) -> str | None:
    """The entry of the name, or of the longest beginning of it that has one."""
    while name:
        if name in table:
            return table[name]
        name = name.rpartition(".")[0]
    return None
