"""TensorFlow's runtime, where only its private API reaches it: all of that is in this file.

Collective operations of TensorFlow run between servers, one in each process, which the runtime
starts when it starts itself. tf.distribute does it in this way, too.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import cluster_pb2, tensorflow_server_pb2
from tensorflow.python.eager import context

__all__ = ["abort_collectives", "connect", "in_use", "is_connected", "reserve_port"]

_JOB = "worker"
_REUSE = "TF_GRPC_REUSE_PORT"

_connected = False


def in_use() -> bool:
    """Whether the program has used TensorFlow's devices, so that they can't be set up any more."""
    return context.context()._context_handle is not None


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

    Args:
        addresses: "host:port" of each rank's server.
        rank: This one's.
        port: Of this rank's server.

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
