"""What has Horovod's names has its arguments: held against a real Horovod."""

from __future__ import annotations

import inspect
import json

import pytest

import hvdtrain.tensorflow as hvd

ASK = """
import inspect, json
import horovod.tensorflow as hvd
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
# Horovod's ``init`` takes anything and passes it on.
PASSED_ON = {"init": [["comm", None], ["process_sets", None]]}


@pytest.fixture
def real(environment, run_command):
    """The functions of the real module, with their arguments and plain defaults."""
    done = run_command([environment("horovod"), "-c", ASK], timeout_s=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | PASSED_ON


def test_arguments_are_horovods(real):
    """In order; there may be more after them."""
    functions = [name for name in hvd.__all__ if inspect.isfunction(getattr(hvd, name))]
    assert len(functions) > 30
    for name in functions:
        assert name in real, f"{name} is no name of Horovod's"
        ours = [
            [p.name, p.default if isinstance(p.default, (int, float, str, bool)) else None]
            for p in inspect.signature(getattr(hvd, name)).parameters.values()
        ]
        assert ours[: len(real[name])] == real[name], name


def test_reductions_have_horovods_numbers(environment, run_command):
    ask = "import horovod.tensorflow as hvd; print(*[getattr(hvd, n) for n in {names}])"
    names = ["Average", "Sum", "Min", "Max", "Product"]
    done = run_command([environment("horovod"), "-c", ask.format(names=names)], timeout_s=120)
    numbers = done.stdout.split()[-len(names) :]
    assert [int(getattr(hvd, name)) for name in names] == [int(number) for number in numbers]
