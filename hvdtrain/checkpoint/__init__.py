"""Atomic checkpoints on disk.

``Store`` writes a ``Snapshot``, and reads the newest snapshot that is intact. The files can be
opened without hvdtrain; docs/checkpoints.md describes them.
"""

from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.store import Store

__all__ = ["Snapshot", "Store"]
