"""A file in which a parameter server writes down its updates, one JSON object a line.

It has what is needed to make the same updates again in one process: whose gradients went into each,
and with which weights they were computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from hvdtrain.monitor.journal import Journal

__all__ = ["Origin", "UpdateLog"]


class Origin(NamedTuple):
    """Where a gradient comes from.

    Attributes:
        worker: By rank.
        step: Which of that worker's pushes it is, from 0; the same on all servers.
        version: Of the weights that it was computed with.
        weight: What it counts for beside others of the same update.
    """

    worker: int
    step: int
    version: int
    weight: float


class UpdateLog:
    """Appends to a file. Training doesn't end when that fails: it is told once, and given up.

    Args:
        path: Folders above it are made.
        header: The first line, which tells one ``fit`` from the one before.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self._journal = Journal(path, "updates", "--update-log", mode="a")
        self._write(header)

    def __enter__(self) -> UpdateLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._journal.close()

    def update(
        self,
        version: int,
        gradients: Sequence[Origin],
        *,
        staleness: int,
        learning_rate: float,
        factor: float,
    ) -> None:
        """Note an update.

        Args:
            version: Of the weights that it made.
            gradients: What it was made of.
            staleness: Of the gradients.
            learning_rate: The optimizer's.
            factor: That it was multiplied with.
        """
        self._write(
            {
                "version": version,
                "staleness": staleness,
                "learning_rate": learning_rate,
                "factor": factor,
                "gradients": [origin._asdict() for origin in gradients],
            }
        )

    def late(self, gradient: Origin) -> None:
        """Note a gradient that came after its step, and went into no update."""
        self._write({"late": gradient._asdict()})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(entry) + "\n")
