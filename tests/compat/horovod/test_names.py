"""Names and arguments compared with a real Horovod and with the documentation."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Any

import pytest

import hvdtrain.tensorflow as hvd
from hvdtrain.migrate.missing_names import advice_on
from tests.harness.jobs import REPOSITORY

# Print the public names of modules, arguments of callables, and values of integers.
DESCRIBE = """
import importlib, inspect, json, sys

def arguments(value):
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return None
    simple = (int, float, str, bool)
    return [[p.name, p.default if isinstance(p.default, simple) else None] for p in parameters]

modules = {}
for module in sys.argv[1:]:
    hvd = importlib.import_module(module)
    values = {n: getattr(hvd, n) for n in dir(hvd) if n[0] != "_"}
    values = {n: value for n, value in values.items() if not inspect.ismodule(value)}
    modules[module] = {
        "names": list(values),
        "arguments": {n: arguments(value) for n, value in values.items() if callable(value)},
        "numbers": {n: int(value) for n, value in values.items() if type(value).__name__ == "int"},
    }
print(json.dumps(modules))
"""
# Modules, and the least number of names to compare in each.
MODULES = {
    "tensorflow": 35,
    "tensorflow.keras": 20,
    "keras": 20,
    "tensorflow.keras.callbacks": 4,
    "keras.callbacks": 4,
}
# Horovod's init takes *args and **kwargs, and passes them to a function with these.
INIT = {"init": [["comm", None], ["process_sets", None]]}
# horovod.keras lacks some options of horovod.tensorflow.keras, and average has another default.
# BestModelCheckpoint of Horovod takes no file name.
DIFFERENT = {("keras", "DistributedOptimizer"), ("keras", "allreduce")} | {
    (f"{module}.callbacks", "BestModelCheckpoint") for module in ("keras", "tensorflow.keras")
}


def arguments_of(value: Any) -> list[list[Any]]:
    return [
        [p.name, p.default if isinstance(p.default, (int, float, str, bool)) else None]
        for p in inspect.signature(value).parameters.values()
    ]


@pytest.fixture
def real(environment, run_command):
    """The description of a real Horovod, which is slow to import."""
    if not _real:
        modules = sorted({f"horovod.{module}" for module in MODULES} | ON_TENSORFLOW)
        done = run_command([environment("horovod"), "-c", DESCRIBE, *modules], timeout_s=200)
        assert done.returncode == 0, done.stderr
        _real.update(json.loads(done.stdout.splitlines()[-1]))
    return _real


_real: dict[str, Any] = {}


@pytest.mark.parametrize("module", MODULES)
def test_arguments_equal_horovods(real, module):
    """Additional arguments may follow."""
    theirs = real[f"horovod.{module}"]["arguments"]
    theirs = {name: value for name, value in theirs.items() if value is not None}
    theirs |= {name: value for name, value in INIT.items() if name in theirs}
    ours = importlib.import_module(f"hvdtrain.{module}")
    names = [
        name
        for name in dir(ours)
        if inspect.isroutine(getattr(ours, name)) or inspect.isclass(getattr(ours, name))
    ]
    compared = [name for name in names if name in theirs and name != "Compression"]
    assert len(compared) >= MODULES[module]
    for name in compared:
        if (module, name) not in DIFFERENT:
            arguments = arguments_of(getattr(ours, name))
            assert arguments[: len(theirs[name])] == theirs[name], name


def test_values_of_reduction_operations(real):
    names = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]
    numbers = real["horovod.tensorflow"]["numbers"]
    assert [int(getattr(hvd, name)) for name in names] == [numbers[name] for name in names]


def _documented() -> dict[str, dict[str, str]]:
    """Return the status of each name in docs/horovod-names.md, by module of Horovod."""
    text = (REPOSITORY / "docs" / "horovod-names.md").read_text()
    modules: dict[str, dict[str, str]] = {}
    for section in text.split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        names: dict[str, str] = {}
        for line in lines:
            if line.startswith("| `"):
                _, cell_names, status, _ = (cell.strip() for cell in line.split("|", 3))
                for name in re.findall(r"`(\w+)`", cell_names):
                    assert name not in names, name
                    names[name] = status
        modules |= dict.fromkeys(re.findall(r"`([\w.]+)`", heading), names)
    return modules


DOCUMENTED = _documented()
# Horovod is built without PyTorch, which is in an environment of its own.
ON_TENSORFLOW = DOCUMENTED.keys() - {"horovod.torch"}


@pytest.mark.parametrize("module", sorted(ON_TENSORFLOW))
def test_every_public_name_of_horovod_is_documented(real, module):
    assert set(real[module]["names"]) - DOCUMENTED[module].keys() == set()


def _offered(module: str) -> list[str]:
    return [name for name, status in DOCUMENTED[module].items() if status != "not offered"]


@pytest.mark.parametrize("module", DOCUMENTED)
def test_names_exist_as_documented(module):
    """``hvdtrain migrate`` reports names that don't exist."""
    ours = importlib.import_module(module.replace("horovod", "hvdtrain", 1))
    if module not in ON_TENSORFLOW:
        assert sorted(_offered(module)) == sorted({*dir(ours)} - {"is_homogeneous"})
    for name, status in DOCUMENTED[module].items():
        assert status in ("same", "differs", "not offered", ""), name
        advice = advice_on(f"{module}.{name}")
        if status == "not offered":
            assert name not in dir(ours), name
            assert advice is not None, name
        else:
            if module in ON_TENSORFLOW:
                getattr(ours, name)
            assert advice is None, name
