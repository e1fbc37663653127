"""What scripts are told is so in the TensorFlow and the Keras that are installed."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from hvdtrain.migrate import gone_names
from hvdtrain.migrate.gone_names import why_gone

TABLES = {
    "GRAPHS": gone_names.GRAPHS,
    "HOROVOD": gone_names.HOROVOD,
    "KERAS": gone_names.KERAS,
    "KERAS_ALONE": gone_names.KERAS_ALONE,
    "SWITCHES": gone_names.SWITCHES,
    "TENSORFLOW": gone_names.TENSORFLOW,
}


@pytest.fixture(scope="module")
def tf() -> Any:
    """TensorFlow, which only these tests of the folder import."""
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras as it is without TensorFlow's names for it."""
    import keras

    return keras


def is_there(package: Any, name: str) -> bool:
    """Whether ``package`` has a dotted name."""
    for part in name.split("."):
        try:
            package = getattr(package, part)
        except AttributeError:
            return False
    return True


def test_what_left_tensorflow_is_gone(tf) -> None:
    names = [*gone_names.GRAPHS, *gone_names.TENSORFLOW, *gone_names.SWITCHES]
    assert [name for name in names if is_there(tf, name)] == []


def test_graphs_are_there_without_their_layers(tf) -> None:
    names = [*gone_names.GRAPHS, *gone_names.SWITCHES]
    gone_there = {name for name in names if not is_there(tf.compat.v1, name)}
    assert gone_there == {name for name in names if name.startswith("layers.")}


def test_what_left_keras_is_gone(tf, keras) -> None:
    assert [name for name in gone_names.KERAS if is_there(keras, name)] == []
    assert [name for name in gone_names.KERAS if is_there(tf.keras, name)] == []


def test_what_left_keras_alone_is_in_tensorflow(tf, keras) -> None:
    assert [name for name in gone_names.KERAS_ALONE if is_there(keras, name)] == []
    assert [name for name in gone_names.KERAS_ALONE if not is_there(tf.keras, name)] == []


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_what_takes_their_place_is_there(table: dict[str, str], tf, keras) -> None:
    import hvdtrain.tensorflow

    packages = {"tf": tf, "keras": keras, "hvdtrain": hvdtrain}
    for name, advice in table.items():
        for package, rest in re.findall(r"\b(tf|keras|hvdtrain)\.(\w+(?:\.\w+)*)", advice):
            assert is_there(packages[package], rest), f"{name}: {advice}"


def test_legacy_optimizers_have_successors(tf, keras) -> None:
    names = [name for name in dir(tf.keras.optimizers.legacy) if name[0].isupper()]
    assert names
    for name in names:
        with pytest.raises(ImportError):
            getattr(tf.keras.optimizers.legacy, name)()
        advice = why_gone(f"tensorflow.keras.optimizers.legacy.{name}")
        assert advice == f"can't be made since Keras 3; use keras.optimizers.{name}"
        assert is_there(keras.optimizers, name)


def test_keras_refuses_what_is_told_of_its_arguments(keras) -> None:
    with pytest.raises(ValueError, match="lr"):
        keras.optimizers.SGD(lr=0.1)
    with pytest.warns(UserWarning, match="decay"):
        keras.optimizers.SGD(0.1, decay=0.1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        model.compile(experimental_run_tf_function=False)
    for name in ("fit", "evaluate", "predict"):
        assert not hasattr(model, f"{name}_generator")
        arguments = inspect.signature(getattr(model, name)).parameters
        assert not {"max_queue_size", "use_multiprocessing", "workers"} & set(arguments)


def test_keras_writes_weights_and_models_to_no_other_files(keras, tmp_path) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for name in ("weights", "weights.h5", "weights.keras"):
        with pytest.raises(ValueError, match=r"weights\.h5"):
            model.save_weights(str(tmp_path / name))
        with pytest.raises(ValueError, match=r"weights\.h5"):
            keras.callbacks.ModelCheckpoint(name, save_weights_only=True)
    with pytest.raises(ValueError, match=r"\.keras"):
        keras.callbacks.ModelCheckpoint("model.hdf5")
    keras.callbacks.ModelCheckpoint("model.h5")


def test_optimizers_have_not_what_is_told_of_them(keras) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    assert not hasattr(optimizer, "lr")
    assert not hasattr(optimizer, "weights")
    assert isinstance(optimizer.variables, list)


FINE = [
    "tensorflow.keras.backend.get_value",
    "tensorflow.keras.optimizers.Adam",
    "tensorflow.optimizers.Adam",
    "tensorflow.losses.SparseCategoricalCrossentropy",
    "tensorflow.train.Checkpoint",
    "tensorflow.compat.v1.logging.set_verbosity",
    "tensorflow.compat.v1.losses.huber_loss",
    "tensorflow.compat.v1.train.MonitoredTrainingSession",
    "horovod.tensorflow.BroadcastGlobalVariablesHook",
    "keras.backend.image_data_format",
    "keras.preprocessing.image.load_img",
    "horovod.tensorflow.broadcast_variables",
    "numpy.layers",
]


@pytest.mark.parametrize("name", FINE)
def test_of_what_is_there_nothing_is_told(name: str) -> None:
    assert why_gone(name) is None


TOLD = {
    "tensorflow.layers.conv2d": "is gone since TensorFlow 2; use keras.layers.Conv2D",
    "tensorflow.layers.Layer": "is gone since TensorFlow 2; use the layers in keras.layers",
    "tensorflow.compat.v1.layers.conv2d": "is gone since Keras 3; use keras.layers.Conv2D",
    "tensorflow.train.SessionRunHook": (
        "is gone since TensorFlow 2; use a keras.callbacks.Callback, or plain code in your "
        "training loop; or take it from tf.compat.v1"
    ),
    "tensorflow.contrib.layers.fully_connected": (
        "is gone since TensorFlow 2; use the layers in keras.layers"
    ),
    "tensorflow.keras.utils.np_utils.to_categorical": (
        "is gone since Keras 3; use keras.utils.to_categorical"
    ),
    "tensorflow.optimizers.legacy.SGD": ("can't be made since Keras 3; use keras.optimizers.SGD"),
    "keras.backend.mean": "is gone since Keras 3; tf.keras.backend.mean still does it",
    "tensorflow.compat.v1.disable_eager_execution": (
        "is for scripts without Keras; where there is Keras, drop it: Keras 3 needs eager execution"
    ),
    "hvdtrain.tensorflow.keras.broadcast_global_variables": (
        "is not offered by hvdtrain; use broadcast_variables, or in fit the callback "
        "BroadcastGlobalVariablesCallback"
    ),
}


@pytest.mark.parametrize(("name", "told"), TOLD.items(), ids=TOLD)
def test_the_longest_name_counts(name: str, told: str) -> None:
    assert why_gone(name) == told
