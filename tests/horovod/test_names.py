"""What has Horovod's names has its arguments: held against a real Horovod."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from typing import Any

import pytest

import hvdtrain.tensorflow as hvd
from hvdtrain.migrate import gone_names
from tests.harness.jobs import REPOSITORY

ASK = """
import importlib, inspect, json, sys
hvd = importlib.import_module(sys.argv[1])
found = {}
for name in dir(hvd):
    thing = getattr(hvd, name)
    if name.startswith("_") or not callable(thing):
        continue
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        continue
    found[name] = [
        [p.name, p.default if isinstance(p.default, (int, float, str, bool)) else None]
        for p in parameters
    ]
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


@pytest.mark.parametrize("module", MODULES)
def test_arguments_are_horovods(environment, run_command, module):
    """In order; there may be more after them. All names are Horovod's."""
    command = [environment("horovod"), "-c", ASK, f"horovod.{module}"]
    done = run_command(command, timeout_s=120)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout.splitlines()[-1])
    real.update({name: value for name, value in PASSED_ON.items() if name in real})
    ours = importlib.import_module(f"hvdtrain.{module}")
    names = [
        name
        for name in dir(ours)
        if inspect.isroutine(getattr(ours, name)) or inspect.isclass(getattr(ours, name))
    ]
    compared = [name for name in names if name in real and name != "Compression"]
    assert len(compared) >= MODULES[module]
    for name in compared:
        if (module, name) not in OTHERWISE:
            found = arguments_of(getattr(ours, name))
            assert found[: len(real[name])] == real[name], name


def test_reductions_have_horovods_numbers(environment, run_command):
    ask = "import horovod.tensorflow as hvd; print(*[getattr(hvd, n) for n in {names}])"
    names = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]
    done = run_command([environment("horovod"), "-c", ask.format(names=names)], timeout_s=120)
    numbers = done.stdout.split()[-len(names) :]
    assert [int(getattr(hvd, name)) for name in names] == [int(number) for number in numbers]


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
PUBLIC = """
import importlib, inspect, json, sys
hvd = importlib.import_module(sys.argv[1])
names = [n for n in dir(hvd) if n[0] != "_" and not inspect.ismodule(getattr(hvd, n))]
print(json.dumps(names))
"""


def test_every_module_that_is_offered_is_documented():
    assert DOCUMENTED.keys() == gone_names.OFFERED_MODULES


@pytest.mark.parametrize("module", DOCUMENTED)
def test_every_public_name_of_horovod_is_documented(environment, run_command, module):
    done = run_command([environment("horovod"), "-c", PUBLIC, module], timeout_s=120)
    assert done.returncode == 0, done.stderr
    real = set(json.loads(done.stdout.splitlines()[-1]))
    assert real - DOCUMENTED[module].keys() == set()


@pytest.mark.parametrize("module", DOCUMENTED)
def test_names_are_there_as_documented(module):
    """And ``hvdtrain migrate`` tells of those that aren't."""
    ours = importlib.import_module(module.replace("horovod", "hvdtrain", 1))
    for name, fate in DOCUMENTED[module].items():
        assert fate in ("same", "differs", "not offered", ""), name
        told = gone_names.why_gone(f"{module}.{name}")
        if fate == "not offered":
            assert name not in dir(ours), name
            assert told is not None, name
        else:
            getattr(ours, name)
            assert told is None, name
