"""``hvdtrain bench training``: compares the training of single ranks with that of all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.machine import release_free_memory, resident_bytes
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.bench.options import TrainingOptions
from hvdtrain.bench.results import BenchReport
from hvdtrain.bench.timing import largest
from hvdtrain.collectives.engine import Engine

__all__ = ["measure"]

MIN_LENET_EFFICIENCY = 93.0
# In percent, measured on two ranks.
MIN_MLP_EFFICIENCY = 80.0
# Time from the last callback to the return of ``fit``.
MAX_END_MS = 50.0
# Not zero, because allocators and threads vary a little.
MAX_GROWTH_BYTES = 1 << 20
# Short calls of ``fit`` with a small model that is already traced.
CALL_STEPS = 5
CALL_BATCH_SIZE = 64
CALLS = 10
# Additional time compared with plain Keras.
MAX_OVERHEAD_S = 0.1


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run of this rank alone or of all ranks together."""

    samples_per_s: float  # samples per second of all participating ranks, after the warm-up
    # samples per second measured around the whole call of ``fit``, including the warm-up
    call_samples_per_s: float
    end_s: float  # seconds from the last callback to the return of ``fit``
    cpu_step_s: float  # processor time of this rank per step


class _StepClock(keras.callbacks.Callback):
    """Records the end times of the steps and of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.end_s = 0.0
        self.ends_s: list[float] = []
        self.cpu_s: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends_s.append(time.perf_counter())
        self.cpu_s.append(time.process_time())

    def on_train_end(self, logs: Any = None) -> None:
        self.end_s = time.perf_counter()


class _UsedMemory(keras.callbacks.Callback):
    """Records the resident memory after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.resident_bytes: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        release_free_memory()
        self.resident_bytes.append(resident_bytes())

    def lowest_until(self, step: int) -> int:
        """Return the lowest of ten values, because a step that has not ended on JAX uses memory."""
        return min(self.resident_bytes[max(step - 10, 0) : step])


def measure(options: TrainingOptions) -> None:
    """Run the benchmark on all ranks. The chief prints and writes the results."""
    hvdtrain.init()
    collectives = world.collectives()
    report = BenchReport("training", options, collectives.size, world.is_chief)
    report.print(
        f"batch {options.batch_size} and one thread per rank; {options.runs} runs of "
        f"{options.steps} steps each, alternating\n"
    )
    rows = []
    for name in options.models.split(","):
        model = hvdtrain.distribute(build_model(name))
        alone, joint = _measure_runs(model, name, options, collectives)
        growth = _measure_growth(model, options, collectives)
        rows.append(_row(name, alone, joint, growth, collectives))
    _show(report, rows, options.memory_steps)
    _measure_calls(report, collectives)
    report.finish(options.json)


def _measure_runs(
    model: keras.Model, name: str, options: TrainingOptions, collectives: Engine
) -> tuple[list[_Run], list[_Run]]:
    """Alternate runs of each rank alone, with plain Keras, and of all ranks together."""
    plain = build_model(name)
    alone, joint = [], []
    for _ in range(options.runs):
        for rank in range(collectives.size):
            if rank == collectives.rank:
                alone.append(_run(plain, options, 1))
            collectives.barrier(name=f"hvdtrain bench: rank {rank} trains alone")
        joint.append(_run(model, options, collectives.size))
        collectives.barrier(name="hvdtrain bench")
    return alone, joint


def _run(model: keras.Model, options: TrainingOptions, ranks: int) -> _Run:
    """Time one call of ``fit``."""
    clock = _StepClock()
    steps, samples = options.warmup_steps + options.steps, options.batch_size * ranks
    call_s = _fit(model, options.batch_size, steps, ranks, clock)
    first = options.warmup_steps - 1
    seconds = clock.ends_s[-1] - clock.ends_s[first]
    return _Run(
        samples_per_s=options.steps * samples / seconds,
        call_samples_per_s=steps * samples / call_s,
        end_s=time.perf_counter() - clock.end_s,
        cpu_step_s=(clock.cpu_s[-1] - clock.cpu_s[first]) / options.steps,
    )


def _measure_growth(model: keras.Model, options: TrainingOptions, collectives: Engine) -> int:
    """Return by how many bytes the resident memory grew on the rank where it grew most."""
    steps = options.memory_steps
    memory = _UsedMemory()
    _fit(model, options.batch_size, 2 * steps, collectives.size, memory)
    growth = memory.lowest_until(2 * steps) - memory.lowest_until(steps)
    (growth_bytes,) = largest(collectives, growth)
    return int(growth_bytes)


def _fit(
    model: keras.Model, batch_size: int, steps: int, ranks: int, callback: keras.callbacks.Callback
) -> float:
    """Call ``fit`` and return its duration in seconds."""
    x, y = synthetic_data(model, batch_size * steps * ranks)
    start_s = time.perf_counter()
    model.fit(x, y, batch_size=batch_size, epochs=1, verbose=0, callbacks=[callback])
    return time.perf_counter() - start_s


def _row(
    name: str,
    alone: list[_Run],
    joint: list[_Run],
    growth_bytes: int,
    collectives: Engine,
) -> dict[str, Any]:
    """Return a table row for one model.

    Throughput is relative to what each rank achieves alone, because cores differ in speed.
    """
    local_speeds = [run.samples_per_s for run in alone]
    speeds = collectives.allgather_object(local_speeds, name="hvdtrain bench: each rank alone")
    joint_speeds = [run.samples_per_s for run in joint]
    (end_s,) = largest(collectives, max(run.end_s for run in joint))
    cpu_alone_s, cpu_joint_s = (min(run.cpu_step_s for run in runs) for runs in (alone, joint))
    one_rank = statistics.mean(map(max, speeds))
    median_one_rank = statistics.mean(map(statistics.median, speeds))
    return {
        "model": name,
        "alone_samples_per_s": speeds,
        "joint_samples_per_s": joint_speeds,
        "joint_call_samples_per_s": [run.call_samples_per_s for run in joint],
        "end_s": end_s,
        "one_rank_samples_per_s": one_rank,
        "speedup": max(joint_speeds) / one_rank,
        "efficiency_percent": 100 * max(joint_speeds) / one_rank / collectives.size,
        "median_speedup": statistics.median(joint_speeds) / median_one_rank,
        "processor_efficiency_percent": 100 * cpu_alone_s / cpu_joint_s,
        "memory_growth_bytes": growth_bytes,
    }


def _show(report: BenchReport, rows: list[dict[str, Any]], memory_steps: int) -> None:
    cells = [
        [
            row["model"],
            f"{row['one_rank_samples_per_s']:.0f}",
            f"{max(row['joint_samples_per_s']):.0f}",
            f"{max(row['joint_call_samples_per_s']):.0f}",
            f"{row['speedup']:.2f}",
            f"{row['efficiency_percent']:.1f} %",
            f"{row['median_speedup']:.2f}",
            f"{row['processor_efficiency_percent']:.1f} %",
            f"{row['memory_growth_bytes'] / 1024:.0f} KiB",
        ]
        for row in rows
    ]
    head = ["model", "one rank", "all ranks", "by calls", "speedup", "efficiency", "of medians"]
    report.print_table([*head, "processor", "memory"], cells)
    report.print(
        "one rank, all ranks: samples/s of the best run. One rank trains with plain Keras and the\n"
        "  same threads while the other ranks wait; the figure is the average over ranks.\n"
        "by calls: samples/s of all ranks, measured around the whole call of fit\n"
        "processor: the chief's processor time per step alone, divided by that with all ranks.\n"
        "  It is less affected by other load.\n"
        f"memory: growth of resident memory from step {memory_steps} to {2 * memory_steps}, on the "
        "worst rank"
    )
    report.add(models=rows)
    targets = {"lenet": MIN_LENET_EFFICIENCY, "mlp": MIN_MLP_EFFICIENCY}
    growth_limit = MAX_GROWTH_BYTES / 1024
    for row in rows:
        name, percent, end_ms = row["model"], row["efficiency_percent"], 1000 * row["end_s"]
        growth = row["memory_growth_bytes"] / 1024
        report.compare(f"{name}: efficiency, best runs", percent, "at least", targets[name], "%")
        what = f"{name}: from the last callback to the return of fit, worst"
        report.compare(what, end_ms, "at most", MAX_END_MS, "ms")
        what = f"{name}: growth of memory over {memory_steps} steps"
        report.compare(what, growth, "at most", growth_limit, "KiB")


class _Batches(keras.utils.PyDataset):
    """A dataset that divides arrays into batches."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x) // CALL_BATCH_SIZE

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = slice(index * CALL_BATCH_SIZE, (index + 1) * CALL_BATCH_SIZE)
        return self._x[rows], self._y[rows]


def _tf_dataset(x: Any, y: Any) -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(CALL_BATCH_SIZE)}


# Functions that return the arguments of ``fit`` for x and y.
_INPUTS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": CALL_BATCH_SIZE},
    "tf.data": _tf_dataset,
    "PyDataset": lambda x, y: {"x": _Batches(x, y)},
}


def _measure_calls(report: BenchReport, collectives: Engine) -> None:
    """Time short calls of ``fit`` with plain Keras and on all ranks, for each kind of input."""
    rows, cells = [], []
    for name in _INPUTS:
        if name == "tf.data" and keras.backend.backend() != "tensorflow":
            continue
        alone_s, together_s = _measure_call(name, collectives)
        overhead_s = together_s - alone_s
        rows.append({"input": name, "alone_s": alone_s, "together_s": together_s})
        times_s = (alone_s, together_s, overhead_s)
        cells.append([name, *(f"{1000 * each:.0f} ms" for each in times_s)])
        what = f"one more call of fit, {name}: beyond plain Keras"
        report.compare(what, overhead_s, "at most", MAX_OVERHEAD_S, "s")
    report.print()
    report.print_table(["one more fit", "plain Keras", "all ranks", "overhead"], cells)
    report.print(
        f"best of {CALLS} calls of {CALL_STEPS} steps each, with a small traced model and equally\n"
        "many samples per rank"
    )
    report.add(calls=rows)


def _measure_call(name: str, collectives: Engine) -> list[float]:
    """Return two times of the slowest rank: of a call with plain Keras, and on all ranks."""
    alone_s = float("inf")
    for rank in range(collectives.size):
        if rank == collectives.rank:
            alone_s = _best_call_s(build_model("small"), name, 1)
        collectives.barrier(name=f"hvdtrain bench: rank {rank} calls fit alone")
    model = hvdtrain.distribute(build_model("small"))
    return largest(collectives, alone_s, _best_call_s(model, name, collectives.size))


def _best_call_s(model: keras.Model, name: str, ranks: int) -> float:
    """Return the duration of the fastest call, after two warm-up calls."""
    arguments = _INPUTS[name](*synthetic_data(model, CALL_STEPS * CALL_BATCH_SIZE * ranks))
    times = []
    for _ in range(CALLS + 2):
        start_s = time.perf_counter()
        model.fit(**arguments, shuffle=False, verbose=0)
        times.append(time.perf_counter() - start_s)
    return min(times[2:])
