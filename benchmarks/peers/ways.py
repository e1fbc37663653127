"""The candidates of the comparison, called ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

__all__ = ["MEASURES", "NOT_MEASURED", "ON_CLUSTER", "WAYS", "Way", "find_ways"]

Launcher = Literal["alone", "hvdtrain", "mpirun", "horovodrun", "torchrun"]
HOROVOD = "horovod-optimised"


class Way(NamedTuple):
    """A candidate.

    Attributes:
        name: Name in ``--ways`` and JSON.
        label: Name in tables.
        launcher: Launcher of its ranks; ``alone`` for one process.
        library: Library of its ranks, as named in the modules of ``ranks``.
        environment: Environment of ``tests.environments``; empty for hvdtrain's own.
        flags: Flags of the launcher.
        alone: Name of the candidate with one process of the same framework.
    """

    name: str
    label: str
    launcher: Launcher
    library: str
    environment: str = ""
    flags: tuple[str, ...] = ()
    alone: str = ""


_HOROVODS = "horovods-tensorflow"
_ONCE = ("--max-restarts", "1")
_TENSORS = "hvdtrain.tensorflow, eager tensors"
_RING = "TensorFlow's ring (hvdtrain --backend nccl, on CPUs)"
_TORCH = "torch.distributed, Gloo (another framework)"
_RING_RESTART = "hvdtrain run --max-restarts 1 --backend nccl, on CPUs"
_TORCH_RESTART = "torchrun --max-restarts 1 (another framework)"
_OURS = "hvdtrain.torch (another framework)"
_ALL = [
    Way("hvdtrain", "hvdtrain", "hvdtrain", "hvdtrain", alone="keras"),
    Way("hvdtrain-tensors", _TENSORS, "hvdtrain", "hvdtrain.tensorflow"),
    Way("ring", _RING, "hvdtrain", "ring", alone="keras"),
    Way("mpi", "MPI_Allreduce (mpi4py)", "mpirun", "mpi"),
    Way("horovod-mpi", "Horovod, MPI", "horovodrun", "horovod", HOROVOD, ("--mpi",), _HOROVODS),
    Way("horovod-gloo", "Horovod, Gloo", "horovodrun", "horovod", HOROVOD, ("--gloo",), _HOROVODS),
    Way("torch", _TORCH, "torchrun", "torch", "torch", alone="torch-alone"),
    Way("hvdtrain-torch", _OURS, "mpirun", "hvdtrain.torch", "torch", alone="torch-alone"),
    Way("keras", "one process, Keras", "alone", "keras"),
    Way(_HOROVODS, "one process, Horovod's TensorFlow", "alone", "tensorflow", HOROVOD),
    Way("torch-alone", "one process, torch (another framework)", "alone", "torch", "torch"),
    Way("elastic", "hvdtrain run --elastic: the other rank continues", "alone", "bench"),
    Way("restart", "hvdtrain run --max-restarts 1", "hvdtrain", "hvdtrain", flags=_ONCE),
    Way("ring-restart", _RING_RESTART, "hvdtrain", "ring", flags=_ONCE),
    Way("torch-restart", _TORCH_RESTART, "torchrun", "torch", "torch", _ONCE),
]
WAYS: Mapping[str, Way] = {way.name: way for way in _ALL}
_TOGETHER = ("hvdtrain", "horovod-mpi", "horovod-gloo", "torch")
_TRAINING = (
    "hvdtrain",
    "ring",
    *_TOGETHER[1:],
    "hvdtrain-torch",
    "keras",
    "horovods-tensorflow",
    "torch-alone",
)
# Candidates of each measure.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("hvdtrain", "hvdtrain-tensors", "ring", "mpi", *_TOGETHER[1:]),
    "training": _TRAINING,
    "startup": _TOGETHER,
    "memory": _TRAINING,
    "recovery": ("elastic", "restart", "ring-restart", "torch-restart"),
}
# Measures that also run on the cluster.
ON_CLUSTER = ("allreduce", "training")
# Missing comparisons with the reason.
NOT_MEASURED: Mapping[str, tuple[str, ...]] = {
    "recovery": (
        "Horovod's elastic mode: it removes the whole host of a dead worker, so on one "
        "host its job ends (horovod/runner/elastic/registration.py, `_on_workers_recorded`).",
    ),
}


def find_ways(
    names: list[str], missing: Callable[[str], str | None]
) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the available candidates, and the reasons of the unavailable ones.

    Args:
        names: Names of ``WAYS``.
        missing: Returns the reason why an environment is unavailable, or None.
    """
    available: dict[str, Way] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        way = WAYS[name]
        reason = missing(way.environment) if way.environment else None
        if reason is None:
            available[name] = way
        else:
            command = f"make environments NAMES={way.environment}"
            unavailable[name] = f"{way.label}: {reason.partition(';')[0]}; install it: {command}"
    return available, unavailable
