"""Measure how far reductions between two hosts overlap with the backward pass.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --backends nccl --bucket-bytes 0 1048576 4194304 auto

Keras trains a stack of dense layers on two hosts with a rank each, over MPI and over TensorFlow's
ring (``nccl``). In the backward pass, layers sleep for as long as the reduction takes, because the
hosts share the cores of one machine. So a step would take twice as long as its computation without
overlap, and as long as its computation with perfect overlap.

The program uses the test cluster on this machine, which needs root and the packages of
tests/testbed/packages.txt. tbf shapes the links in both directions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import make_parser, print_head, print_row, shaped_cluster

LAYERS = 16
BATCH_SIZE = 4
JOB_TIMEOUT_S = 900.0
# The first steps trace functions and connect the ranks.
WARMUP_STEPS = 2


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rate", default="200mbit", help="speed of each link; default %(default)s")
    parser.add_argument("--backends", nargs="+", choices=("mpi", "nccl"), default=["mpi", "nccl"])
    parser.add_argument("--bucket-bytes", nargs="+", default=["auto"], help="default: auto")
    parser.add_argument("--width", type=int, default=512, help="of each layer; default %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="timed steps; default %(default)s")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.width, arguments.steps)
        return
    print_head(
        *("backend", "bucket bytes", "computing", "reducing", "a step", "relative to the longer")
    )
    program = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
    with shaped_cluster(2, arguments.rate) as (cluster, environ):
        # The test cluster's default is one. init() ensures two.
        environ["TF_NUM_INTEROP_THREADS"] = "2"
        for backend in arguments.backends:
            for bucket_bytes in arguments.bucket_bytes:
                argv = [sys.executable, "-m", "hvdtrain", "run", "-H", "node1:1,node2:1"]
                argv += ["--backend", backend, "--bucket-bytes", bucket_bytes, "--chief-only"]
                done = cluster.run([*argv, "--", *program], env=environ, timeout_s=JOB_TIMEOUT_S)
                if done.returncode:
                    raise SystemExit(f"the job failed: {done!r}")
                times = json.loads(done.stdout[done.stdout.index("{") :])
                cells = [f"{1e3 * times[name]:.0f} ms" for name in ("compute", "reduce", "step")]
                ratio = times["step"] / max(times["compute"], times["reduce"])
                print_row(backend, bucket_bytes, *cells, f"{ratio:.2f}")


def measure(width: int, steps: int) -> None:
    """Measure on a rank, and print the chief's seconds per step as a line of JSON."""
    import tensorflow as tf

    import hvdtrain
    from hvdtrain import world
    from hvdtrain.bench.timing import time_in_turn
    from hvdtrain.gradients.reducer import GradientReducer

    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvdtrain.init()
    nap_s = [0.0]
    model, plain = build(width, nap_s), build(width, nap_s)
    hvdtrain.distribute(model)
    reducer = GradientReducer.of_job()
    gradients = [tf.ones(variable.shape) for variable in model.trainable_variables]
    reduce = tf.function(lambda: reducer.average(gradients, model.trainable_variables))
    engine = world.collectives()
    reduce()
    reduce_s = time_in_turn(engine, {"reduce": reduce}, repetitions=steps)["reduce"].median_s
    # All ranks sleep equally long.
    nap_s[0] = reduce_s / LAYERS
    compute_s = time_steps(plain, 1, steps)
    engine.barrier()
    step_s = time_steps(model, engine.size, steps)
    if hvdtrain.is_chief():
        print(json.dumps({"reduce": reduce_s, "compute": compute_s, "step": step_s}), flush=True)


def build(width: int, nap_s: list[float]) -> Any:
    """Return a model whose backward pass sleeps ``nap_s[0]`` seconds before each layer."""
    import keras
    import tensorflow as tf

    def sleep(gradient: Any) -> Any:
        time.sleep(nap_s[0])
        return gradient

    @tf.custom_gradient
    def slow_backward(x: Any) -> Any:
        def backward(gradient: Any) -> Any:
            late = tf.numpy_function(sleep, [gradient], gradient.dtype, stateful=False)
            return tf.ensure_shape(late, gradient.shape)

        return tf.identity(x), backward

    x = inputs = keras.Input((width,))
    for _ in range(LAYERS):
        x = keras.layers.Lambda(slow_backward)(keras.layers.Dense(width)(x))
    model = keras.Model(inputs, x)
    model.compile(keras.optimizers.SGD(1e-6), "mse", jit_compile=False)
    return model


def time_steps(model: Any, ranks: int, steps: int) -> float:
    """Return the median seconds of a training step."""
    import keras
    import numpy as np

    ends_s: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends_s.append(time.perf_counter())
    )
    x = np.ones((BATCH_SIZE * ranks * (WARMUP_STEPS + steps), *model.input_shape[1:]), np.float32)
    model.fit(x, x, batch_size=BATCH_SIZE, verbose=0, callbacks=[clock])
    return median(np.diff(ends_s)[WARMUP_STEPS - 1 :])


if __name__ == "__main__":
    main()
