"""The search for a job's event files for TensorBoard; nobody says where, but there are signs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["find_event_folder"]

_EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\..*")
# Working directories may be whole homes: not all of them is looked through.
MOST_DEPTH = 6
MOST_ENTRIES = 20_000
MOST_S = 1.0


def find_event_folder(
    folder: str, program: Sequence[str], began_s: float, ended_s: float | None
) -> Path | None:
    """The folder below which a job's event files are; None where none is found.

    Those in folders that the program's arguments name come first, then those below its working
    directory that were begun while it ran, as their names tell.

    Args:
        folder: The job's working directory.
        program: The program with its arguments.
        began_s: When the job was asked for, in seconds since 1970.
        ended_s: When it ended; None if it has not.
    """
    budget = _Budget()
    found = [parent for named in _named(folder, program) for parent, _ in _walk(named, budget)]
    if not found:
        last_s = time.time() if ended_s is None else ended_s
        found = [
            parent
            for parent, begun_s in _walk(Path(folder), budget)
            # Names have whole seconds.
            if began_s - 1 <= begun_s <= last_s
        ]
    return Path(os.path.commonpath(found)) if found else None


class _Budget:
    """The budget of a search: how many entries may still be looked at, and until when."""

    def __init__(self) -> None:
        self._entries = MOST_ENTRIES
        self._until = time.monotonic() + MOST_S

    def take(self) -> bool:
        """Take one entry off the budget; return whether it may still be looked at."""
        self._entries -= 1
        return self._entries >= 0 and time.monotonic() < self._until


def _named(folder: str, program: Sequence[str]) -> Iterator[Path]:
    """Folders that arguments name, as ``--run-dir runs/a`` and ``--run-dir=runs/a`` do."""
    here = Path(folder)
    for word in program[1:]:
        text = word.partition("=")[2] if word.startswith("-") else word
        path = here / text
        try:
            # One that the working directory is in tells nothing.
            if text and path.is_dir() and not here.is_relative_to(os.path.normpath(path)):
                yield path
        except (OSError, ValueError):
            # Some words can be no paths.
            continue


def _walk(folder: Path, budget: _Budget, depth: int = 0) -> Iterator[tuple[Path, int]]:
    """Folders in which event files are, and when those were begun, in seconds since 1970."""
    below = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not budget.take():
                    return
                if found := _EVENT_FILE.fullmatch(entry.name):
                    yield folder, int(found[1])
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    below.append(entry.name)
    except OSError:
        # Not everybody's folders can be read.
        return
    if depth < MOST_DEPTH:
        for name in sorted(below):
            yield from _walk(folder / name, budget, depth + 1)
