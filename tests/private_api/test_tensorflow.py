"""A TensorFlow that lacks what hvdtrain needs of it is told of by init()."""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace

import pytest
import tensorflow as tf

from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.private_api.tensorflow import HOOKS, SEEN
from hvdtrain.tensorflow import devices
from tests.harness.jobs import REPOSITORY

# Modules below the public one.
PRIVATE = re.compile(r"^\s*(from|import) tensorflow\.(python|core)", re.MULTILINE)
NAMES = [(kind, name) for kind, names in HOOKS.items() for name in names]


@pytest.mark.parametrize(
    ("kind", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_is_missing_is_named(monkeypatch, kind: type | ModuleType, name: str) -> None:
    owners = kind.__mro__ if isinstance(kind, type) else [kind]
    for owner in [owner for owner in owners if name in vars(owner)]:
        monkeypatch.delattr(owner, name)
    with pytest.raises(LaunchError) as caught:
        devices.set_up(Settings())
    assert f"TensorFlow {tf.__version__} lacks {kind.__name__}.{name}, which" in str(caught.value)


@pytest.mark.parametrize(
    ("read", "kind", "name"),
    [
        (private_tensorflow.iterator_resource, "Iterator", "_iterator_resource"),
        (private_tensorflow.cache_file, "CacheDataset", "_filename"),
        (private_tensorflow.reshuffles, "_ShuffleDataset", "_reshuffle_each_iteration"),
        (private_tensorflow.reshuffles, "_RandomDataset", "_rerandomize"),
    ],
)
def test_what_an_object_lacks_is_named(read, kind: str, name: str) -> None:
    with pytest.raises(LaunchError, match=rf"lacks {kind}\.{name}, which"):
        read(type(kind, (), {})())


@pytest.mark.parametrize(
    ("read", "name"),
    [(private_tensorflow.operation_seeds, "_rng"), (private_tensorflow.in_use, "_context_handle")],
)
def test_what_the_runtime_lacks_is_named(monkeypatch, read, name: str) -> None:
    monkeypatch.setattr(private_tensorflow.context, "context", SimpleNamespace)
    with pytest.raises(LaunchError, match=rf"lacks SimpleNamespace\.{name}, which"):
        read()


def test_the_tensorflow_that_is_there_was_seen() -> None:
    major, minor = map(int, tf.__version__.split(".")[:2])
    oldest, newest = (tuple(map(int, version.split("."))) for version in SEEN)
    assert oldest <= (major, minor) <= newest


def test_no_other_module_imports_it() -> None:
    package = REPOSITORY / "hvdtrain"
    found = [path for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert found == [package / "private_api" / "tensorflow.py"]
