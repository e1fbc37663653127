"""Errors of ``init`` that name missing private API of TensorFlow."""

from __future__ import annotations

import re
from types import ModuleType, SimpleNamespace

import pytest
import tensorflow as tf

from hvdtrain.collectives.engine import single_engine
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.tensorflow import devices
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.private_api.tensorflow import HOOKS
from tests.harness.jobs import REPOSITORY

# Imports of private modules.
PRIVATE = re.compile(r"^\s*(from|import) tensorflow\.(python|core)", re.MULTILINE)
NAMES = [(kind, name) for kind, names in HOOKS.items() for name in names]


@pytest.mark.parametrize(
    ("kind", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_missing_attribute_of_a_class_or_module_is_named(
    monkeypatch, kind: type | ModuleType, name: str
) -> None:
    owners = kind.__mro__ if isinstance(kind, type) else [kind]
    for owner in [owner for owner in owners if name in vars(owner)]:
        monkeypatch.delattr(owner, name)
    with pytest.raises(LaunchError) as caught:
        devices.set_up(Settings(), single_engine())
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
def test_a_missing_attribute_of_an_object_is_named(read, kind: str, name: str) -> None:
    with pytest.raises(LaunchError, match=rf"lacks {kind}\.{name}, which"):
        read(type(kind, (), {})())


@pytest.mark.parametrize(
    ("read", "name"),
    [(private_tensorflow.operation_seeds, "_rng"), (private_tensorflow.in_use, "_context_handle")],
)
def test_a_missing_attribute_of_the_runtime_is_named(monkeypatch, read, name: str) -> None:
    monkeypatch.setattr(private_tensorflow.context, "context", SimpleNamespace)
    with pytest.raises(LaunchError, match=rf"lacks SimpleNamespace\.{name}, which"):
        read()


def test_the_installed_tensorflow_is_a_tested_version() -> None:
    major, minor = map(int, tf.__version__.split(".")[:2])
    oldest, newest = (
        tuple(map(int, version.split("."))) for version in private_tensorflow._API.tested
    )
    assert oldest <= (major, minor) <= newest


def test_no_other_module_imports_private_modules() -> None:
    package = REPOSITORY / "hvdtrain"
    importers = [path for path in package.rglob("*.py") if PRIVATE.search(path.read_text())]
    assert importers == [package / "private_api" / "tensorflow.py"]
