"""Reductions on devices: by NCCL between GPUs, by TensorFlow's ring between CPUs.

They are operations of the graph (``CollectiveReduceV2``), whose values never leave the device.
Before each one the ranks agree on it through the engine; during it, a thread checks for failed
ranks and aborts it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.kernels import ReduceOp
from hvdtrain.errors import CollectiveError, HvdtrainError, LaunchError
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.tensorflow.numpy_op import Arrays, run_on_host

__all__ = ["DeviceCollectives", "connect"]

# Large enough for full bandwidth, small enough to be sent while other gradients are computed.
BUCKET_BYTES = 32 << 20
CHECK_INTERVAL_S = 0.05
CAUSE_TIMEOUT_S = 5.0

_GROUP_KEY = 1
_MERGE_OPS = {"sum": "Add", "average": "Add", "min": "Min", "max": "Max", "product": "Mul"}
# The types in which tensors are reduced; all engines reduce half types in float32.
_REDUCED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}

# TensorFlow remembers the shape of each instance key for the life of the process.
_instance_keys = itertools.count(1)


def connect(collectives: Engine, *, on_gpus: bool, hosts: Sequence[int]) -> DeviceCollectives:
    """Connect the GPUs or the CPUs of all ranks; collective.

    Args:
        collectives: Engine.
        on_gpus: Whether to reduce on GPUs.
        hosts: Host number of each rank.

    Raises:
        LaunchError: On all ranks, if one is unreachable or can't start its server.
    """
    if not private_tensorflow.is_connected():
        with private_tensorflow.reserve_port() as port:
            addresses = _exchange_addresses(collectives, hosts, port)
            problem = ""
            try:
                private_tensorflow.connect(addresses, collectives.rank, port)
            except (tf.errors.OpError, RuntimeError, ValueError) as error:
                problem = f"port {port} of rank {collectives.rank}: {error}"
            # After this, all servers are running.
            problems = collectives.allgather_object(problem, name="servers of TensorFlow")
        if any(problems):
            raise LaunchError(
                "TensorFlow could not start its server for collectives on "
                f"{'; '.join(filter(None, problems))}. Use --backend mpi."
            )
    (device, *_) = tf.config.list_logical_devices("GPU" if on_gpus else "CPU")
    return DeviceCollectives(collectives, device.name, "nccl" if on_gpus else "ring")


class DeviceCollectives:
    """Reductions between one device of each rank.

    Args:
        collectives: Engine through which the ranks agree on each reduction.
        device: Name of this rank's device.
        hint: TensorFlow's implementation, ``"nccl"`` or ``"ring"``.
    """

    def __init__(self, collectives: Engine, device: str, hint: str) -> None:
        self._collectives = collectives
        self.device = device
        self.hint = hint
        self._first_keys: dict[Any, int] = {}
        self._running = threading.Event()
        self._error: HvdtrainError | None = None
        threading.Thread(target=self._watch, name="hvdtrain devices", daemon=True).start()

    def supports(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Return whether all tensors are floating and have static shapes, outside of sessions.

        Sessions do not know the devices of other ranks.
        """
        return tf.compat.v1.executing_eagerly_outside_functions() and all(
            tensor.dtype in _REDUCED_AS and tensor.shape.is_fully_defined() for tensor in tensors
        )

    def allreduce(
        self,
        tensors: Sequence[tf.Tensor],
        op: ReduceOp,
        *,
        name: str,
        before: Callable[[], object] | None = None,
        after: Callable[[bool, np.ndarray], None] | None = None,
    ) -> list[tf.Tensor]:
        """Reduce tensors of one type over all ranks, at once or in the current graph.

        Args:
            tensors: Tensors that ``supports`` accepts, the same on all ranks.
            op: Reduction.
            name: Name in error messages, the same on all ranks.
            before: Function to call on the host first.
            after: Function to call on the host last; it may raise. Its arguments are whether all
                results are finite and, if not, which of this rank's tensors contain NaN and which
                infinity: bool of shape (2, tensors).

        Raises:
            HvdtrainError: If ranks differ in the reduction, or a rank failed or is missing. In a
                graph TensorFlow raises its own error; see ``cause_of``.
        """
        if not tensors:
            return []
        dtype = tensors[0].dtype
        counts = [tensor.shape.num_elements() for tensor in tensors]
        shapes = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
        buckets = _divide_into_buckets(counts, dtype)

        def begin() -> Arrays:
            if before is not None:
                before()
            return [self._begin(name, (op, dtype.name, shapes), len(buckets))]

        (first_key,) = run_on_host(begin, [], [[]], [tf.int32])
        keys = [first_key + number for number in range(len(buckets))]
        results: list[Any] = list(tensors)
        try:
            with tf.device(self.device):
                for bucket, key in zip(buckets, keys):
                    reduced = self._reduce_bucket([tensors[n] for n in bucket], op, key)
                    for n, result in zip(bucket, reduced):
                        results[n] = result
                flags = _not_finite(tensors, results) if after is not None else []
        except tf.errors.OpError as error:
            raise self.cause_of(error) or error from None

        def end(*flags: np.ndarray) -> Arrays:
            self._running.clear()
            self._collectives.end_external(sum(counts) * dtype.size)
            if after is not None:
                finite, not_finite = flags
                after(bool(finite), not_finite)
            return [np.array(0, np.int32)]

        # The results depend on end, so that using one waits for all and raises their error.
        with tf.control_dependencies(results):
            ended = run_on_host(end, flags, [[]], [tf.int32])
        with tf.control_dependencies(ended), tf.device(self.device):
            return [tf.identity(result) for result in results]

    def cause_of(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """Return the error between ranks that caused an error of TensorFlow; None if it is another.

        A reduction may be aborted shortly before the failure of the other rank is known.
        """
        aborted = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while self._error is None and isinstance(error, aborted) and self._running.is_set():
            if time.monotonic() > deadline:
                return CollectiveError(
                    f"TensorFlow could not finish a reduction: {error.message}. Another rank or "
                    "the network failed; see the message of that rank."
                )
            time.sleep(CHECK_INTERVAL_S)
        if self._error is None and "NCCL" in error.message:
            return CollectiveError(
                f"NCCL could not reduce: {error.message}. Set NCCL_DEBUG=INFO for details, or use "
                "--backend mpi."
            )
        return self._error

    def _reduce_bucket(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, key: tf.Tensor
    ) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        wide = _REDUCED_AS[dtype]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), wide) for tensor in tensors], 0)
        total = tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=self._collectives.size,
            group_key=_GROUP_KEY,
            instance_key=key,
            ordering_token=[],
            merge_op=_MERGE_OPS[op],
            final_op="Id",
            communication_hint=self.hint,
        )
        if op == "average":
            total *= tf.constant(1.0 / self._collectives.size, wide)  # like all engines
        counts = [tensor.shape.num_elements() for tensor in tensors]
        return [
            tf.reshape(tf.cast(part, dtype), tensor.shape)
            for part, tensor in zip(tf.split(total, counts), tensors)
        ]

    def _begin(self, name: str, detail: Any, buckets: int) -> np.ndarray:
        """Agree on a reduction with the other ranks and return the key of its first bucket.

        Keys are assigned when ranks first agree on a reduction, in the same order on all.
        """
        self._error = None
        try:
            self._collectives.begin_external("device_allreduce", name, detail)
        except HvdtrainError as error:
            self._error = error
            raise
        if (name, detail) not in self._first_keys:
            keys = [next(_instance_keys) for _ in range(max(buckets, 1))]
            self._first_keys[name, detail] = keys[0]
        self._running.set()
        return np.array(self._first_keys[name, detail], np.int32)

    def _watch(self) -> None:
        """Abort the reduction in progress if another rank has failed."""
        while True:
            self._running.wait()
            time.sleep(CHECK_INTERVAL_S)
            try:
                self._collectives.check_external()
            except HvdtrainError as error:
                self._error = error
                private_tensorflow.abort_collectives(str(error))
                return


def _exchange_addresses(collectives: Engine, hosts: Sequence[int], port: int) -> list[str]:
    """Return the address of each rank's server, by host name if all hosts know it; collective."""
    if len(set(hosts)) == 1:
        servers = ["127.0.0.1"] * len(hosts)
    else:
        own_name = socket.gethostname()
        names: list[str] = collectives.allgather_object(own_name, name="hosts of servers")
        unknown = [n for n in dict.fromkeys(names) if n != own_name and not _is_known(n)]
        unknown_anywhere = any(collectives.allgather_object(unknown, name="unknown hosts"))
        servers = names
        if unknown_anywhere or len(set(names)) < len(set(hosts)):
            servers = collectives.allgather_object(_own_address(), name="addresses of servers")
        if "" in servers:
            raise LaunchError(
                f"--backend nccl requires host names that all hosts can resolve, or a route; got "
                f"{', '.join(dict.fromkeys(names))}. Add the hosts to /etc/hosts or DNS, or use "
                "--backend mpi."
            )
    ports = collectives.allgather_object(port, name="ports of servers")
    return [f"{server}:{number}" for server, number in zip(servers, ports)]


def _is_known(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return not any(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _own_address() -> str:
    """Return the address of this host on its default route; empty without a route."""
    # Addresses reserved for documentation; connecting a UDP socket sends nothing.
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))
            address = str(probe.getsockname()[0])
            return f"[{address}]" if family == socket.AF_INET6 else address
    return ""


def _divide_into_buckets(counts: Sequence[int], dtype: tf.DType) -> list[list[int]]:
    """Return the indices of the tensors of each bucket, without empty tensors.

    The last tensors come first, because their gradients are computed first.
    """
    capacity = BUCKET_BYTES // _REDUCED_AS[dtype].size
    buckets: list[list[int]] = []
    free = 0
    for n in reversed(range(len(counts))):
        if not counts[n]:
            continue
        if not buckets or counts[n] > free:
            buckets.append([])
            free = capacity
        buckets[-1].append(n)
        free -= counts[n]
    return buckets


def _not_finite(tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return whether all results are finite; if not, which tensors contain NaN or infinity."""
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(result)) for result in results])

    def none() -> tf.Tensor:
        return tf.zeros([2, len(tensors)], tf.bool)

    def look() -> tf.Tensor:
        nan = [tf.reduce_any(tf.math.is_nan(tensor)) for tensor in tensors]
        infinite = [tf.reduce_any(tf.math.is_inf(tensor)) for tensor in tensors]
        return tf.stack([tf.stack(nan), tf.stack(infinite)])

    return [finite, tf.cond(finite, none, look)]
