"""Checkpoints on disk: what training was at one moment, written so that nothing can spoil it.

``Store`` writes a ``Snapshot`` and finds the newest one again. docs/checkpoints.md describes the
files, which open without hvdtrain.
"""

from hvdtrain.checkpoint.snapshot import Snapshot
from hvdtrain.checkpoint.store import Store

__all__ = ["Snapshot", "Store"]
