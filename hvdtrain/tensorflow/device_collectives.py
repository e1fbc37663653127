"""Reductions where tensors are: NCCL between GPUs, TensorFlow's ring between CPUs.

They are operations of the graph (``CollectiveReduceV2``), and what they add up never leaves the
device. The engine is asked before each: all ranks agree on what comes, and from then on a thread
looks whether another rank has failed, which ends the operation.
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

_KIND = "device_allreduce"

# Large enough for the full speed of a link, small enough for the first to travel while the
# gradients of the second are computed.
BUCKET_BYTES = 32 << 20
LOOK_S = 0.05
NEWS_TIMEOUT_S = 5.0
_GROUP = 1
# Of operations; TensorFlow remembers the shape of each as long as the process lives.
_numbers = itertools.count(1)
_MERGE = {"sum": "Add", "average": "Add", "min": "Min", "max": "Max", "product": "Mul"}
# In which type each is reduced: half types as by all engines.
_REDUCED_AS = {
    tf.float16: tf.float32,
    tf.bfloat16: tf.float32,
    tf.float32: tf.float32,
    tf.float64: tf.float64,
}


def connect(collectives: Engine, *, on_gpus: bool, hosts: Sequence[int]) -> DeviceCollectives:
    """Connect the GPUs or the CPUs of all ranks, given the number of each rank's host; collective.

    Raises:
        LaunchError: On all ranks: one can't be reached by the others, or can't start.
    """
    if not private_tensorflow.is_connected():
        with private_tensorflow.reserve_port() as port:
            addresses = _exchange_addresses(collectives, hosts, port)
            problem = ""
            try:
                private_tensorflow.connect(addresses, collectives.rank, port)
            except (tf.errors.OpError, RuntimeError, ValueError) as error:
                problem = f"port {port} of rank {collectives.rank}: {error}"
            # Nobody calls a server that is not there yet.
            problems = collectives.allgather_object(problem, name="servers of TensorFlow")
        if any(problems):
            raise LaunchError(
                "TensorFlow could not start its server for collective operations on "
                f"{'; '.join(filter(None, problems))}. Start with --backend mpi."
            )
    (device, *_) = tf.config.list_logical_devices("GPU" if on_gpus else "CPU")
    return DeviceCollectives(collectives, device.name, "nccl" if on_gpus else "ring")


class DeviceCollectives:
    """Reductions between the devices of all ranks; the engine sees that they agree on each.

    ``hint`` tells TensorFlow how to do it, by ``"nccl"`` or a ``"ring"``.
    """

    def __init__(self, collectives: Engine, device: str, hint: str) -> None:
        self._collectives = collectives
        self.device = device
        self.hint = hint
        self._keys: dict[Any, int] = {}
        self._busy = threading.Event()
        self.error: HvdtrainError | None = None
        """The error that ended operations, in place of what TensorFlow says of it; or None."""
        threading.Thread(target=self._look, name="hvdtrain devices", daemon=True).start()

    def takes(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether these can be reduced here: floating, of shapes that are known.

        Not in graphs for sessions: those know nothing of the other ranks' devices.
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
        """Combine tensors of one type over all ranks, at once or in the graph that is being made.

        Args:
            tensors: Tensors of a type and shapes that this ``takes``, alike on all ranks.
            op: How they are combined.
            name: For errors; the same on all ranks.
            before: Called on the host before all else.
            after: Called on the host in the end, and may raise: with whether all results are
                finite; and with which of this rank's tensors hold NaN, and which infinity, bool of
                shape (2, tensors), looked for where they aren't. If not given, nobody looks.

        Raises:
            HvdtrainError: Ranks differ in what they asked for, or one failed or did not come. In a
                graph TensorFlow makes an error of its own of it; see ``error_behind``.
        """
        if not tensors:
            return []
        shapes = tuple(tuple(tensor.shape.as_list()) for tensor in tensors)
        detail = (op, tensors[0].dtype.name, shapes)
        buckets = _divide([tensor.shape.num_elements() for tensor in tensors], tensors[0].dtype)

        def begin() -> Arrays:
            if before is not None:
                before()
            return [self._begin(name, detail, len(buckets))]

        (first,) = run_on_host(begin, [], [[]], [tf.int32])
        keys = [first + number for number in range(len(buckets))]
        results: list[Any] = list(tensors)
        try:
            with tf.device(self.device):
                for bucket, key in zip(buckets, keys):
                    reduced = self._reduce_bucket([tensors[n] for n in bucket], op, key)
                    for place, result in zip(bucket, reduced):
                        results[place] = result
                flags = _not_finite(tensors, results) if after is not None else []
        except tf.errors.OpError as error:
            raise self.error_behind(error) or error from None

        nbytes = sum(tensor.shape.num_elements() for tensor in tensors) * tensors[0].dtype.size

        def end(*flags: np.ndarray) -> Arrays:
            self._end(nbytes)
            if after is not None:
                finite, which = flags
                after(bool(finite), which)
            return [np.array(0, np.int32)]

        # Whoever uses a result has waited for the others, and for an error.
        with tf.control_dependencies(results):
            through = run_on_host(end, flags, [[]], [tf.int32])
        with tf.control_dependencies(through), tf.device(self.device):
            return [tf.identity(result) for result in results]

    def error_behind(self, error: tf.errors.OpError) -> HvdtrainError | None:
        """Return the error between ranks that one of TensorFlow's own stands for; None without any.

        An operation that ends because of another rank may do so before the news of it is here.
        """
        about_others = (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
        )
        deadline = time.monotonic() + NEWS_TIMEOUT_S
        while self.error is None and isinstance(error, about_others) and self._busy.is_set():
            if time.monotonic() > deadline:
                return CollectiveError(
                    f"TensorFlow could not finish a reduction: {error.message}. Another rank "
                    "failed, or the network between them; its own message tells why."
                )
            time.sleep(LOOK_S)
        if self.error is None and "NCCL" in error.message:
            return CollectiveError(
                f"NCCL could not reduce: {error.message}. NCCL_DEBUG=INFO makes it tell more, and "
                "--backend mpi does without it."
            )
        return self.error

    def _reduce_bucket(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, key: tf.Tensor
    ) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        wide = _REDUCED_AS[dtype]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), wide) for tensor in tensors], 0)
        total = tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=self._collectives.size,
            group_key=_GROUP,
            instance_key=key,
            ordering_token=[],
            merge_op=_MERGE[op],
            final_op="Id",
            communication_hint=self.hint,
        )
        if op == "average":
            total *= tf.constant(1.0 / self._collectives.size, wide)  # as all engines do
        counts = [tensor.shape.num_elements() for tensor in tensors]
        return [
            tf.reshape(tf.cast(part, dtype), tensor.shape)
            for part, tensor in zip(tf.split(total, counts), tensors)
        ]

    def _begin(self, name: str, detail: Any, buckets: int) -> np.ndarray:
        """Agree with the other ranks; returns the number of the first bucket's operation.

        Numbers are given when ranks first agree on such a call: in the same order on all.
        """
        self.error = None
        try:
            self._collectives.begin_external(_KIND, name, detail)
        except HvdtrainError as error:
            self.error = error
            raise
        asked = (name, detail)
        if asked not in self._keys:
            self._keys[asked] = next(_numbers)
            for _ in range(buckets - 1):
                next(_numbers)
        self._busy.set()
        return np.array(self._keys[asked], np.int32)

    def _end(self, nbytes: int) -> None:
        self._busy.clear()
        self._collectives.end_external(nbytes)

    def _look(self) -> None:
        """Check now and then that the others can still come, while an operation is in work."""
        while True:
            self._busy.wait()
            time.sleep(LOOK_S)
            try:
                self._collectives.check_external()
            except HvdtrainError as error:
                self.error = error
                private_tensorflow.abort_collectives(str(error))
                return


def _exchange_addresses(collectives: Engine, hosts: Sequence[int], port: int) -> list[str]:
    """Return each rank's server, by its host's name where all others know it; collective."""
    mine = socket.gethostname()
    if len(set(hosts)) == 1:
        places = ["127.0.0.1"] * len(hosts)
    else:
        names: list[str] = collectives.allgather_object(mine, name="hosts of servers")
        unknown = [name for name in dict.fromkeys(names) if name != mine and not _is_known(name)]
        told: list[list[str]] = collectives.allgather_object(unknown, name="unknown hosts")
        places = names
        if any(told) or len(set(names)) < len(set(hosts)):
            route = _address_of_this_host()
            places = collectives.allgather_object(route, name="addresses of servers")
        if "" in places:
            raise LaunchError(
                f"Hosts don't know each other by name ({', '.join(dict.fromkeys(names))}), and not "
                "all have a route by which others reach them; --backend nccl needs one of both. "
                "Put them into /etc/hosts or DNS, or start with --backend mpi."
            )
    ports = collectives.allgather_object(port, name="ports of servers")
    return [f"{place}:{number}" for place, number in zip(places, ports)]


def _is_known(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return not any(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def _address_of_this_host() -> str:
    """Its address towards everyone else, without asking anyone; empty without a route."""
    # Addresses for documents; nothing is sent there.
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            address = str(probe.getsockname()[0])
            return f"[{address}]" if family == socket.AF_INET6 else address
    return ""


def _divide(counts: Sequence[int], dtype: tf.DType) -> list[list[int]]:
    """Decide which tensors share a bucket; none of those without elements is in any.

    The last come first: gradients are ready in that order.
    """
    most = BUCKET_BYTES // _REDUCED_AS[dtype].size
    buckets: list[list[int]] = []
    room = 0
    for place in reversed(range(len(counts))):
        if not counts[place]:
            continue
        if not buckets or counts[place] > room:
            buckets.append([])
            room = most
        buckets[-1].append(place)
        room -= counts[place]
    return buckets


def _not_finite(tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return whether all results are finite; if not, which of ``tensors`` hold NaN or infinity."""
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(result)) for result in results])

    def none() -> tf.Tensor:
        return tf.zeros([2, len(tensors)], tf.bool)

    def look() -> tf.Tensor:
        nan = [tf.reduce_any(tf.math.is_nan(tensor)) for tensor in tensors]
        infinite = [tf.reduce_any(tf.math.is_inf(tensor)) for tensor in tensors]
        return tf.stack([tf.stack(nan), tf.stack(infinite)])

    return [finite, tf.cond(finite, none, look)]
