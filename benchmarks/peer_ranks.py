"""One rank of a job of ``against_peers.py``, for all libraries.

    python peer_ranks.py '{"library": "torch", "cases": ..., "result": "/tmp/x.json", ...}'

Rank 0 writes the results as JSON: times of allreduces if the job has ``cases``, otherwise figures
of trainings. Each library is imported in its own environment.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

# Calls per measurement of small arrays.
MAX_CALLS = 100
BYTES_PER_RUN = 2 << 20
CALL_TIMEOUT = timedelta(seconds=120)
SEED = 7
CLASSES = 10
# Modules with Horovod's names.
MODULES = {
    "hvdtrain": "hvdtrain",
    "ring": "hvdtrain",
    "hvdtrain.tensorflow": "hvdtrain.tensorflow",
    "hvdtrain.torch": "hvdtrain.torch",
    "horovod": "horovod.tensorflow",
}

Arrays = list[np.ndarray]
StepEnded = Callable[[], None] | None


def main() -> None:
    job = json.loads(sys.argv[1])
    os.environ.update(job["environ"])
    # Other environments don't contain hvdtrain.
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    rank, results = (measure_calls if "cases" in job else measure_training)(job)
    if rank == 0:
        draft = Path(job["result"]).with_suffix(".part")
        draft.write_text(json.dumps(results))
        draft.rename(job["result"])


def join(job: dict[str, Any]) -> tuple[int, int, Any]:
    """Start a library, and return rank, number of ranks, and the module with Horovod's names."""
    library = job["library"]
    if library == "torch":
        return *join_gloo(job), None
    if library not in MODULES:
        return 0, 1, None
    if library == "ring":
        os.environ["HVDTRAIN_BACKEND"] = "nccl"
    hvd = importlib.import_module(MODULES[library])
    hvd.init()
    return hvd.rank(), hvd.size(), hvd


def join_gloo(job: dict[str, Any]) -> tuple[int, int]:
    """Join torch's process group if torchrun or mpirun has started this rank."""
    from torch import distributed

    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Ranks find each other through a shared file.
        distributed.init_process_group(
            "gloo",
            init_method=Path(job["result"]).with_suffix(".meeting").as_uri(),
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
    else:
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


# Allreduce and broadcast


class Group(NamedTuple):
    """The ranks of a library.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        tensors_of: Converts arrays to the library's tensors.
        call: Sums tensors over all ranks, and waits for the result.
        barrier: Waits for all ranks.
        leave: Called at the end.
    """

    rank: int
    size: int
    tensors_of: Callable[[Arrays], Any]
    call: Callable[[Any], object]
    barrier: Callable[[], object]
    leave: Callable[[], object] = lambda: None


def measure_calls(job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the rank, and the median seconds of each case by its name."""
    groups = {"hvdtrain": engine_group, "mpi": mpi_group, "ring": ring_group, "torch": torch_group}
    group = groups.get(job["library"], hvd_group)(job)
    results: dict[str, Any] = {"ranks": group.size}
    generator = np.random.default_rng(group.rank)
    for name, (nbytes, count) in job["cases"].items():
        values = max(1, nbytes // 4 // count)
        tensors = group.tensors_of([generator.random(values, np.float32) for _ in range(count)])
        calls = max(1, min(MAX_CALLS, BYTES_PER_RUN // nbytes))
        times = [time_calls(group, tensors, calls) for _ in range(job["runs"] + 1)]
        results[name] = median(times[1:])
    group.leave()
    return group.rank, results


def time_calls(group: Group, tensors: Any, calls: int) -> float:
    """Return the seconds of a call."""
    group.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        group.call(tensors)
    if calls == 1:
        group.barrier()
    return (time.perf_counter() - start_s) / calls


def engine_group(job: dict[str, Any]) -> Group:
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create
    from hvdtrain.config import read_settings

    engine: Any = create(read_topology(os.environ), read_settings(os.environ))

    def call(arrays: Arrays) -> object:
        if job.get("call") == "broadcast":
            return [engine.broadcast(array, name="array") for array in arrays]
        return engine.grouped_allreduce(arrays, name="arrays", wire=job.get("wire", "none"))

    leave = engine.transport.leave
    return Group(engine.rank, engine.size, lambda arrays: arrays, call, engine.barrier, leave)


def mpi_group(job: dict[str, Any]) -> Group:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def tensors_of(arrays: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(array, np.empty_like(array)) for array in arrays]

    def call(pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for array, total in pairs:
            if job.get("call") == "broadcast":
                world.Bcast(array)
            else:
                world.Allreduce(array, total)

    return Group(world.Get_rank(), world.Get_size(), tensors_of, call, world.Barrier)


def ring_group(job: dict[str, Any]) -> Group:
    import tensorflow as tf

    from hvdtrain import world

    rank, size, _ = join(job)
    devices: Any = world.device_collectives()

    def tensors_of(arrays: Arrays) -> Any:
        with tf.device(devices.device):
            return [tf.constant(array) for array in arrays]

    @tf.function
    def reduce(tensors: Any) -> tf.Tensor:
        return tf.stack([total[0] for total in devices.allreduce(tensors, "sum", name="all")])

    def call(tensors: Any) -> object:
        # Reading the values waits for the reduction.
        return reduce(tensors).numpy()

    return Group(rank, size, tensors_of, call, world.collectives().barrier)


def hvd_group(job: dict[str, Any]) -> Group:
    """Return the group of a module with Horovod's names."""
    import tensorflow as tf

    rank, size, hvd = join(job)

    def tensors_of(arrays: Arrays) -> Any:
        return [tf.constant(array) for array in arrays]

    def call(tensors: Any) -> object:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, name="arrays")

    return Group(rank, size, tensors_of, call, lambda: hvd.allreduce(tf.zeros([1]), name="barrier"))


def torch_group(job: dict[str, Any]) -> Group:
    import torch
    from torch import distributed

    rank, size, _ = join(job)

    def tensors_of(arrays: Arrays) -> Any:
        # Sums are in place; zeros stay zeros in repeated calls.
        return [torch.zeros(array.shape) for array in arrays]

    def call(tensors: Any) -> None:
        works = [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait(CALL_TIMEOUT)

    leave = distributed.destroy_process_group
    return Group(rank, size, tensors_of, call, distributed.barrier, leave)


# Training


class StepClock:
    """A recorder of the first step, which can also kill a rank.

    Args:
        rank: This rank.
        job: Parameters of the job. ``die`` selects a rank to kill and the step. The file ``killed``
            passes the times of the first step and the kill to restarted processes.
    """

    def __init__(self, rank: int, job: dict[str, Any]) -> None:
        self._killed = Path(job["killed"])
        self._restarted = self._killed.exists()
        die = job.get("die", {"rank": None, "after_step": 0})
        self._last_step = die["after_step"] if die["rank"] == rank and not self._restarted else 0
        self._steps = 0
        self._first_s = 0.0

    def step_ended(self) -> None:
        """Count a step; call it after each step."""
        self._steps += 1
        if self._steps == 1:
            self._first_s = time.monotonic()
        if self._steps == self._last_step:
            self._killed.write_text(f"{self._first_s} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def figures(self) -> dict[str, float]:
        """Return the time of the job's first step, and the delay of the next one after a kill."""
        if self._restarted:
            first_s, killed_s = map(float, self._killed.read_text().split())
            return {"first_step_at_s": first_s, "kill_to_next_step_s": self._first_s - killed_s}
        return {"first_step_at_s": self._first_s}


def measure_training(job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the rank, and samples per second and peak memory of each model after a warm-up."""
    from hvdtrain.bench.machine import peak_resident_bytes

    library = job["library"]
    if "torch" in library:
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        make_trainer, modules = torch_trainer, ["torch"]
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(job.get("inter_op_threads", 1))
        make_trainer, modules = fit_trainer, ["tensorflow", "keras"]
        if library in ("horovod", "tensorflow"):
            make_trainer = loop_trainer
        if library == "horovod":
            modules.append("horovod")
    versions = {name: importlib.import_module(name).__version__ for name in modules}
    rank, size, hvd = join(job)
    clock = StepClock(rank, job)
    results: dict[str, Any] = {"versions": versions, "ranks": size}
    for name, (batch, steps) in job["models"].items():
        train = make_trainer(name, batch, steps, rank, size, hvd)
        train(job["warmup_steps"], clock.step_ended)
        start_s = time.perf_counter()
        train(steps, None)
        speed = batch * steps * size / (time.perf_counter() - start_s)
        # The peak includes previous models.
        results |= {f"{name} samples_per_s": speed, f"{name} peak_bytes": peak_resident_bytes()}
    return rank, {**results, **clock.figures()}


Trainer = Callable[[int, StepEnded], None]


def fit_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return training with Keras' ``fit``: in one process, with hvdtrain, or with its ring."""
    import keras

    from hvdtrain.bench.models import build_model, synthetic_data

    model = build_model(name)
    if hvd is not None:
        hvd.distribute(model)
    x, y = synthetic_data(model, batch * steps * size)

    def train(count: int, step_ended: StepEnded) -> None:
        callbacks = []
        if step_ended:
            clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: step_ended())
            callbacks.append(clock)
        rows = batch * count * size
        model.fit(x[:rows], y[:rows], batch_size=batch, verbose=0, callbacks=callbacks)

    return train


def loop_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return a loop over a ``tf.function``, as in Horovod's guides, or in one process."""
    import keras
    import tensorflow as tf

    from hvdtrain.bench.models import build_model, synthetic_data

    model = build_model(name)
    optimizer = keras.optimizers.SGD(0.001)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = (array[rank::size] for array in synthetic_data(model, batch * steps * size))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).prefetch(1)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        if hvd is not None:
            tape = hvd.DistributedGradientTape(tape)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    def train(count: int, step_ended: StepEnded) -> None:
        for number, rows in enumerate(data.take(count)):
            loss = step(*rows)
            if step_ended:
                loss.numpy()
                step_ended()
                if number == 0 and hvd is not None:
                    hvd.broadcast_variables(model.variables, root_rank=0)
        loss.numpy()

    return train


def torch_trainer(name: str, batch: int, steps: int, rank: int, size: int, hvd: Any) -> Trainer:
    """Return a PyTorch loop: one process, DistributedDataParallel with Gloo, or hvdtrain."""
    import torch
    from torch import distributed, nn

    torch.manual_seed(SEED)
    model, shape = torch_model(name)
    if distributed.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    generator = np.random.default_rng(SEED)
    x = torch.from_numpy(generator.random((batch * steps, *shape), np.float32))
    y = torch.from_numpy(generator.integers(0, CLASSES, len(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    if hvd is not None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    loss_of = nn.CrossEntropyLoss()

    def train(count: int, step_ended: StepEnded) -> None:
        for step in range(count):
            rows = slice(step * batch, (step + 1) * batch)
            optimizer.zero_grad()
            loss_of(model(x[rows]), y[rows]).backward()
            optimizer.step()
            if step_ended:
                step_ended()

    return train


def torch_model(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a small model of hvdtrain.bench.models, and the shape of a sample."""
    from torch import nn

    if name == "small":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES)), (32,)
    if name == "mlp":
        wide = nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()
        return nn.Sequential(*wide, nn.Linear(4096, CLASSES)), (784,)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    ), (1, 28, 28)


if __name__ == "__main__":
    main()
