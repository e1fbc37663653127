"""The programs that the ranks of claims run: ``python -m tests.gpu.programs NAME ARGUMENTS``.

Each function is a program. The chief prints its result as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

__all__ = ["KILL", "MARK", "STARTED", "STEP", "main"]

MARK = "hvdtrain-gpu-result "
STARTED, STEP, KILL = "hvdtrain-gpu-started", "hvdtrain-gpu-step", "hvdtrain-gpu-kill"


def binding(arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return which device each rank uses."""
    import tensorflow as tf

    import hvdtrain
    from hvdtrain import world

    hvdtrain.init()
    physical = tf.config.list_physical_devices("GPU")
    bound = tf.config.get_visible_devices("GPU")
    product = tf.matmul(tf.ones([512, 512]), tf.ones([512, 512]))
    own = {
        "rank": hvdtrain.rank(),
        "host": socket.gethostname(),
        "gpus": [_cuda_uuid(physical.index(gpu)) for gpu in bound],
        "memory_growth": [tf.config.experimental.get_memory_growth(gpu) for gpu in bound],
        "computed_on": product.device,
        "correct": bool(tf.reduce_all(product == 512.0)),
    }
    return world.collectives().allgather_object(own, name="binding")


def _cuda_uuid(ordinal: int) -> str:
    """Return the UUID of a GPU or a part of one. TensorFlow numbers GPUs like CUDA."""
    cuda = ctypes.CDLL("libcuda.so.1")
    # The second version distinguishes the parts of a GPU (MIG).
    get_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    device = ctypes.c_int()
    uuid = (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal) or get_uuid(uuid, device):
        raise RuntimeError(f"CUDA gives no UUID for its device {ordinal}")
    return f"GPU-{UUID(bytes=bytes(uuid))}"


def equal(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train on all ranks, and in this process on the joint batch, and compare the weights."""
    import tensorflow as tf

    import hvdtrain

    # Tensor cores round float32 to 10 bits of mantissa, differently for other batch sizes.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    hvdtrain.init()
    rows = 8 * arguments["steps"] * hvdtrain.size()
    x, y = _images(rows, 12)
    trained = _network(12, 8, jit=False)
    hvdtrain.distribute(trained)
    trained.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    alone = _network(12, 8, jit=False)
    alone.fit(x, y, batch_size=8 * hvdtrain.size(), shuffle=False, verbose=0)
    return {
        "difference": _difference(trained.get_weights(), alone.get_weights()),
        "moved": _difference(_network(12, 8, jit=False).get_weights(), alone.get_weights()),
        "ranks_equal": _same_on_all_ranks(trained.get_weights()),
    }


def pace(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Time steps with hvdtrain and with plain Keras alternately."""
    import hvdtrain

    hvdtrain.init()
    size, channels, batch = (arguments[name] for name in ("size", "channels", "batch"))
    models = [_network(size, channels, jit=arguments["jit"]) for _ in range(2)]
    hvdtrain.distribute(models[1], presharded=True)
    fits = [_timed_fit(model, size, batch) for model in models]
    for fit in fits:
        fit(2)  # traces and compiles
    steps = _steps_for(fits[0], arguments["seconds"])
    rounds: list[list[float]] = [[], []]
    for number in range(arguments["rounds"]):
        for which in (0, 1) if number % 2 else (1, 0):
            rounds[which].append(fits[which](steps))
    ratios = [with_it / plain for plain, with_it in zip(*rounds)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_step_s": statistics.median(rounds[0]),
        "step_s": statistics.median(rounds[1]),
        "steps": steps,
    }


def compiled(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train with and without XLA, and count the programs that XLA compiled."""
    with tempfile.TemporaryDirectory() as folder:
        # XLA reads this once, when TensorFlow starts.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        import tensorflow as tf

        import hvdtrain

        tf.config.experimental.enable_tensor_float_32_execution(False)
        hvdtrain.init()
        x, y = _images(16 * hvdtrain.size(), 12)
        kind = "gpu" if tf.config.list_logical_devices("GPU") else "cpu"
        weights, modules = [], []
        for jit in (False, True):
            model = _network(12, 8, jit=jit)
            hvdtrain.distribute(model)
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            weights.append(model.get_weights())
            modules.append(len(list(Path(folder).glob(f"*{kind}_after_optimizations.txt"))))
    return {
        "difference": _difference(weights[1], weights[0]),
        "modules": modules[1] - modules[0],
        "kind": kind,
        "ranks_equal": _same_on_all_ranks(weights[1]),
    }


def mixed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train with mixed_float16, and let the gradients of one rank overflow in one step."""
    import keras
    import numpy as np

    import hvdtrain

    hvdtrain.init()
    keras.config.set_dtype_policy("mixed_float16")
    x, y = _images(8 * hvdtrain.size(), 12)
    model = _network(12, 8, jit=False)
    hvdtrain.distribute(model)
    losses = model.fit(x, y, batch_size=8, epochs=8, shuffle=False, verbose=0).history["loss"]
    before = model.get_weights()
    scale = float(np.asarray(model.optimizer.dynamic_scale))
    x[-1] *= 1e6  # in the part of the last rank
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "scales": [scale, float(np.asarray(model.optimizer.dynamic_scale))],
        "changed_by_overflow": _difference(model.get_weights()[:2], before[:2]),
        "ranks_equal": _same_on_all_ranks(model.get_weights()),
        "compute_dtype": model.layers[0].compute_dtype,
    }


def nccl_alone(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run the operation that hvdtrain uses between GPUs, with one GPU and without hvdtrain."""
    import tensorflow as tf

    with tf.device("GPU:0" if arguments["hint"] == "nccl" else "CPU:0"):
        result = tf.raw_ops.CollectiveReduceV2(
            input=tf.range(1000.0),
            group_size=1,
            group_key=1,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint=arguments["hint"],
        )
    return {"correct": bool(tf.reduce_all(result == tf.range(1000.0))), "device": result.device}


def overlap(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Time steps, their computation alone, and the reduction of their gradients alone."""
    import tensorflow as tf

    import hvdtrain
    import hvdtrain.tensorflow as hvd
    from hvdtrain import world

    hvdtrain.init()
    size, channels, batch = (arguments[name] for name in ("size", "channels", "batch"))
    alone = _network(size, channels, jit=False, width=arguments["width"])
    trained = _network(size, channels, jit=False, width=arguments["width"])
    hvdtrain.distribute(trained, presharded=True)
    gradients = [tf.ones_like(variable) for variable in alone.trainable_variables]

    @tf.function
    def reduce() -> tf.Tensor:
        return tf.reduce_sum(hvd.grouped_allreduce(gradients, name="overlap")[-1])

    def timed_reductions(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            reduce().numpy()
        return (time.perf_counter() - start) / count

    operations: list[Callable[[int], float]] = [
        _timed_fit(trained, size, batch),
        _timed_fit(alone, size, batch),
        timed_reductions,
    ]
    for operation in operations:
        operation(2)
    # All ranks must take the same number of steps.
    steps = world.collectives().broadcast_object(_steps_for(operations[1], arguments["seconds"]))
    rounds: list[list[float]] = [[] for _ in operations]
    for _ in range(arguments["rounds"]):
        for times, operation in zip(rounds, operations):
            world.collectives().barrier()
            times.append(operation(steps))
    step_s, compute_s, reduce_s = map(statistics.median, rounds)
    nbytes = sum(4 * variable.shape.num_elements() for variable in alone.trainable_variables)
    return {
        "ratio": step_s / max(compute_s, reduce_s),
        "step_s": step_s,
        "compute_s": compute_s,
        "reduce_s": reduce_s,
        "nbytes": nbytes,
    }


def killed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train; in the first attempt the last rank kills itself."""
    import keras

    import hvdtrain

    print(STARTED, flush=True)
    hvdtrain.init()
    marker = Path(arguments["folder"], "killed")
    is_first = not marker.exists()
    is_last_rank = hvdtrain.rank() == hvdtrain.size() - 1
    first_step: list[int] = []

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if not first_step:
                first_step.append(int(self.model.optimizer.iterations.numpy()))
                print(STEP, flush=True)
            if is_first and is_last_rank and batch == 5:
                marker.touch()
                print(KILL, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    x, y = _images(80 * hvdtrain.size(), 12)
    model = _network(12, 4, jit=False)
    hvdtrain.distribute(model)
    callbacks = [Kill()]
    if not arguments["elastic"]:
        path = f"{arguments['folder']}/checkpoints"
        callbacks.append(hvdtrain.Checkpoint(path, every_steps=2))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=callbacks)
    steps = int(model.optimizer.iterations.numpy())
    return {
        "steps": steps,
        "first_step": first_step[0],
        "was_killed": marker.exists(),
        "size": hvdtrain.size(),
    }


def _images(rows: int, size: int) -> tuple[Any, Any]:
    import numpy as np

    numbers = np.random.default_rng(7)
    x = numbers.normal(size=(rows, size, size, 3)).astype("float32")
    return x, (x.mean(axis=(1, 2, 3)) > 0).astype("int32")


def _network(size: int, channels: int, *, jit: bool, width: int = 32) -> Any:
    """Return a compiled network, with the same weights in each call."""
    import keras

    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((size, size, 3)),
            *(layers.Conv2D(channels, 3, padding="same", activation="relu") for _ in range(4)),
            layers.GlobalAveragePooling2D(),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(2, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss=loss, jit_compile=jit)
    return model


def _timed_fit(model: Any, size: int, batch: int) -> Callable[[int], float]:
    """Return a function that trains some steps and returns the seconds per step."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors(_images(batch, size)).repeat()

    def fit(steps: int) -> float:
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        return (time.perf_counter() - start) / steps

    return fit


def _steps_for(operation: Callable[[int], float], seconds: float) -> int:
    return max(2, min(1000, round(seconds / operation(2))))


def _difference(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference, relative to the largest value of each array, or to 0.1."""
    import numpy as np

    return max(
        float(np.abs(result - value).max() / max(np.abs(value).max(), 0.1))
        for result, value in zip(results, expected)
    )


def _same_on_all_ranks(weights: Sequence[Any]) -> bool:
    from hvdtrain import world

    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()
    return len(set(world.collectives().allgather_object(digest, name="weights"))) == 1


def main(argv: Sequence[str]) -> None:
    programs: dict[str, Callable[..., Any]] = {
        program.__name__: program
        for program in (binding, equal, pace, compiled, mixed, nccl_alone, overlap, killed)
    }
    arguments = json.loads(argv[1])
    result = programs[argv[0]](arguments)
    import tensorflow as tf

    from hvdtrain import world

    # Before the program, this would start TensorFlow too early for some of them.
    if arguments["on_gpu"] and not tf.config.list_logical_devices("GPU"):
        sys.exit("TensorFlow sees no GPU on this rank")

    if argv[0] == "nccl_alone" or world.is_chief():
        print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
