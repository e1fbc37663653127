"""Snapshots whose content identifies the write that they come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdtrain.checkpoint import Snapshot
from hvdtrain.checkpoint.folders import find_complete

__all__ = ["check", "files", "flip", "same_bits", "saved_steps", "snapshot", "step_of"]


def step_of(write: int) -> int:
    """Return the step of a write. Some steps are written twice, as if training had resumed."""
    return write * 2 // 3


def snapshot(write: int, *, step: int | None = None, floats: int = 1000) -> Snapshot:
    """Return the snapshot of a write with ``floats`` weights."""
    rng = np.random.default_rng(write)
    return Snapshot(
        step=step_of(write) if step is None else step,
        state={"write": write, "floats": floats},
        model={"weights": rng.random(floats), "counter": np.array(write)},
        ranks={"rank/0/seed": rng.integers(0, 2**63, 2), "rank/1/seed": np.array([write])},
    )


def check(found: Snapshot) -> int:
    """Check that the whole snapshot comes from one write, and return the write's number."""
    write = found.state["write"]
    same_bits(found, snapshot(write, step=found.step, floats=found.state["floats"]))
    return write


def same_bits(one: Snapshot, other: Snapshot) -> None:
    assert (one.step, one.state) == (other.step, other.state)
    for first, second in ((one.model, other.model), (one.ranks, other.ranks)):
        assert first.keys() == second.keys()
        for name in first:
            shown = (first[name].dtype, first[name].shape, first[name].tobytes())
            assert shown == (second[name].dtype, second[name].shape, second[name].tobytes()), name


def files(directory: Path) -> list[str]:
    """Return the names in a directory except for the lock."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def saved_steps(directory: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a directory."""
    return sorted({folder.step for folder in find_complete(Path(directory))})


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)
