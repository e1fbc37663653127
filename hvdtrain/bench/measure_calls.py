"""What one more call of ``fit`` costs: short ones of a small model that has been traced."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import hvdtrain
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.bench.results import BenchReport, Limit
from hvdtrain.cluster.ranges import format_table
from hvdtrain.collectives import Collectives

__all__ = ["measure_calls", "show_calls"]

STEPS = 5
BATCH_SIZE = 64
CALLS = 10
# Beyond the same call of plain Keras.
MOST_OVERHEAD_S = 0.1


class _Batches(keras.utils.PyDataset):
    """Batches that are there already."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x) // BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(index * BATCH_SIZE, (index + 1) * BATCH_SIZE)
        return self._x[rows], self._y[rows]


# Each takes x and y to what ``fit`` is given.
_INPUTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": BATCH_SIZE},
    "tf.data": lambda x, y: {
        "x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE),
    },
    "PyDataset": lambda x, y: {"x": _Batches(x, y)},
}


def measure_calls(collectives: Collectives) -> list[dict[str, Any]]:
    """For each kind of input the best of some calls, in seconds: plain Keras, and all ranks."""
    return [_measure(name, collectives) for name in _INPUTS]


def _measure(name: str, collectives: Collectives) -> dict[str, Any]:
    """Ranks call plain Keras one after the other, then all together."""
    alone = float("inf")
    for rank in range(collectives.size):
        if rank == collectives.rank:
            alone = _best_call_s(build_model("small"), name, 1)
        collectives.barrier(name=f"hvdtrain bench: rank {rank} calls fit alone")
    model = hvdtrain.distribute(build_model("small"))
    together = _best_call_s(model, name, collectives.size)
    times = collectives.allgather_object([alone, together], name="hvdtrain bench: calls")
    return {
        "input": name,
        "alone_s": max(entry[0] for entry in times),
        "together_s": max(entry[1] for entry in times),
    }


def _best_call_s(model: keras.Model, name: str, ranks: int) -> float:
    """The quickest of some calls, after the first two."""
    given = _INPUTS[name](*synthetic_data(model, STEPS * BATCH_SIZE * ranks))
    times = []
    for _ in range(CALLS + 2):
        begin_s = time.perf_counter()
        model.fit(**given, shuffle=False, verbose=0)
        times.append(time.perf_counter() - begin_s)
    return min(times[2:])


def show_calls(report: BenchReport, rows: list[dict[str, Any]]) -> None:
    """Print the table, and hold what hvdtrain adds to a call against the limit."""
    cells = []
    for row in rows:
        overhead_s = row["together_s"] - row["alone_s"]
        times_s = (row["alone_s"], row["together_s"], overhead_s)
        cells.append([row["input"], *(f"{1000 * each:.0f} ms" for each in times_s)])
        report.hold_against(
            Limit(
                what=f"one more call of fit, {row['input']}: beyond plain Keras",
                measured=overhead_s,
                limit=MOST_OVERHEAD_S,
                unit="s",
                bound="at most",
            )
        )
    report.print()
    report.print(
        format_table(["one more fit", "plain Keras", "all ranks", "more"], cells, left=(0,))
    )
    report.print(
        f"the best of {CALLS} calls of {STEPS} steps of a small model that has been traced, with\n"
        "as many samples a rank in both."
    )
    report.add("calls", rows)
