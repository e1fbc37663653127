"""Files of one JSON object a line, which a process may be killed in the middle of writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "append_json_line",
    "append_whole",
    "estimated_lines",
    "last_json_line",
    "newest_json_lines",
    "read_json_lines",
    "sampled_json_lines",
]

# Longer than most lines are.
_LAST_BYTES = 16 << 10


def append_json_line(path: Path, content: Mapping[str, Any]) -> None:
    """Add ``content`` to the end of a file, as a whole or not at all.

    Raises:
        OSError: It can't be written, for instance because the disk is full.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        append_whole(descriptor, json.dumps(content, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)


def append_whole(descriptor: int, data: bytes) -> int:
    """Add lines to the end of an open file, as a whole or not at all; returns its new size.

    The file has one writer. If an earlier one was killed within a line, that line is ended first.

    Raises:
        OSError: They can't be written; the file is as it was before.
    """
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    done = 0
    try:
        while done < len(data):
            done += os.write(descriptor, data[done:])
    except OSError:
        # Making a file shorter needs no space.
        os.ftruncate(descriptor, size)
        raise
    return size + done


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file, without what is no whole line of it; none where there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if (content := _object(line)) is not None:
                yield content


def estimated_lines(path: Path) -> int:
    """About how many lines a file has, by the length of its first ones; 0 for no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        begin = file.read(_LAST_BYTES)
        size = os.fstat(file.fileno()).st_size
    return size * begin.count(b"\n") // max(1, len(begin))


def last_json_line(path: Path) -> dict[str, Any]:
    """The last object in a file, without reading all of it; empty where there is none."""
    return next(_backwards(path), {})


def newest_json_lines(path: Path) -> list[dict[str, Any]]:
    """The last objects of a file, as many as 16 KiB hold, and at least one if there is any."""
    return list(_backwards(path))[::-1]


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        span = _LAST_BYTES
        found = False
        while not found:
            file.seek(max(0, size - span))
            for line in reversed(file.read(span).splitlines()):
                if (content := _object(line)) is not None:
                    found = True
                    yield content
            if span >= size:
                return
            span *= 8


def sampled_json_lines(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """About so many objects of a file, in their order; of a long file only as much is read.

    The first and the last are among them.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return
    if size <= most * _LAST_BYTES // 16:
        rows = list(read_json_lines(path))
        step = max(1, -(-len(rows) // max(1, most)))
        yield from rows[::step]
        if len(rows) % step != 1 and step > 1:
            yield rows[-1]
        return
    before = None
    with path.open("rb") as file:
        for number in range(most):
            begin = size * number // most
            file.seek(max(0, begin - 1))
            if begin:
                # The line that begins earlier.
                file.readline()
            found = _object(file.readline())
            if found is not None and found != before:
                yield found
                before = found
    if (last := last_json_line(path)) != before:
        yield last


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
