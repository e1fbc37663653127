"""The candidates of the comparison, called ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["MEASURES", "NOT_MEASURED", "ON_CLUSTER", "WAYS", "Way", "find_ways"]

Launcher = Literal["alone", "hvdtrain", "mpirun", "horovodrun", "torchrun"]
HOROVOD = "horovod-optimised"


@dataclass(frozen=True, kw_only=True)
class Way:
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


def _ways() -> dict[str, Way]:
    ways = [
        Way(
            name="hvdtrain",
            label="hvdtrain",
            launcher="hvdtrain",
            library="hvdtrain",
            alone="keras",
        ),
        Way(
            name="hvdtrain-tensors",
            label="hvdtrain.tensorflow, eager tensors",
            launcher="hvdtrain",
            library="hvdtrain.tensorflow",
        ),
        Way(
            name="ring",
            label="TensorFlow's ring (hvdtrain --backend nccl, on CPUs)",
            launcher="hvdtrain",
            library="ring",
            alone="keras",
        ),
        Way(name="mpi", label="MPI_Allreduce (mpi4py)", launcher="mpirun", library="mpi"),
        Way(
            name="horovod-mpi",
            label="Horovod, MPI",
            launcher="horovodrun",
            library="horovod",
            environment=HOROVOD,
            flags=("--mpi",),
            alone="horovods-tensorflow",
        ),
        Way(
            name="horovod-gloo",
            label="Horovod, Gloo",
            launcher="horovodrun",
            library="horovod",
            environment=HOROVOD,
            flags=("--gloo",),
            alone="horovods-tensorflow",
        ),
        Way(
            name="torch",
            label="torch.distributed, Gloo (another framework)",
            launcher="torchrun",
            library="torch",
            environment="torch",
            alone="torch-alone",
        ),
        Way(name="keras", label="one process, Keras", launcher="alone", library="keras"),
        Way(
            name="horovods-tensorflow",
            label="one process, Horovod's TensorFlow",
            launcher="alone",
            library="tensorflow",
            environment=HOROVOD,
        ),
        Way(
            name="torch-alone",
            label="one process, torch (another framework)",
            launcher="alone",
            library="torch",
            environment="torch",
        ),
        Way(
            name="elastic",
            label="hvdtrain run --elastic: the other rank continues",
            launcher="alone",
            library="bench",
        ),
        Way(
            name="restart",
            label="hvdtrain run --max-restarts 1",
            launcher="hvdtrain",
            library="hvdtrain",
            flags=("--max-restarts", "1"),
        ),
        Way(
            name="torch-restart",
            label="torchrun --max-restarts 1 (another framework)",
            launcher="torchrun",
            library="torch",
            environment="torch",
            flags=("--max-restarts", "1"),
        ),
    ]
    return {way.name: way for way in ways}


WAYS: Mapping[str, Way] = _ways()
_TOGETHER = ("hvdtrain", "horovod-mpi", "horovod-gloo", "torch")
_TRAINING = ("hvdtrain", "ring", *_TOGETHER[1:], "keras", "horovods-tensorflow", "torch-alone")
# Candidates of each measure.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("hvdtrain", "hvdtrain-tensors", "ring", "mpi", *_TOGETHER[1:]),
    "training": _TRAINING,
    "startup": _TOGETHER,
    "memory": _TRAINING,
    "recovery": ("elastic", "restart", "torch-restart"),
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
