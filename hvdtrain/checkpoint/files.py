"""Durable files, and the manifest that lists their sizes and checksums."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.errors import CheckpointError

__all__ = [
    "FILES",
    "MANIFEST",
    "MODEL",
    "RANKS",
    "STATE",
    "DamagedError",
    "Manifest",
    "check_contents",
    "check_sizes",
    "describe_error",
    "encode_manifest",
    "make_folders",
    "read_manifest",
    "read_regular",
    "size_and_digest",
    "sync",
    "write_file",
]

MANIFEST = "manifest.json"
MODEL = "model.safetensors"
RANKS = "ranks.safetensors"
STATE = "state.json"
FILES = (MODEL, RANKS, STATE)

_FORMAT = 1
_MANIFEST_BYTES = 64 * 1024
# Chunks are large because this thread may wait 5 ms for Python's global lock after each of them.
_CHUNK_BYTES = 16 * 1024 * 1024

_WRITABLE = "Grant write permission, or choose another directory"
_NOT_A_FILE = "Choose a directory, not a file"
_REMEDIES = {
    errno.ENOSPC: "Free some space, or choose a directory on another disk",
    errno.EDQUOT: "Free some space within your quota, or choose another directory",
    errno.EROFS: "Choose a writable directory",
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.ENOTDIR: _NOT_A_FILE,
    errno.EEXIST: _NOT_A_FILE,
    errno.ETIMEDOUT: "Try again later",
    errno.EIO: "Check the disk, or choose a directory on another one",
}

# Maps each file name to the file's size in bytes and its hexadecimal SHA-256 digest.
Manifest = Mapping[str, tuple[int, str]]


class DamagedError(Exception):
    """A checkpoint is incomplete or has changed since it was written."""


def encode_manifest(step: int, manifest: Manifest) -> bytes:
    """Return the content of manifest.json."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in manifest.items()}
    content = {"format": _FORMAT, "step": step, "files": files}
    return json.dumps(content, indent=1).encode("ascii") + b"\n"


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: If the manifest is not valid or belongs to a different step.
        CheckpointError: If a newer version of hvdtrain wrote it.
    """
    text = read_regular(folder / MANIFEST, _MANIFEST_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedError(f"{MANIFEST} is not valid JSON") from None
    version = content.get("format") if isinstance(content, dict) else None
    if type(version) is not int or version < 1:
        raise DamagedError(f"{MANIFEST} lacks a format version")
    if version > _FORMAT:
        raise CheckpointError(
            f"Checkpoint {folder} has format {version}, but this version of hvdtrain supports "
            f"formats up to {_FORMAT}. Update hvdtrain, or choose another directory."
        )
    if content.get("step") != step or type(content["step"]) is not int:
        raise DamagedError(f"{MANIFEST} belongs to step {content.get('step')!r}, not {step}")
    files = content.get("files")
    try:
        return {name: (int(files[name]["bytes"]), files[name]["sha256"]) for name in FILES}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedError(
            f"{MANIFEST} lacks the size or checksum of {', '.join(FILES[:-1])} or {FILES[-1]}"
        ) from None


def size_and_digest(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 digest of a regular file."""
    digest = hashlib.sha256()
    total = 0
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        chunk = memoryview(bytearray(max(1, min(_CHUNK_BYTES, size))))
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            total += count
    return total, digest.hexdigest()


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the file sizes with the manifest, without reading the files.

    Raises:
        DamagedError: If a file is missing or has a different size.
    """
    for name in FILES:
        size, expected = _regular_size(folder / name), manifest[name][0]
        if size != expected:
            raise DamagedError(f"{name} has {size} bytes, expected {expected}")


def check_contents(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes and checksums of all files with the manifest.

    Raises:
        DamagedError: If a file is missing or doesn't match the manifest.
    """
    check_sizes(folder, manifest)
    for name in FILES:
        if size_and_digest(folder / name) != manifest[name]:
            raise DamagedError(f"{name} has a wrong checksum")


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file of at most ``limit_bytes``.

    Raises:
        DamagedError: If the file is missing, larger than the limit, or not a regular file.
    """
    with _open_regular(path) as file:
        content = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise DamagedError(f"{path.name} has more than {limit_bytes} bytes")
    return content


def _open_regular(path: Path) -> io.FileIO:
    """Open a file, but don't follow a symbolic link or wait for the writer of a named pipe."""
    _regular_size(path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return io.FileIO(os.open(path, flags))


def _regular_size(path: Path) -> int:
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError(f"{path.name} is not a regular file")
    return status.st_size


def describe_error(error: OSError) -> str:
    """Return the system's error message and a remedy, without a full stop at the end."""
    remedy = _REMEDIES.get(error.errno or 0, "Fix the cause, or choose another directory")
    path = f" ({os.fsdecode(error.filename)})" if error.filename is not None else ""
    return f"{error.strerror or error}{path}. {remedy}"


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems don't support fsync on folders. Their servers flush entries.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Create a file and flush it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, and flush their entries to the disk."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        # Another process may have created it, or it is a file.
        if not path.is_dir():
            raise
    sync(path.parent)
