"""Start, watch and stop jobs; no TensorFlow, no MPI."""

from __future__ import annotations

__all__: list[str] = []
