"""The advice is true of the installed TensorFlow and Keras.

tests/horovod/test_names.py compares the names of Horovod with docs/horovod-names.md.
"""

from __future__ import annotations

import functools
import importlib

import pytest

from hvdtrain.migrate.missing_names import MISSING, advice_on

FRAMEWORKS = [name for name in MISSING if name.partition(".")[0] in ("keras", "tensorflow")]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_missing_names_can_not_be_used(name: str) -> None:
    package, *attributes = name.split(".")
    try:
        thing = functools.reduce(getattr, attributes, importlib.import_module(package))
    except AttributeError:
        return
    # Keras keeps the names of the legacy optimizers, and refuses to instantiate them.
    assert name == "keras.optimizers.legacy"
    with pytest.raises(ImportError):
        thing.SGD()


def test_keras_refuses_the_reported_arguments() -> None:
    import keras

    with pytest.raises(ValueError, match="lr"):
        keras.optimizers.SGD(lr=0.1)
    with pytest.warns(UserWarning, match="decay"):
        keras.optimizers.SGD(0.1, decay=0.1)
    assert isinstance(keras.optimizers.SGD(0.1).variables, list)
    with pytest.raises(TypeError, match="experimental_run_tf_function"):
        keras.Sequential([]).compile(experimental_run_tf_function=False)


FINE = [
    "tensorflow.keras.optimizers.Adam",
    "tensorflow.losses.SparseCategoricalCrossentropy",
    "tensorflow.compat.v1.train.MonitoredTrainingSession",
    "horovod.tensorflow.BroadcastGlobalVariablesHook",
    "horovod.tensorflow.compression",
    "hvdtrain.Checkpoint",
    "keras.backend.image_data_format",
    "numpy.layers",
]
_SUCCESSOR = "is not offered by hvdtrain; use broadcast_variables, or in fit the callback"
ADVICE = {
    "tensorflow.layers.conv2d": "is gone since TensorFlow 2; use keras.layers",
    "tensorflow.keras.utils.np_utils.to_categorical": (
        "is gone since Keras 3; use keras.utils.to_categorical"
    ),
    "hvdtrain.tensorflow.keras.broadcast_global_variables": _SUCCESSOR,
    "horovod.keras.broadcast_global_variables": _SUCCESSOR,
    "horovod.data": "is not offered by hvdtrain",
}


@pytest.mark.parametrize("name", FINE)
def test_other_names_have_no_advice(name: str) -> None:
    assert advice_on(name) is None


@pytest.mark.parametrize(("name", "advice"), ADVICE.items(), ids=ADVICE)
def test_names_within_missing_names_have_their_advice(name: str, advice: str) -> None:
    assert (advice_on(name) or "").startswith(advice)
