"""Who and where this process is: pure functions and frozen values, no TensorFlow, no MPI."""

from __future__ import annotations

from hvdtrain.cluster.topology import Topology, read_topology

__all__ = ["Topology", "read_topology"]
