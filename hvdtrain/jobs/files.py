"""Files shared between processes: JSON objects, JSON Lines, and locks.

A JSON Lines file has one writer, which may be killed while it writes a line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hvdtrain.errors import JobError

__all__ = [
    "append_json_line",
    "append_whole",
    "from_json",
    "last_json_line",
    "lock_descriptor",
    "newest_json_lines",
    "read_json_lines",
    "sampled_json_lines",
    "size_of",
    "try_lock",
    "write_json",
]

# Longer than most lines.
_TAIL_BYTES = 16 << 10

_Content = TypeVar("_Content")


def from_json(kind: type[_Content], content: Any) -> _Content:
    """Create a dataclass instance from a JSON object with its fields. Ignore unknown fields.

    Raises:
        JobError: If a field is missing or has the wrong type.
    """
    if not isinstance(content, dict):
        raise JobError(f"{content!r} is not a JSON object.")
    values = {
        name: _value(name, hint, content[name])
        for name, hint in _hints(kind).items()  # type: ignore[arg-type]
        if name in content
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise JobError(f"it is incomplete: {error}") from None


# Cached because a list of ten thousand jobs needs the hints hundreds of thousands of times.
@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


@functools.cache
def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the origin of a type hint and its arguments."""
    return get_origin(hint) or hint, get_args(hint)


def _value(name: str, hint: Any, value: Any) -> Any:
    """Check that a value fits the type hint of a field, and convert the value to that type."""
    origin, arguments = _split(hint)
    if type(None) in arguments:
        return None if value is None else _value(name, arguments[0], value)
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    if origin is Literal:
        is_valid = value in arguments
    elif origin is tuple:
        is_valid = isinstance(value, list) and all(isinstance(v, arguments[0]) for v in value)
    elif origin is Mapping:
        is_valid = isinstance(value, dict)
        is_valid = is_valid and all(isinstance(v, arguments[1]) for v in value.values())
    else:
        is_valid = isinstance(value, (int, float) if origin is float else origin)
    if not is_valid:
        expected = hint.__name__ if isinstance(hint, type) else hint
        raise JobError(f"{name} is {value!r}, expected {expected}. Submit the job again.")
    return tuple(value) if origin is tuple else value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically with a JSON object."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, 0o600), "w", encoding="ascii") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def append_json_line(path: Path, content: Mapping[str, Any]) -> None:
    """Append a row to a JSON Lines file, completely or not at all."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        append_whole(descriptor, json.dumps(content, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)


def append_whole(descriptor: int, data: bytes) -> int:
    """Append all lines to an open file, or none if that fails; return the file's new size.

    If a killed writer has left an incomplete last line, that line is terminated first.
    """
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        data = b"\n" + data
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        # Truncating works on a full disk.
        os.ftruncate(descriptor, size)
        raise
    return size + written


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, skipping incomplete lines. A missing file is treated as empty."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from filter(None, map(_parse_row, file))


def last_json_line(path: Path) -> dict[str, Any]:
    """Return the last row without reading the whole file; ``{}`` if the file is empty."""
    return next(_read_backwards(path), {})


def newest_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the last 16 KiB of a file, and at least one row if the file has any."""
    return list(_read_backwards(path))[::-1]


def _read_backwards(path: Path) -> Iterator[dict[str, Any]]:
    size, tail, is_found = size_of(path), _TAIL_BYTES, False
    while size and not is_found:
        with path.open("rb") as file:
            file.seek(max(0, size - tail))
            lines = file.read(tail).splitlines()
        for row in filter(None, map(_parse_row, reversed(lines))):
            is_found = True
            yield row
        if tail >= size:
            return
        tail *= 8


def sampled_json_lines(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """Yield about ``most`` rows in order, with the first and last, from a sample of a long file."""
    size = size_of(path)
    if size <= most * _TAIL_BYTES // 16:
        rows = list(read_json_lines(path))
        step = max(1, -(-len(rows) // max(1, most)))
        yield from rows[::step]
        if (len(rows) - 1) % step:
            yield rows[-1]
        return
    previous = None
    with path.open("rb") as file:
        for number in range(most):
            begin = size * number // most
            file.seek(max(0, begin - 1))
            if begin:
                # Skip the rest of the line that starts before this position.
                file.readline()
            row = _parse_row(file.readline())
            if row is not None and row != previous:
                yield row
                previous = row
    if (last := last_json_line(path)) != previous:
        yield last


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def lock_descriptor(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another lock already exists."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try to lock a file, which is created if missing, and yield whether that succeeded."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield lock_descriptor(descriptor)
    finally:
        os.close(descriptor)
