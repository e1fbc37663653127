"""Collectives between ranks on NumPy arrays, without TensorFlow.

``create`` chooses the transport: ``single`` for one process, ``shared_memory`` if ranks share a
host, otherwise ``mpi``. ``HVDTRAIN_COLLECTIVES`` overrides the choice.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType

from hvdtrain.cluster.topology import Topology
from hvdtrain.collectives.engine import Engine, single_engine
from hvdtrain.config import Settings

__all__ = ["Engine", "create", "single_engine"]

logger = logging.getLogger(__name__)


def create(topology: Topology, settings: Settings) -> Engine:
    """Create the engine of this process.

    All ranks must call this.

    Raises:
        LaunchError: If MPI can't be loaded, or if the ranks that it reports differ from
            ``topology``.
    """
    if topology.size == 1:
        return single_engine()
    from hvdtrain.collectives.mpi import MpiTransport
    from hvdtrain.collectives.mpi_start import start_mpi
    from hvdtrain.collectives.shared_memory import SharedMemoryTransport

    mpi = start_mpi(topology, timeout_s=settings.timeout_s)
    world = mpi.COMM_WORLD
    host = world.Split_type(mpi.COMM_TYPE_SHARED, topology.rank)
    kind = settings.collectives
    if kind == "auto":
        most_ranks_on_a_host = world.allreduce(host.Get_size(), mpi.MAX)
        kind = "shared_memory" if most_ranks_on_a_host > 1 else "mpi"
    transport = SharedMemoryTransport if kind == "shared_memory" else MpiTransport
    survives = settings.tolerates_lost_ranks and _survives(mpi, topology, settings)
    min_np = settings.min_np if survives else None
    return Engine(
        transport(
            mpi,
            world,
            host,
            settings.chunk_bytes,
            settings.timeout_s,
            min_np,
            bucket_bytes=settings.bucket_bytes,
        )
    )


def _survives(mpi: ModuleType, topology: Topology, settings: Settings) -> bool:
    """Return whether ranks can continue after a loss. If not, the chief logs the reason."""
    from hvdtrain.collectives.mpi_start import why_not_elastic

    reason = why_not_elastic(mpi, os.environ)
    if reason and topology.is_chief and settings.elastic:
        logger.warning(
            "HVDTRAIN_ELASTIC=1 has no effect, so a rank that dies ends the job: %s", reason
        )
    return not reason
