"""Reductions on devices with TensorFlow's ring. On GPUs, NCCL would run instead."""

from __future__ import annotations

import re
import signal

import pytest

from hvdtrain.frameworks.tensorflow.device_collectives import divide_into_buckets as divide
from tests.harness.jobs import REPOSITORY

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

# As init() sets it: one thread computes while the other runs the host's part of a reduction.
NCCL = {"HVDTRAIN_BACKEND": "nccl", "TF_NUM_INTEROP_THREADS": "2"}
# Only for waits after the first step, because ranks on a busy machine start at different times.
TIMEOUT_S = "2"

START = """
import sys, threading, time
import numpy as np
import tensorflow as tf
import hvdtrain
import hvdtrain.tensorflow as hvd
from hvdtrain import world
from hvdtrain.errors import MismatchError, NonFiniteError
from hvdtrain.frameworks.tensorflow import device_collectives
from hvdtrain.gradients.ranks import EngineRanks
from hvdtrain.gradients.reducer import GradientReducer
from hvdtrain.log import COMMON

hvdtrain.init()
rank, size = hvdtrain.rank(), hvdtrain.size()
on_devices = world.device_collectives()
assert on_devices is not None
reducer = GradientReducer.of_job()

def limit_waits(timeout_s):
    world.collectives().barrier()
    transport = world.collectives().transport
    transport.timeout_s = timeout_s
    for wait in (transport._spin_wait, transport._data_wait):
        wait._timeout_s = timeout_s
"""


def test_buckets_begin_with_the_last_tensors() -> None:
    assert divide([4, 4, 4, 0, 2], 4, 24) == [[4, 2], [1, 0]]
    assert divide([4, 4, 4, 0, 2], 8, 24) == [[4, 2], [1], [0]]
    assert divide([4, 4, 4, 0, 2], 4, 0) == [[4, 2, 1, 0]]
    assert divide([100, 3], 4, 40) == [[1, 0]]
    assert divide([0], 4, 40) == divide([0], 4, 0) == divide([], 4, None) == []


@pytest.mark.parametrize(("mebibytes", "buckets"), [(1, 1), (7, 4), (100, 8), (1000, 32)], ids=str)
def test_the_number_of_buckets_depends_on_the_size(mebibytes: int, buckets: int) -> None:
    assert len(divide([1 << 17] * 2 * mebibytes, 4, None)) == buckets


VALUES = """
host = GradientReducer(EngineRanks(world.collectives()))
SHAPES = [(3, 4), (0,), (), (900,), (2, 1, 5), (1200,), (7,)]
TYPES = ["float16", "float32", "float64", "bfloat16"]
numbers = np.random.default_rng(rank)
tensors = [tf.constant(numbers.normal(size=s), t) for t in TYPES for s in SHAPES]
names = [f"v{n}" for n in range(len(tensors))]
in_graph = tf.function(lambda values: reducer.average(values, names))
nbytes = sum(v.dtype.size * v.shape.num_elements() for v in tensors)
expected = tf.function(lambda values: host.average(values, names))(tensors)
for average in (reducer.average, lambda values, _: in_graph(values)):
    for _ in range(3):
        before = world.collectives().reduced_bytes
        results = average(tensors, names)
        assert world.collectives().reduced_bytes - before == nbytes
    for result, value in zip(results, expected):
        assert (result.dtype, result.shape) == (value.dtype, value.shape)
        wide = [np.asarray(tf.cast(x, tf.float64)) for x in (result, value)]
        rounding = {2: 1e-2, 4: 1e-6, 8: 1e-14}[result.dtype.size]
        np.testing.assert_allclose(*wide, rtol=rounding, atol=rounding)
    data = [np.asarray(tf.cast(value, tf.float64)).tobytes().hex() for value in results]
    assert world.collectives().allgather_object(data) == [data] * size, "bitwise equal on all ranks"

for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
    for dtype in TYPES:
        value = tf.constant([[1.0 + rank, 2.0], [-3.0, rank]], dtype)
        inputs = np.array([[[1.0 + r, 2.0], [-3.0, r]] for r in range(size)]) * 2
        combine = {"Sum": np.sum, "Average": np.mean, "Min": np.min, "Max": np.max}
        expected = combine.get(op.name, np.prod)(inputs, axis=0) / 4

        def reduce(value):
            return hvd.allreduce(value, op=op, prescale_factor=2.0, postscale_factor=0.25, name="x")

        for result in (reduce(value), tf.function(reduce)(value)):
            rounding = {2: 1e-2, 4: 1e-6, 8: 1e-14}[value.dtype.size]
            np.testing.assert_allclose(np.asarray(tf.cast(result, tf.float64)), expected, rounding)

variable = tf.Variable([1.0 + rank, 2.0])
with tf.GradientTape() as tape:
    total = tf.reduce_sum(hvd.allreduce(variable, op=hvd.Sum) * (rank + 1.0))
np.testing.assert_allclose(tape.gradient(total, variable), [size * (size + 1) / 2] * 2)
assert hvd.allreduce(tf.constant([rank + 1]), op=hvd.Sum).numpy() == size * (size + 1) // 2

part = [tf.Variable([0.0]), tf.Variable([[0.0, 0.0]])]
tape = hvdtrain.DistributedGradientTape(tf.GradientTape())
with tape:
    loss = tf.reduce_sum(part[0] * (rank + 1.0))
assert tape.gradient(loss, part)[1] is None
COMMON.info("the same on all ranks")
hvdtrain.shutdown()
deadline = time.monotonic() + 30
while [thread for thread in threading.enumerate() if thread.name == "hvdtrain devices"]:
    assert time.monotonic() < deadline, "the thread outlives shutdown()"
    time.sleep(0.01)
hvdtrain.init()
again = world.device_collectives().allreduce([tf.ones(3)], "sum", name="again")
np.testing.assert_array_equal(again[0], [size] * 3)
print("passed", flush=True)
"""


def test_results_equal_those_of_the_engine(launch) -> None:
    env = {**NCCL, "HVDTRAIN_BUCKET_BYTES": "4000"}
    done = launch(3, START + VALUES, env=env, timeout_s=120)
    assert done.returncode == 0, done
    assert done.stdout.count("passed") == 3
    message = r"NCCL combines gradients: --backend nccl \(with TensorFlow's ring on CPUs"
    assert len(re.findall(message, done.stderr)) == 2, "by the chief, for each init()"
    assert done.stderr.count("hvdtrain: the same on all ranks") == 1, "by the chief"


COMPRESSED = """
form = sys.argv[1]
half = {"fp16": tf.float16, "bf16": tf.bfloat16}[form]
large = {"fp16": 6e4, "bf16": 3e38}[form]
small = 1.0 + 2.0**-12
gradients = [tf.constant([large, -3.0 * rank]), tf.constant([[small]], tf.float64)]

def kinds(function):
    operations = function.get_concrete_function().graph.get_operations()
    return {op.get_attr("T") for op in operations if op.type == "CollectiveReduceV2"}

step = tf.function(lambda: reducer.average(gradients, ["kernel", "bias"]))
assert kinds(step) == {half}
for kernel, bias in (step(), reducer.average(gradients, ["kernel", "bias"])):
    assert (kernel.dtype, bias.dtype) == (tf.float32, tf.float64)
    # The sum would be infinite.
    expected = [float(tf.cast(large, half)), -1.5]
    np.testing.assert_array_equal(kernel, np.array(expected, np.float32))
    assert bias.numpy() == 1.0, "not rounded"
try:
    reducer.average(gradients, ["kernel", "bias"], op="sum")
except NonFiniteError as error:
    assert "the sum over all ranks overflowed" in str(error)
else:
    raise SystemExit("no error")

def horovod():
    return hvd.allreduce(gradients[0], compression=getattr(hvd.Compression, form))

assert kinds(tf.function(horovod)) == {half}
np.testing.assert_array_equal(horovod(), np.array(expected, np.float32))
print("passed", flush=True)
"""


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_compressed_gradients(launch, form: str) -> None:
    env = {**NCCL, "HVDTRAIN_COMPRESSION": form}
    done = launch(2, START + COMPRESSED, form, env=env, timeout_s=100)
    assert done.returncode == 0, done
    assert done.stdout.count("passed") == 2
    assert "no effect" not in done.stderr


MISTAKES = """
good = [tf.constant([1.0, 2.0]), tf.constant([[3.0]])]
in_graph = tf.function(lambda values: reducer.average(values, ["kernel", "bias"]))

def expect(text, values, errors):
    for average in (lambda v: reducer.average(v, ["kernel", "bias"]), in_graph):
        try:
            average(values)
        except errors as error:
            assert text in str(error), error
        else:
            raise SystemExit("no error")
        # The next reduction works.
        np.testing.assert_array_equal(average(good)[0], [1.0, 2.0])

if sys.argv[1] == "names":
    on_devices.allreduce([tf.ones(3 + rank)], "sum", name="x")
errors = NonFiniteError, tf.errors.OpError
bad = np.inf if rank == 1 else np.nan if rank == 2 else 1.0
expect("bias (infinity) on rank 1; bias (NaN) on rank 2", [good[0], good[1] * bad], errors)
huge = tf.constant([3e38, 0.0])
expect("the sum over all ranks overflowed", [huge, good[1]], errors)
reducer.average([tf.ones(3 + rank)], ["x"])
"""


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("names", r"rank 1: device_allreduce\(x\) with sum, float32, \(\(4,\),\)"),
        ("shapes", r"x is dense float32 \(3,\) on rank 0 and dense float32 \(4,\) on rank 1"),
    ],
)
def test_mistakes_are_errors_on_every_rank(launch, mistake: str, text: str) -> None:
    done = launch(3, START + MISTAKES, mistake, env=NCCL, timeout_s=120)
    assert done.returncode != 0
    assert len(re.findall(rf"^hvdtrain.errors.MismatchError: .*{text}", done.stderr, re.M)) == 3


MISSING_RANK = """
way = sys.argv[1]
step = tf.function(lambda value: reducer.average([value, value], ["kernel", "bias"]))

def late(value):
    time.sleep(1 if way == "fails within" else 60)
    raise ValueError("bad batch")

@tf.function
def slow(value):
    # Stateless, so that the reduction of the other gradient begins meanwhile.
    computed = tf.numpy_function(late, [value], tf.float32, stateful=False)
    computed = tf.ensure_shape(computed, [3])
    gradients = [computed, value] if way == "hangs between buckets" else [value, computed]
    return reducer.average(gradients, ["kernel", "bias"])

step(tf.ones(3))
slow.get_concrete_function(tf.ones(3))
limit_waits(float(sys.argv[2]))
if rank == 1:
    if way == "fails":
        raise ValueError("bad batch")
    if way == "ends":
        sys.exit(0)
    slow(tf.ones(3))
step(tf.ones(3))
"""
WAITED = rf"rank 0 waited {TIMEOUT_S} s in device_allreduce\(gradients\).*: rank 1 is not waiting"


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("fails", "rank 1 failed: ValueError: bad batch"),
        ("fails within", "bad batch"),
        ("ends", "rank 1 ended its program while rank 0 waits for it in device_allreduce"),
        ("hangs within", WAITED),
        ("hangs between buckets", WAITED),
    ],
)
def test_a_missing_rank_ends_the_job(launch, way: str, text: str) -> None:
    env = {**NCCL, "HVDTRAIN_BUCKET_BYTES": "1"}
    done = launch(2, START + MISSING_RANK, way, TIMEOUT_S, env=env, timeout_s=100)
    assert done.returncode != 0
    assert done.seconds < 60
    assert re.search(text, done.stderr), done


COMPUTATION = """
import keras

# Only for waits within reductions on devices.
LIMIT_S = world.collectives().transport.timeout_s = 1.0
events = []

def record(name):
    function = getattr(world.collectives(), name)
    def recorded(*arguments):
        result = function(*arguments)
        events.append(name.removesuffix("_external"))
        return result
    setattr(world.collectives(), name, recorded)

for name in ("begin_external", "pause_external", "resume_external", "end_external"):
    record(name)

def slowly(value):
    def sleep(value):
        time.sleep(2 * LIMIT_S)
        return value
    # Stateless, so that only its result orders it and the reduction.
    return tf.ensure_shape(tf.numpy_function(sleep, [value], tf.float32, stateful=False), [3])

@tf.function
def sleeping_step(value):
    forward = slowly(value)
    return reducer.average([value, slowly(forward), forward], ["a", "b", "c"])

assert len(sleeping_step(tf.fill([3], rank + 1.0))) == 3
assert events == ["begin", "pause", "resume", "pause", "resume", "end"], events

@tf.function(jit_compile=True)
def compiled(value):
    for n in range(LAYERS):
        value = tf.sort(tf.sin(value) + float(n))[::-1]
    return value

step = tf.function(lambda value: reducer.average([compiled(value)], ["compiled"]))
step.get_concrete_function(tf.ones(3))
start_s = time.monotonic()
step(tf.ones(3))
assert time.monotonic() - start_s > 1.5 * LIMIT_S, "XLA compiled too fast for this test"
print("passed", flush=True)
"""


def test_computation_and_compilation_do_not_count_as_waiting(launch) -> None:
    program = START + COMPUTATION.replace("LAYERS", "240")
    done = launch(2, program, env={**NCCL, "HVDTRAIN_BUCKET_BYTES": "1"}, timeout_s=150)
    assert done.returncode == 0, done
    assert done.stdout.count("passed") == 2


OVERLAP = """
import threading, keras

reduced = threading.Event()
pause = world.collectives().pause_external
world.collectives().pause_external = lambda: (pause(), reduced.set())

class Late(keras.layers.Layer):
    def call(self, x):
        def wait(gradient):
            assert reduced.wait(30), "no bucket is reduced during the backward pass"
            return gradient

        @tf.custom_gradient
        def identity(x):
            def backward(gradient):
                late = tf.numpy_function(wait, [gradient], tf.float32, stateful=False)
                return tf.ensure_shape(late, gradient.shape)
            return tf.identity(x), backward

        return identity(x)

layers = keras.layers
model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Late(), layers.Dense(2)])
model.compile("sgd", "mse")
hvdtrain.distribute(model)
model.fit(np.ones((8, 4)), np.ones((8, 2)), batch_size=4, verbose=0)
print("passed", flush=True)
"""


def test_buckets_are_reduced_during_the_backward_pass(launch) -> None:
    env = {**NCCL, "HVDTRAIN_BUCKET_BYTES": "1"}
    done = launch(2, START + OVERLAP, env=env, timeout_s=100)
    assert done.returncode == 0, done
    assert done.stdout.count("passed") == 2


LOOP = """
import os, threading
step = tf.function(lambda values: reducer.average(values, ["a", "b"]))
step([tf.ones(300_000), tf.ones(5)])
limit_waits(float(sys.argv[2]))
if rank == 1:
    threading.Timer(0.5, os.kill, [os.getpid(), int(sys.argv[1])]).start()
while True:
    step([tf.ones(300_000), tf.ones(5)])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_ends_the_job(launch, number: signal.Signals) -> None:
    done = launch(2, START + LOOP, str(int(number)), TIMEOUT_S, env=NCCL, timeout_s=100)
    assert done.returncode != 0
    assert done.seconds < 60
    if number == signal.SIGSTOP:
        assert re.search(rf"rank 0 waited {TIMEOUT_S} s in|rank 0 of 2 ends", done.stderr), done


STUCK = """
import os, signal
from hvdtrain.private_api import tensorflow as private_tensorflow
private_tensorflow.abort_collectives = lambda reason: {abort}
device_collectives.ABORT_TIMEOUT_S = 1
step = tf.function(lambda value: reducer.average([value], ["kernel"])[0])
step(tf.ones(3))
limit_waits(float(sys.argv[1]))
engine = world.collectives()
begin = engine.begin_external

def stop_after(*call):
    begin(*call)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)

engine.begin_external = stop_after
step(tf.ones(3))
"""


@pytest.mark.parametrize("abort", ["time.sleep(100)", "open('/missing')"])
def test_a_reduction_that_can_not_be_aborted_ends_the_process(launch, abort: str) -> None:
    program = START + STUCK.replace("{abort}", abort)
    done = launch(2, program, TIMEOUT_S, env=NCCL, timeout_s=60)
    assert done.returncode == 1, done
    assert "a reduction can't be aborted, so this process ends" in done.stderr
    assert re.search(rf"^hvdtrain.*TimeoutError: rank 0 waited {TIMEOUT_S} s", done.stderr, re.M)


def test_training_equals_one_process(launch) -> None:
    program = REPOSITORY / "tests" / "trainer" / "train_all_cases.py"
    done = launch(2, program, "uneven", "jit", env=NCCL, timeout_s=250)
    assert done.returncode == 0, done
    assert done.stdout.count("trained 2") == 2
    assert "NCCL combines gradients" in done.stderr
