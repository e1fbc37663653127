"""One rank of ``against_horovod.py``: times the same calls of hvdtrain or of Horovod.

    collective_calls.py MODULE JOB

MODULE is ``hvdtrain.tensorflow`` or ``horovod.tensorflow``; JOB a JSON file with the shapes of the
large group, and how often what is called. Rank 0 writes ``times.json`` beside it.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf


def main(module: str, file: Path) -> None:
    """Measure, and write the seconds of each call."""
    job = json.loads(file.read_text())
    hvd = importlib.import_module(module)
    hvd.init()
    one = tf.ones([1])
    chain = job["chain"]

    @tf.function
    def small_in_a_row(x: tf.Tensor) -> tf.Tensor:
        for n in range(chain):
            x = hvd.allreduce(x, op=hvd.Sum, name=f"small_{n}") * 0.5
        return x

    group = [tf.ones(shape) for shape in job["shapes"]]

    @tf.function
    def together(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return hvd.grouped_allreduce(list(tensors), op=hvd.Sum, name="group")

    def eager() -> Any:
        return hvd.allreduce(one, op=hvd.Sum, name="eager")

    times = {
        "small, eager": _times(eager, job["small_calls"]),
        "small, in a tf.function": [
            seconds / chain
            for seconds in _times(lambda: small_in_a_row(one), job["small_calls"] // chain + 1)
        ],
        "group": _times(lambda: together(*group), job["group_calls"]),
    }
    if hvd.rank() == 0:
        file.with_name("times.json").write_text(json.dumps(times))


def _times(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each call, after some that do not count."""
    found = []
    for n in range(count + max(2, count // 10)):
        start = time.perf_counter()
        call()
        if n >= max(2, count // 10):
            found.append(time.perf_counter() - start)
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
