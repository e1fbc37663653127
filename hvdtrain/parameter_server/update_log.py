"""A file in which a parameter server writes down its updates, one JSON object a line.

It has what is needed to make the same updates again in one process: whose gradients went into each,
and with which weights they were computed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

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
        self._path = path
        self._file: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
        self._write(header)

    def __enter__(self) -> UpdateLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as failure:
                self._give_up(failure)

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
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(entry) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()
        print(
            f"hvdtrain: can't write updates to {self._path}: {error.strerror or error}. Training "
            "goes on without. Make room there, or name another folder (--update-log).",
            file=sys.stderr,
            flush=True,
        )
