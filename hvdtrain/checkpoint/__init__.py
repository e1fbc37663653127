"""Atomic checkpoints on disk.

``Store`` writes a ``Snapshot`` and reads the newest intact one. docs/checkpoints.md describes the
files, which can be opened without hvdtrain.
"""

from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.store import Store

__all__ = ["Snapshot", "Store"]
