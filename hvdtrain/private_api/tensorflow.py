"""All of TensorFlow's private API that hvdtrain uses, and whether the installed one has it.

Collective operations of TensorFlow run between servers, one in each process, which the runtime
starts when it starts itself; tf.distribute does it in this way, too. Graphs and sessions have no
public way to put operations into an order, and datasets none to look at their parts.
"""

from __future__ import annotations

import functools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.errors import LaunchError
from hvdtrain.private_api import lacks, missing_hooks

SEEN = ("2.21", "2.21")
"""The oldest and the newest TensorFlow that all tests have passed with."""

try:
    from tensorflow.core.framework import attr_value_pb2
    from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2
    from tensorflow.python.autograph.core import config as autograph
    from tensorflow.python.client.session import BaseSession
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function import atomic_function

    # The global seed as it was set; reading it through tf.compat would draw from the generator.
    global_seed = context.global_seed
except (ImportError, AttributeError) as error:
    raise LaunchError(lacks("TensorFlow", tf.__version__, SEEN, str(error))) from error

__all__ = [
    "HOOKS",
    "SEEN",
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
    "in_control_flow_context",
    "in_use",
    "input_datasets",
    "is_connected",
    "is_nondeterministic",
    "iterator_resource",
    "operation_seeds",
    "replace_session_methods",
    "reserve_port",
    "reshuffles",
    "run_iterations_serially",
    "unfinalize",
    "variant_tensor",
]

# What hvdtrain overrides, or calls on objects of these classes.
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
    context.Context: (
        "abort_collective_ops",
        "config",
        "configure_collective_ops",
        "enable_collective_ops",
        "ensure_initialized",
    ),
}

# By kind of dataset, the attribute that says whether it draws anew at each iteration.
_DRAWS = {"ShuffleDataset": "_reshuffle_each_iteration", "RandomDataset": "_rerandomize"}

_JOB = "worker"
_REUSE = "TF_GRPC_REUSE_PORT"
_REPLACED = "_hvdtrain_replaced"

_connected = False


def check() -> None:
    """Check that this TensorFlow has all that hvdtrain needs of it.

    Raises:
        LaunchError: Something is missing; names it, and the versions of TensorFlow that have it.
    """
    if missing := missing_hooks(HOOKS):
        raise LaunchError(lacks("TensorFlow", tf.__version__, SEEN, ", ".join(missing)))


def _held(holder: Any, name: str) -> Any:
    """Return a private attribute.

    Raises:
        LaunchError: The object has none of this name; names the versions of TensorFlow with it.
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        missing = f"{type(holder).__name__}.{name}"
        raise LaunchError(lacks("TensorFlow", tf.__version__, SEEN, missing)) from None


# The runtime.


def in_use() -> bool:
    """Whether the program has used TensorFlow's devices, so that they can't be set up any more."""
    return _held(context.context(), "_context_handle") is not None


def is_connected() -> bool:
    """Whether ``connect`` was called: it can be only once in a process."""
    return _connected


@contextmanager
def reserve_port() -> Iterator[int]:
    """A TCP port that no other process gets, and that TensorFlow's server can take within."""
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
    """Start this process's server, and tell it where the others are.

    ``addresses`` holds that of each rank's server as "host:port"; ``port`` is that of this one.

    Raises:
        tf.errors.OpError: The server does not start.
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


def abort_collectives(reason: str) -> None:
    """End all collective operations, now and later, here and where others wait for this process."""
    code: Any = tf.errors.UNAVAILABLE
    context.context().abort_collective_ops(code, reason)


def operation_seeds() -> random.Random:
    """The generator of operations' seeds, once a global seed is set."""
    generator: random.Random = _held(context.context(), "_rng")
    return generator


# Graphs and sessions.


def function_body(graph: Any, name: str) -> Iterable[Any]:
    """Return what a function that a graph knows consists of.

    Operations, if TensorFlow keeps the function's graph; else ``NodeDef`` messages: functions of
    ``Defun`` and of imported graphs have a definition only. Empty if the graph knows no function of
    this name.

    Raises:
        AttributeError: The function has neither.
    """
    function = graph._get_function(name)
    if function is None:
        return ()
    if hasattr(function, "graph"):
        body: Iterable[Any] = function.graph.get_operations()
        return body
    nodes: Iterable[Any] = function.definition.node_def
    return nodes


def unfinalize(graph: Any) -> None:
    """Let operations be added to a graph that is complete."""
    graph._unsafe_unfinalize()


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    """Let an operation wait for another one, though both are there already."""
    operation._add_control_input(before)


def run_iterations_serially(enter: tf.Operation) -> None:
    """Let a loop end each turn before the next; to be told by all operations that enter it.

    A session goes by the one that happens to be the first, and complains where they differ.
    """
    enter._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))


def control_flow_context(operation: tf.Operation) -> Any:
    """The innermost ``cond`` or ``while_loop`` of TensorFlow 1 around an operation, or None."""
    return operation._get_control_flow_context()


@contextmanager
def in_control_flow_context(graph: Any, inner: Any) -> Iterator[None]:
    """Within the block operations are added to this ``cond`` or ``while_loop``, None for none."""
    around = graph._get_control_flow_context()
    graph._set_control_flow_context(inner)
    try:
        yield
    finally:
        graph._set_control_flow_context(around)


def replace_session_methods(
    replace: Callable[[Callable[..., Any], Callable[..., Any]], tuple[Any, Any]],
) -> None:
    """Replace what sessions do before they take note of a graph, and how they run it; once.

    ``replace`` gets both methods as they are, and returns what takes their places.
    """
    if not hasattr(BaseSession, _REPLACED):
        methods = replace(BaseSession._extend_graph, BaseSession._do_run)
        BaseSession._extend_graph, BaseSession._do_run = methods
        setattr(BaseSession, _REPLACED, True)


def complete_functions(complete: Callable[[Any], list[tf.Operation]]) -> None:
    """Let the functions that are made from now on be completed first; once.

    ``complete`` gets the graph of a function, to which it may add, and returns what is to run
    whether it is used or not. A function is made of a graph when that is complete, by code of
    TensorFlow that has no other place for it: the call of an inner function is added after all that
    its body is made of.
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
    """Let functions of TensorFlow take the code of a package as it is written; once.

    AutoGraph otherwise translates each Python function that one of them calls, which takes longer
    than to trace them all. Publicly, that can be said of single functions alone.
    """
    if not hasattr(autograph, _REPLACED):
        autograph.CONVERSION_RULES = (autograph.DoNotConvert(package), *autograph.CONVERSION_RULES)
        setattr(autograph, _REPLACED, True)


# Datasets.


def input_datasets(dataset: Any) -> list[Any]:
    """The datasets that a dataset takes its elements from."""
    return list(dataset._inputs())


def captured_tensors(dataset: Any) -> list[Any]:
    """The tensors that functions of a dataset use and don't get as arguments."""
    return [tensor for part in dataset._functions() for tensor in part.function.captured_inputs]


def function_graphs(dataset: Any) -> list[Any]:
    """Return the graphs of the functions of a dataset."""
    return [part.function.graph for part in dataset._functions()]


def cache_file(dataset: Any) -> str:
    """Return the file name of a ``Dataset.cache``; empty for a cache in memory or another kind."""
    if _kind(dataset) != "CacheDataset":
        return ""
    name = _held(dataset, "_filename")
    return name.numpy().decode() if tf.is_tensor(name) else ""


def is_nondeterministic(dataset: Any) -> bool | None:
    """Return whether a dataset has ``deterministic=False``; None where it does not keep that."""
    value = getattr(dataset, "_deterministic", None)
    return None if value is None else value == "false"


def reshuffles(dataset: Any) -> bool:
    """Whether a dataset of random numbers or of an order has others at each iteration."""
    name = _DRAWS.get(_kind(dataset))
    return name is not None and bool(_held(dataset, name))


def _kind(dataset: Any) -> str:
    return type(dataset).__name__.lstrip("_")


def variant_tensor(dataset: Any) -> tf.Tensor:
    """A dataset as what TensorFlow's operations take."""
    return dataset._variant_tensor


def iterator_resource(iterator: Any) -> tf.Tensor:
    """An iterator as what TensorFlow's operations take."""
    return _held(iterator, "_iterator_resource")
