"""Files that several processes share: JSON that is replaced as a whole, rows of JSON, and locks.

A file of rows holds one JSON object per line. It has one writer, which may be killed within a line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

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
_LAST_BYTES = 16 << 10

_Content = TypeVar("_Content")


def from_json(kind: type[_Content], content: Any) -> _Content:
    """Return a dataclass from the JSON of ``asdict``; fields of later versions are left out.

    Raises:
        JobError: A field is missing or has another type.
    """
    if not isinstance(content, dict):
        raise JobError(f"{content!r} is not a JSON object.")
    types = _types_of(kind)  # type: ignore[arg-type]
    values = {name: _value(name, types[name], content[name]) for name in types if name in content}
    try:
        return kind(**values)
    except TypeError as error:
        raise JobError(f"it is not complete: {error}") from None


class _Type(NamedTuple):
    """The type of a field: ``hint`` or ``hint | None``."""

    hint: Any
    origin: Any
    arguments: Sequence[Any]
    is_optional: bool
    is_dataclass: bool


@functools.lru_cache
def _types_of(kind: type) -> Mapping[str, _Type]:
    types = {}
    for name, hint in get_type_hints(kind).items():
        is_optional = type(None) in get_args(hint)
        own = get_args(hint)[0] if is_optional else hint
        origin, arguments = get_origin(own) or own, get_args(own)
        types[name] = _Type(own, origin, arguments, is_optional, is_dataclass(own))
    return types


def _value(name: str, kind: _Type, value: Any) -> Any:
    """Return the value of a field, whose type is checked."""
    if kind.is_optional and value is None:
        return None
    if kind.is_dataclass:
        return from_json(kind.hint, value)
    if kind.origin is Literal:
        fits = value in kind.arguments
    elif kind.origin is tuple:
        fits = isinstance(value, list) and all(isinstance(v, kind.arguments[0]) for v in value)
    elif kind.origin is Mapping:
        fits = isinstance(value, dict)
        fits = fits and all(isinstance(v, kind.arguments[1]) for v in value.values())
    else:
        fits = isinstance(value, (int, float) if kind.origin is float else kind.origin)
    if not fits:
        expected = kind.hint.__name__ if isinstance(kind.hint, type) else kind.hint
        raise JobError(f"{name} is {value!r}, expected {expected}. Submit the job again.")
    return tuple(value) if kind.origin is tuple else value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file with a JSON object, as a whole or not at all.

    Raises:
        OSError: It can't be written; the file is unchanged.
    """
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
    """Append a row, as a whole or not at all.

    Raises:
        OSError: It can't be written, for instance because the disk is full.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        append_whole(descriptor, json.dumps(content, separators=(",", ":")).encode() + b"\n")
    finally:
        os.close(descriptor)


def append_whole(descriptor: int, data: bytes) -> int:
    """Append lines to an open file, as a whole or not at all; return its new size.

    If an earlier writer was killed within a line, that line is ended first.

    Raises:
        OSError: They can't be written; the file is unchanged.
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
    """Yield all rows of a file, without lines that are not whole; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from filter(None, map(_object, file))


def last_json_line(path: Path) -> dict[str, Any]:
    """Return the last row of a file, without reading all of it; empty if there is none."""
    return next(_backwards(path), {})


def newest_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the last rows of a file: those within 16 KiB, and at least one if there is any."""
    return list(_backwards(path))[::-1]


def _backwards(path: Path) -> Iterator[dict[str, Any]]:
    size, span, found = size_of(path), _LAST_BYTES, False
    while size and not found:
        with path.open("rb") as file:
            file.seek(max(0, size - span))
            lines = file.read(span).splitlines()
        for content in filter(None, map(_object, reversed(lines))):
            found = True
            yield content
        if span >= size:
            return
        span *= 8


def sampled_json_lines(path: Path, most: int) -> Iterator[dict[str, Any]]:
    """Yield about ``most`` rows of a file in order, without reading all of a long file.

    The first and the last row are among them.
    """
    size = size_of(path)
    if size <= most * _LAST_BYTES // 16:
        rows = list(read_json_lines(path))
        step = max(1, -(-len(rows) // max(1, most)))
        yield from rows[::step]
        if (len(rows) - 1) % step:
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
            row = _object(file.readline())
            if row is not None and row != before:
                yield row
                before = row
    if (last := last_json_line(path)) != before:
        yield last


def _object(line: bytes) -> dict[str, Any] | None:
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
    """Lock an open file; return False if another open file holds the lock.

    The kernel releases the lock when the process ends, however it does.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[int | None]:
    """Hold the lock on a file, which is created if missing; yield None if somebody else holds it.

    Raises:
        OSError: The file can't be opened, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor if lock_descriptor(descriptor) else None
    finally:
        os.close(descriptor)
