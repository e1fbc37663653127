"""Private API of TensorFlow.

TensorFlow's own collectives connect servers. Each process runs one server, which the functions of
this module start in the same way as ``tf.distribute``. Other functions change operations of a
graph, or read the inputs of a dataset. None of this is possible with public API.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.errors import LaunchError
from hvdtrain.private_api import PrivateApi

_API = PrivateApi(
    library="TensorFlow", version=tf.__version__, tested=("2.21", "2.21"), error=LaunchError
)

try:
    from tensorflow.core.framework import attr_value_pb2
    from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2
    from tensorflow.python.autograph.core import config as autograph
    from tensorflow.python.client.session import BaseSession
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function import atomic_function
    from tensorflow.python.framework import kernels

    # The function in tf.compat would draw a number from the generator.
    global_seed = context.global_seed
except (ImportError, AttributeError) as error:
    raise _API.missing(error) from error

__all__ = [
    "HOOKS",
    "abort_collectives",
    "add_control_input",
    "cache_file",
    "captured_tensors",
    "check",
    "complete_functions",
    "connect",
    "control_flow_context",
    "exclude_from_autograph",
    "function_body",
    "function_graphs",
    "global_seed",
    "has_failed",
    "in_control_flow_context",
    "in_use",
    "input_datasets",
    "is_connected",
    "is_nondeterministic",
    "iterator_resource",
    "mark_failed",
    "operation_seeds",
    "replace_session_methods",
    "reserve_port",
    "reshuffles",
    "run_iterations_serially",
    "unfinalize",
    "variant_tensor",
    "xla_can_compile",
]

# The attributes of classes and modules that hvdtrain overrides or calls.
HOOKS: dict[Any, tuple[str, ...]] = {
    tf.Graph: (
        "_get_control_flow_context",
        "_get_function",
        "_set_control_flow_context",
        "_unsafe_unfinalize",
    ),
    tf.Operation: ("_add_control_input", "_get_control_flow_context", "_set_attr"),
    tf.data.Dataset: ("_functions", "_inputs", "_variant_tensor"),
    BaseSession: ("_do_run", "_extend_graph"),
    atomic_function: ("from_func_graph",),
    autograph: ("CONVERSION_RULES", "DoNotConvert"),
    kernels: ("get_registered_kernels_for_op",),
    context.Context: (
        "_handle",
        "config",
        "configure_collective_ops",
        "enable_collective_ops",
        "ensure_initialized",
    ),
}

# For each type of dataset, the attribute that is True if each iteration is different.
_RESHUFFLES = {"ShuffleDataset": "_reshuffle_each_iteration", "RandomDataset": "_rerandomize"}

# The library with TensorFlow's C functions.
_LIBRARY = "libtensorflow_cc.so.2"
_JOB = "worker"
_REUSE = "TF_GRPC_REUSE_PORT"
_REPLACED = "_hvdtrain_replaced"

_connected = False
_failed = False


def check() -> None:
    """Check that TensorFlow has the private API that hvdtrain needs.

    Raises:
        LaunchError: If TensorFlow lacks a part of this API.
    """
    _API.check(HOOKS)


# The runtime.


def in_use() -> bool:
    """Return whether TensorFlow's devices are initialized and can't be configured any more."""
    return _API.get(context.context(), "_context_handle") is not None


def is_connected() -> bool:
    """Return whether ``connect`` was called. A process can call ``connect`` only once."""
    return _connected


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a TCP port. Within the ``with`` block, TensorFlow's server can still bind it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        probe.bind(("", 0))
        before = os.environ.get(_REUSE)
        os.environ[_REUSE] = "1"
        try:
            yield int(probe.getsockname()[1])
        finally:
            os.environ.pop(_REUSE)
            if before is not None:
                os.environ[_REUSE] = before


def connect(addresses: Sequence[str], rank: int, port: int) -> None:
    """Start TensorFlow's server in this process, and connect it to the servers of the other ranks.

    ``addresses`` contains the address of each rank's server as "host:port".

    Raises:
        tf.errors.OpError: If the server does not start.
    """
    global _connected
    runtime = context.context()
    leader = f"/job:{_JOB}/replica:0/task:0"
    job = cluster_pb2.JobDef(name=_JOB, tasks=dict(enumerate(addresses)))
    runtime.configure_collective_ops(
        collective_leader=leader, device_filters=(f"/job:{_JOB}/task:{rank}",)
    )
    server = tensorflow_server_pb2.ServerDef(
        cluster=cluster_pb2.ClusterDef(job=[job]),
        job_name=_JOB,
        task_index=rank,
        protocol="grpc",
        port=port,
    )
    server.default_session_config.CopyFrom(runtime.config)
    server.default_session_config.experimental.collective_group_leader = leader
    runtime.enable_collective_ops(server)
    runtime.ensure_initialized()
    _connected = True


def has_failed() -> bool:
    """Return whether the connection has failed, so that collectives can't be used again."""
    return _failed


def mark_failed() -> None:
    """Record that the connection between the ranks has failed."""
    global _failed
    _failed = True


def abort_collectives(reason: str) -> None:
    """Abort all of TensorFlow's collectives in this process, including future ones.

    The collectives of other ranks that wait for this process are aborted too. With NCCL, this
    function may take long. It waits while NCCL connects the ranks, and it stops the kernels that
    are running.
    """
    mark_failed()
    # The context's method would hold Python's lock, and so stop all threads.
    library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), _LIBRARY))
    library.TF_NewStatus.restype = ctypes.c_void_p
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    runtime = ctypes.c_void_p(get_pointer(context.context()._handle, None))
    status = ctypes.c_void_p(library.TF_NewStatus())
    library.TF_SetStatus(status, tf.errors.UNAVAILABLE, reason.encode())
    library.TFE_AbortCollectiveOps(runtime, status)
    library.TF_DeleteStatus(status)


def operation_seeds() -> random.Random:
    """Return TensorFlow's generator of operation seeds, which needs a global seed."""
    generator: random.Random = _API.get(context.context(), "_rng")
    return generator


@functools.cache
def xla_can_compile(operation: str) -> bool:
    """Return whether XLA supports a type of operation on at least one kind of device."""
    if operation != "Identity" and not xla_can_compile("Identity"):
        # TensorFlow registers the kernels when it first compiles a function.
        with tf.init_scope():
            tf.function(tf.identity, jit_compile=True)(0)
        xla_can_compile.cache_clear()
    registered = kernels.get_registered_kernels_for_op(operation).kernel
    return any(kernel.device_type.endswith("_JIT") for kernel in registered)


# Graphs and sessions.


def function_body(graph: Any, name: str) -> Iterable[Any]:
    """Return the operations of a function that a graph calls, or none if the function is unknown.

    Functions of ``Defun`` and of imported graphs have no separate graph. For these functions,
    ``NodeDef`` messages are returned instead of operations.

    Raises:
        AttributeError: If the function has neither a graph nor a definition.
    """
    function = graph._get_function(name)
    if function is None:
        return ()
    has_graph = hasattr(function, "graph")
    return function.graph.get_operations() if has_graph else function.definition.node_def


def unfinalize(graph: Any) -> None:
    """Make it possible to add operations to a finalized graph."""
    graph._unsafe_unfinalize()


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    """Make an existing operation of a graph run after the operation ``before``."""
    operation._add_control_input(before)


def run_iterations_serially(enter: tf.Operation) -> None:
    """Make a loop run one iteration at a time, for each operation that enters it."""
    enter._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))


def control_flow_context(operation: tf.Operation) -> Any:
    """Return the TensorFlow 1 ``cond`` or ``while_loop`` that contains an operation, or None."""
    return operation._get_control_flow_context()


@contextmanager
def in_control_flow_context(graph: Any, inner: Any) -> Iterator[None]:
    """Add operations that are created in the ``with`` block to a ``cond`` or ``while_loop``.

    If ``inner`` is None, the operations are added to the graph itself.
    """
    around = graph._get_control_flow_context()
    graph._set_control_flow_context(inner)
    try:
        yield
    finally:
        graph._set_control_flow_context(around)


def replace_session_methods(
    replace: Callable[[Callable[..., Any], Callable[..., Any]], tuple[Any, Any]],
) -> None:
    """Replace the session methods that read a graph and run it.

    ``replace`` is called with both methods and returns their replacements. Only the first call has
    an effect.
    """
    if not hasattr(BaseSession, _REPLACED):
        methods = replace(BaseSession._extend_graph, BaseSession._do_run)
        BaseSession._extend_graph, BaseSession._do_run = methods
        setattr(BaseSession, _REPLACED, True)


def complete_functions(complete: Callable[[Any], list[tf.Operation]]) -> None:
    """Call ``complete`` with the graph of each tf.function before TensorFlow completes the graph.

    At this point the graph contains all operations, including calls of inner functions.
    ``complete`` may change the graph. It returns the operations that must run in each call of the
    tf.function. Only the first call of ``complete_functions`` has an effect.
    """
    make = atomic_function.from_func_graph

    @functools.wraps(make)
    def make_complete(name: str, graph: Any, *args: Any, **kwargs: Any) -> Any:
        known = set(graph.control_outputs)
        graph.control_outputs += [op for op in complete(graph) if op not in known]
        return make(name, graph, *args, **kwargs)

    if not hasattr(atomic_function, _REPLACED):
        atomic_function.from_func_graph = make_complete
        setattr(atomic_function, _REPLACED, True)


def exclude_from_autograph(package: str) -> None:
    """Exclude the code of a package from AutoGraph.

    AutoGraph would take longer to convert the code than TensorFlow takes to trace it. The public
    API can only exclude single functions.
    """
    if not hasattr(autograph, _REPLACED):
        autograph.CONVERSION_RULES = (autograph.DoNotConvert(package), *autograph.CONVERSION_RULES)
        setattr(autograph, _REPLACED, True)


# Datasets.


def input_datasets(dataset: Any) -> list[Any]:
    """Return the input datasets of a dataset."""
    return list(dataset._inputs())


def captured_tensors(dataset: Any) -> list[Any]:
    """Return the tensors outside of a dataset's functions that these functions use."""
    return [tensor for part in dataset._functions() for tensor in part.function.captured_inputs]


def function_graphs(dataset: Any) -> list[Any]:
    """Return the graphs of a dataset's functions."""
    return [part.function.graph for part in dataset._functions()]


def cache_file(dataset: Any) -> str:
    """Return the file name of a ``Dataset.cache``; empty in memory, or for other datasets."""
    if _kind(dataset) != "CacheDataset":
        return ""
    name = _API.get(dataset, "_filename")
    return name.numpy().decode() if tf.is_tensor(name) else ""


def is_nondeterministic(dataset: Any) -> bool | None:
    """Return whether a dataset has ``deterministic=False``; None without the argument."""
    value = getattr(dataset, "_deterministic", None)
    return None if value is None else value == "false"


def reshuffles(dataset: Any) -> bool:
    """Return whether a shuffle or random dataset has a different order in each iteration."""
    name = _RESHUFFLES.get(_kind(dataset))
    return name is not None and bool(_API.get(dataset, name))


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.lstrip("_")


def variant_tensor(dataset: Any) -> tf.Tensor:
    """Return the variant tensor of a dataset."""
    return dataset._variant_tensor


def iterator_resource(iterator: Any) -> tf.Tensor:
    """Return the resource tensor of an iterator."""
    return _API.get(iterator, "_iterator_resource")
