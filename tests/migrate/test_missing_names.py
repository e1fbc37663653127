from __future__ import annotations

import functools
import importlib

import pytest

from hvdtrain.migrate.missing_names import MISSING, advice_on

FRAMEWORKS = [name for name in MISSING if name.partition(".")[0] in ("keras", "tensorflow")]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_missing_names_of_tensorflow_and_keras(name: str) -> None:
    package, *attributes = name.split(".")
    try:
        value = functools.reduce(getattr, attributes, importlib.import_module(package))
    except AttributeError:
        return
    # Keras keeps the names of the legacy optimizers, which raise when instantiated.
    assert name == "keras.optimizers.legacy"
    with pytest.raises(ImportError):
        value.SGD()


def test_keras_rejects_the_reported_arguments() -> None:
    import keras

    with pytest.raises(ValueError, match="lr"):
        keras.optimizers.SGD(lr=0.1)
    with pytest.warns(UserWarning, match="decay"):
        keras.optimizers.SGD(0.1, decay=0.1)
    assert isinstance(keras.optimizers.SGD(0.1).variables, list)
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        keras.Sequential([]).compile(experimental_run_tf_function=False)


OFFERED = [
    "tensorflow.keras.optimizers.Adam",
    "tensorflow.losses.SparseCategoricalCrossentropy",
    "tensorflow.compat.v1.train.MonitoredTrainingSession",
    "horovod.tensorflow.BroadcastGlobalVariablesHook",
    "horovod.tensorflow.compression",
    "hvdtrain.Checkpoint",
    "keras.backend.image_data_format",
    "numpy.layers",
]
_BROADCAST = "is not offered by hvdtrain; use broadcast_variables, or"
ADVICE = {
    "tensorflow.layers.conv2d": "was removed in TensorFlow 2; use keras.layers",
    "tensorflow.keras.utils.np_utils.to_categorical": (
        "was removed in Keras 3; use keras.utils.to_categorical"
    ),
    "hvdtrain.tensorflow.keras.broadcast_global_variables": _BROADCAST,
    "horovod.keras.broadcast_global_variables": _BROADCAST,
    "horovod.data": "is not offered by hvdtrain",
}


@pytest.mark.parametrize("name", OFFERED)
def test_other_names_have_no_advice(name: str) -> None:
    assert advice_on(name) is None


@pytest.mark.parametrize(("name", "advice"), ADVICE.items(), ids=ADVICE)
def test_advice_on_names_within_missing_names(name: str, advice: str) -> None:
    assert (advice_on(name) or "").startswith(advice)
