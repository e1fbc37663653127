"""The choice of the library that combines the ranks' gradients: MPI, NCCL or Horovod.

``choose_engine`` decides how ranks communicate. Once the ranks are connected, they exchange their
``DeviceCapabilities``, and ``choose_device_engine`` decides whether NCCL combines gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Literal, NamedTuple

from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.nccl_advice import SAME_VERSIONS
from hvdtrain.cluster.topology import Topology
from hvdtrain.errors import ConfigurationError, LaunchError

__all__ = [
    "DeviceCapabilities",
    "EngineChoice",
    "choose_device_engine",
    "choose_engine",
    "without_nccl",
]


class EngineChoice(NamedTuple):
    """The chosen library, and the reason for the choice, which is logged."""

    engine: Literal["mpi", "nccl", "horovod"]  # the library
    reason: str  # why the library was chosen
    is_fallback: bool = False  # whether the library is used because NCCL failed


class DeviceCapabilities(NamedTuple):
    """A rank's abilities that decide whether devices can combine gradients."""

    host: int  # index of the rank's host among the job's hosts
    gpu: Gpu | None  # the rank's first GPU; None if the rank computes on the CPU
    has_nccl: bool  # whether the rank's TensorFlow contains NCCL
    # why TensorFlow in this rank can't be connected to the other ranks; empty if it can be
    # connected
    obstacle: str = ""
    nccl: int = 0  # version of NCCL as an integer, such as 22705 for 2.27.5; 0 if unknown


def choose_engine(topology: Topology, backend: str, *, has_servers: bool = False) -> EngineChoice:
    """Choose between MPI and Horovod, with the same result on all ranks.

    Raises:
        LaunchError: If the launcher doesn't support the backend.
        ConfigurationError: If parameter servers don't support the backend.
    """
    without_mpi = topology.launcher == "horovod-gloo" and topology.size > 1
    if backend == "mpi" and without_mpi:
        raise LaunchError(
            "--backend mpi (HVDTRAIN_BACKEND) needs MPI, but horovodrun --gloo started this rank "
            f"{topology.rank} of {topology.size} (HOROVOD_RANK, HOROVOD_SIZE) without MPI. Omit "
            "it, or start with horovodrun --mpi, mpirun, or hvdtrain run "
            f"-np {topology.size} -- python ..."
        )
    if backend in ("auto", "nccl"):
        if not without_mpi:
            return EngineChoice("mpi", "the ranks can use MPI")
        choice = EngineChoice("horovod", "horovodrun --gloo started the ranks, without MPI")
    else:
        choice = EngineChoice("horovod" if backend == "horovod" else "mpi", f"--backend {backend}")
    if choice.engine == "horovod" and has_servers:
        raise ConfigurationError(
            f"Parameter servers need MPI, but the ranks use Horovod: {choice.reason}. Start with "
            "horovodrun --mpi, mpirun, srun or hvdtrain run, without --backend horovod; or train "
            "with --mode allreduce."
        )
    return choice


def choose_device_engine(
    backend: str, capabilities: Sequence[DeviceCapabilities], *, has_servers: bool, elastic: bool
) -> EngineChoice:
    """Choose between MPI and NCCL for dense gradients, with the same result on all ranks.

    Raises:
        LaunchError: If the backend is ``nccl`` and the ranks don't support it.
        ConfigurationError: If the backend is ``nccl`` and the settings don't support it.
    """
    if backend == "mpi":
        return EngineChoice("mpi", "--backend mpi")
    if has_servers or elastic:
        reason = (
            "some ranks are parameter servers" if has_servers else "ranks may be lost (--elastic)"
        )
        if backend == "nccl":
            raise ConfigurationError(
                f"--backend nccl (HVDTRAIN_BACKEND) needs all ranks in each step, but {reason}; "
                "omit one of them."
            )
        return EngineChoice("mpi", reason)
    obstacle = _obstacle(capabilities, needs_gpus=backend == "auto")
    if obstacle:
        return without_nccl(backend, obstacle)
    if backend == "auto":
        return EngineChoice("nccl", "every rank has a GPU")
    on_cpus = (
        ""
        if capabilities[0].gpu
        else " (with TensorFlow's ring on CPUs, because no rank has a GPU)"
    )
    return EngineChoice("nccl", f"--backend nccl{on_cpus}")


def without_nccl(backend: str, obstacle: str, *, failed: bool = False) -> EngineChoice:
    """Choose MPI because NCCL can't be used.

    ``obstacle`` is the reason, and ``failed`` says whether NCCL failed unexpectedly.

    Raises:
        LaunchError: If the backend is ``nccl``.
    """
    if backend == "nccl":
        raise LaunchError(
            f"--backend nccl (HVDTRAIN_BACKEND) is not possible: {obstacle}. Fix that, or omit it "
            "to combine gradients over MPI."
        )
    return EngineChoice("mpi", obstacle, failed)


def _obstacle(capabilities: Sequence[DeviceCapabilities], *, needs_gpus: bool) -> str:
    """Return why the ranks can't combine gradients on their devices; empty if they can."""
    gpus = [(one.host, one.gpu) for one in capabilities if one.gpu]
    without_gpu = [rank for rank, one in enumerate(capabilities) if not one.gpu]
    if not gpus:
        if needs_gpus:
            return "no rank has a GPU"
    elif without_gpu:
        return f"only some ranks have a GPU, not {_ranks(without_gpu)}"
    else:
        sharing = _sharing(gpu.id for _, gpu in gpus)
        if sharing:
            return f"{_ranks(sharing)} share a GPU, which NCCL does not allow"
        sharing = _sharing(gpu.bus_id and (host, gpu.bus_id) for host, gpu in gpus)
        if sharing:
            return f"{_ranks(sharing)} use parts of one GPU (MIG), which NCCL does not allow"
        lacking = [rank for rank, one in enumerate(capabilities) if not one.has_nccl]
        if lacking:
            return f"TensorFlow has no NCCL on {_ranks(lacking)}"
        versions = {one.nccl: rank for rank, one in enumerate(capabilities) if one.nccl}
        if len(versions) > 1:
            texts = (f"{_version(nccl)} on rank {rank}" for nccl, rank in versions.items())
            return f"NCCL differs: {', '.join(texts)}; {SAME_VERSIONS}"
    obstacle = next((one.obstacle for one in capabilities if one.obstacle), "")
    if not obstacle:
        return ""
    same = [rank for rank, one in enumerate(capabilities) if one.obstacle == obstacle]
    return f"{obstacle} on {_ranks(same)}"


def _sharing(users: Iterable[Hashable]) -> list[int]:
    """Return the ranks whose entry equals the entry of another rank. Ignore empty entries."""
    entries = list(users)
    counts = Counter(entries)
    return [rank for rank, entry in enumerate(entries) if entry and counts[entry] > 1]


def _version(nccl: int) -> str:
    """Return a version of NCCL since 2.9 as text: 22705 becomes 2.27.5."""
    return f"{nccl // 10_000}.{nccl // 100 % 100}.{nccl % 100}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
