"""Test of the connection between the devices of all ranks.

Without this test, training would fail or hang in its first step if the connection is broken. The
test comes before training, when the ranks can still decide together to use MPI instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import socket
import threading
import time
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.cluster.nccl_advice import ProbeReport, explain
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.tensorflow.device_collectives import GROUP_KEY
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = ["nccl_version", "probe"]

# NCCL connects all ranks within this time, even in large jobs.
TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 10.0
ABORT_TIMEOUT_S = 5.0
POLL_S = 0.05

_LIBRARY = "libnccl.so.2"
# DeviceCollectives uses larger keys.
_INSTANCE_KEY = 0
# Names of graph nodes, which TensorFlow puts before messages.
_NODE_NAMES = re.compile(r"\{\{.*?\}\}\s*")


def probe(collectives: Engine, addresses: Sequence[str], device: str, hint: str) -> None:
    """Test the connection by reducing a number over the devices of all ranks.

    All ranks must call this. After an error, the process can't use TensorFlow's collectives again.

    ``addresses`` contains the address of each rank's server as "host:port". ``hint`` is
    TensorFlow's implementation, ``"nccl"`` or ``"ring"``.

    Raises:
        LaunchError: On all ranks, if the reduction fails or takes too long on any rank.
    """
    attempt = _Attempt(collectives.rank, addresses, device, hint)
    problems = _wait(collectives, attempt, min(TIMEOUT_S, collectives.transport.timeout_s))
    if not any(problems):
        return
    attempt.abandon()
    problem = problems[collectives.rank]
    report = ProbeReport(
        host=socket.gethostname(),
        problem=problem,
        detail=_nccl_error() if problem and hint == "nccl" else "",
    )
    reports = collectives.allgather_object(report._asdict(), name="failed test of devices")
    raise LaunchError(explain([ProbeReport(**entry) for entry in reports]))


def _wait(collectives: Engine, attempt: _Attempt, timeout_s: float) -> list[str]:
    """Wait until the test has succeeded on all ranks, or has failed on one rank.

    A failed rank must not wait for the other ranks, because NCCL may make them wait for the failed
    rank.

    Returns:
        A list with the problem of each rank, or "" for a rank without a problem. All ranks get the
        same list.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        attempt.finished.wait(POLL_S)
        finished = attempt.finished.is_set()
        late = not finished and time.monotonic() >= deadline
        states: list[list[object]] = collectives.allgather_object(
            [finished, late, attempt.problem], name="test of devices"
        )
        problems = [str(problem) for _, _, problem in states]
        if any(problems) or all(finished for finished, _, _ in states):
            return problems
        if any(late for _, late, _ in states):
            return ["" if done else f"no result within {timeout_s:g} s" for done, _, _ in states]


class _Attempt:
    """A test reduction that runs in its own thread, because NCCL may never return."""

    def __init__(self, rank: int, addresses: Sequence[str], device: str, hint: str) -> None:
        self.finished = threading.Event()  # set when the reduction has ended
        self.problem = ""  # Why the reduction failed. Empty if it has not failed.
        self._rank = rank
        self._addresses = addresses
        self._device = device
        self._hint = hint
        threading.Thread(target=self._run, name="hvdtrain probe", daemon=True).start()

    def abandon(self) -> None:
        """Abort the reduction, and wait a short time until it has ended."""

        def abort() -> None:
            private_tensorflow.abort_collectives("another rank failed in the test of devices")

        thread = threading.Thread(target=abort, name="hvdtrain abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT_S)
        self.finished.wait(ABORT_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._check_routes()
            self._reduce()
        except tf.errors.OpError as error:
            self.problem = _NODE_NAMES.sub("", error.message).split("\n")[0]
        except OSError as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        self.finished.set()

    def _check_routes(self) -> None:
        """Connect to the servers of rank 0 and of the previous rank, which this rank needs."""
        size = len(self._addresses)
        for rank in sorted({0, (self._rank - 1) % size} - {self._rank}):
            host, _, port = self._addresses[rank].rpartition(":")
            try:
                address = host.strip("[]"), int(port)
                socket.create_connection(address, CONNECT_TIMEOUT_S).close()
            except OSError as error:
                where = self._addresses[rank]
                raise ConnectionError(f"no connection to rank {rank} at {where}: {error}") from None

    def _reduce(self) -> None:
        size = len(self._addresses)
        with tf.device(self._device):
            total = tf.raw_ops.CollectiveReduceV2(
                input=tf.constant([self._rank + 1.0]),
                group_size=size,
                group_key=GROUP_KEY,
                instance_key=_INSTANCE_KEY,
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint=self._hint,
            )
        (result,) = total.numpy()
        if result != size * (size + 1) / 2:
            self.problem = f"the sum of 1 to {size} is {result:g}"


def _nccl() -> ctypes.CDLL | None:
    """Return the NCCL library that TensorFlow has loaded, or None."""
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _nccl_error() -> str:
    """Return NCCL's last error message, which TensorFlow's errors don't contain."""
    function = getattr(_nccl(), "ncclGetLastError", None)  # since NCCL 2.13
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return (function(None) or b"").decode(errors="replace").strip()


def nccl_version() -> int:
    """Return the version of NCCL, such as 22705 for 2.27.5; 0 if there is no NCCL.

    TensorFlow loads NCCL at the first reduction. If it is not loaded yet, this function loads it
    from the same place: pip's package, or the folders of the dynamic linker.
    """
    library = _nccl()
    spec = importlib.util.find_spec("nvidia") if library is None else None
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    for path in (*(f"{folder}/nccl/lib/{_LIBRARY}" for folder in folders), _LIBRARY):
        with contextlib.suppress(OSError):
            library = library or ctypes.CDLL(path)
    version = ctypes.c_int(0)
    function = getattr(library, "ncclGetVersion", None)
    if function is not None:
        function(ctypes.byref(version))
    return version.value
