"""What has Horovod's names has its arguments: held against a real Horovod."""

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

# Of each module all public names, and the arguments of those that can be called.
ASK = """
import importlib, inspect, json, sys

def arguments(thing):
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return None
    simple = (int, float, str, bool)
    return [[p.name, p.default if isinstance(p.default, simple) else None] for p in parameters]

found = {}
for module in sys.argv[1:]:
    hvd = importlib.import_module(module)
    things = {n: getattr(hvd, n) for n in dir(hvd) if n[0] != "_"}
    things = {n: thing for n, thing in things.items() if not inspect.ismodule(thing)}
    found[module] = {
        "names": list(things),
        "arguments": {n: arguments(thing) for n, thing in things.items() if callable(thing)},
        "numbers": {n: int(thing) for n, thing in things.items() if type(thing).__name__ == "int"},
    }
print(json.dumps(found))
"""
MODULES = {
    "tensorflow": 35,
    "tensorflow.keras": 20,
    "keras": 20,
    "tensorflow.keras.callbacks": 4,
    "keras.callbacks": 4,
}
# Horovod's ``init`` takes anything and passes it on.
PASSED_ON = {"init": [["comm", None], ["process_sets", None]]}
# That of horovod.keras lacks some options in the middle; that of horovod.tensorflow.keras has all.
# An average is what all of them make by default, in one of them by the older name for it.
# BestModelCheckpoint has no file name there until its user sets one.
OTHERWISE = {("keras", "DistributedOptimizer"), ("keras", "allreduce")} | {
    (f"{module}.callbacks", "BestModelCheckpoint") for module in ("keras", "tensorflow.keras")
}


def arguments_of(thing: Any) -> list[list[Any]]:
    return [
        [p.name, p.default if isinstance(p.default, (int, float, str, bool)) else None]
        for p in inspect.signature(thing).parameters.values()
    ]


@pytest.fixture
def real(environment, run_command):
    """What a real Horovod has in its modules; asked once, as it takes long to import."""
    if not _real:
        modules = sorted({f"horovod.{module}" for module in MODULES} | DOCUMENTED.keys())
        done = run_command([environment("horovod"), "-c", ASK, *modules], timeout_s=200)
        assert done.returncode == 0, done.stderr
        _real.update(json.loads(done.stdout.splitlines()[-1]))
    return _real


_real: dict[str, Any] = {}


@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_horovods(real, module):
    """In order; there may be more after them. All names are Horovod's."""
    theirs = real[f"horovod.{module}"]["arguments"]
    theirs = {name: found for name, found in theirs.items() if found is not None}
    theirs |= {name: value for name, value in PASSED_ON.items() if name in theirs}
    ours = importlib.import_module(f"hvdtrain.{module}")
    names = [
        name
        for name in dir(ours)
        if inspect.isroutine(getattr(ours, name)) or inspect.isclass(getattr(ours, name))
    ]
    compared = [name for name in names if name in theirs and name != "Compression"]
    assert len(compared) >= MODULES[module]
    for name in compared:
        if (module, name) not in OTHERWISE:
            found = arguments_of(getattr(ours, name))
            assert found[: len(theirs[name])] == theirs[name], name


def test_reductions_have_horovods_numbers(real):
    names = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]
    numbers = real["horovod.tensorflow"]["numbers"]
    assert [int(getattr(hvd, name)) for name in names] == [numbers[name] for name in names]


def _documented() -> dict[str, dict[str, str]]:
    """By Horovod's module and name, what docs/horovod-names.md says of it."""
    text = (REPOSITORY / "docs" / "horovod-names.md").read_text()
    found: dict[str, dict[str, str]] = {}
    for section in text.split("\n## ")[1:]:
        heading, *lines = section.splitlines()
        names: dict[str, str] = {}
        for line in lines:
            if line.startswith("| `"):
                _, several, fate, _ = (cell.strip() for cell in line.split("|", 3))
                for name in re.findall(r"`(\w+)`", several):
                    assert name not in names, name
                    names[name] = fate
        found |= dict.fromkeys(re.findall(r"`([\w.]+)`", heading), names)
    return found


DOCUMENTED = _documented()


@pytest.mark.parametrize("module", DOCUMENTED)
def test_every_public_name_of_horovod_is_documented(real, module):
    assert set(real[module]["names"]) - DOCUMENTED[module].keys() == set()


@pytest.mark.parametrize("module", DOCUMENTED)
def test_names_are_there_as_documented(module):
    """And ``hvdtrain migrate`` reports those that aren't."""
    ours = importlib.import_module(module.replace("horovod", "hvdtrain", 1))
    for name, fate in DOCUMENTED[module].items():
        assert fate in ("same", "differs", "not offered", ""), name
        advice = advice_on(f"{module}.{name}")
        if fate == "not offered":
            assert name not in dir(ours), name
            assert advice is not None, name
        else:
            getattr(ours, name)
            assert advice is None, name
