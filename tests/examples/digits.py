"""The example's digit reader, and a small dataset for tests that start the example."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

from tests.harness.jobs import REPOSITORY

__all__ = ["FEW", "MNIST", "load_mnist_data", "write_few"]

MNIST = REPOSITORY / "examples" / "mnist.py"
# Training digits: five joint batches of two ranks.
FEW = 640


def load_mnist_data() -> ModuleType:
    """Import ``examples/mnist_data.py``, which does not belong to a package."""
    path = MNIST.with_name("mnist_data.py")
    spec = importlib.util.spec_from_file_location("mnist_data", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mnist_data"] = module
    spec.loader.exec_module(module)
    return module


def write_few(folder: Path) -> Path:
    """Write a small dataset for ``--data-dir``. An epoch of all digits would take ten seconds."""
    digits = load_mnist_data().load_digits()
    chosen = np.random.default_rng(0).permutation(len(digits.train_labels))[:FEW]
    path = folder / "few.npz"
    np.savez(
        path,
        x_train=digits.train_images[chosen],
        y_train=digits.train_labels[chosen],
        x_test=digits.test_images[::5],
        y_test=digits.test_labels[::5],
    )
    return path
