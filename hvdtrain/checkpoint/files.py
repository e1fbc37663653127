"""The files of a checkpoint: on the disk when a call returns, and checked when they are read.

manifest.json has the size and the checksum of each of the others.
"""

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
    "encode_manifest",
    "file_facts",
    "make_folders",
    "read_manifest",
    "read_regular",
    "reason",
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
# Python threads pass the interpreter on every 5 ms: with small pieces this thread would wait for
# its turn longer than it works.
_PIECE_BYTES = 16 * 1024 * 1024

_REMEDY = {
    errno.ENOSPC: "Free space there, or name a directory on another disk",
    errno.EDQUOT: "Free space within your quota, or name a directory elsewhere",
    errno.EROFS: "Name a directory that can be written to",
    errno.EACCES: "Allow writing there, or name a directory of your own",
    errno.EPERM: "Allow writing there, or name a directory of your own",
    errno.ENOTDIR: "Name a directory, not a file",
    errno.EEXIST: "Name a directory, not a file",
    errno.ETIMEDOUT: "Try again later",
    errno.EIO: "Have the disk checked, or name a directory on another one",
}

# Of each file of a checkpoint: its size in bytes, and its SHA-256 in hexadecimal digits.
Manifest = Mapping[str, tuple[int, str]]


class DamagedError(Exception):
    """A checkpoint isn't what was written; the text says how."""


def encode_manifest(step: int, manifest: Manifest) -> bytes:
    """Return the text of manifest.json."""
    files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in manifest.items()}
    content = {"format": _FORMAT, "step": step, "files": files}
    return json.dumps(content, indent=1).encode("ascii") + b"\n"


def file_facts(path: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file as it is now, read piece by piece.

    Raises:
        DamagedError: It is not a regular file.
        OSError: It can't be read.
    """
    digest = hashlib.sha256()
    total = 0
    with _open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        piece = memoryview(bytearray(max(1, min(_PIECE_BYTES, size))))
        while count := file.readinto(piece):
            digest.update(piece[:count])
            total += count
    return total, digest.hexdigest()


def read_manifest(folder: Path, step: int) -> Manifest:
    """Read the manifest of the checkpoint of this step.

    Raises:
        DamagedError: It isn't one.
        CheckpointError: A newer hvdtrain wrote it.
        OSError: It can't be read.
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
            f"Checkpoint {folder} has format {version}; this hvdtrain reads up to {_FORMAT}. "
            "Update hvdtrain, or name another directory."
        )
    if content.get("step") != step or type(content["step"]) is not int:
        raise DamagedError(f"{MANIFEST} is of step {content.get('step')!r}, not {step}")
    files = content.get("files")
    try:
        return {name: (int(files[name]["bytes"]), files[name]["sha256"]) for name in FILES}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise DamagedError(f"{MANIFEST} lacks size or checksum of {', '.join(FILES)}") from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of the files; reads none of them.

    Raises:
        DamagedError: A file is missing or has another size.
        OSError: The folder can't be read.
    """
    for name in FILES:
        try:
            status = (folder / name).lstat()
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{name} is not a regular file")
        size, _ = manifest[name]
        if status.st_size != size:
            raise DamagedError(f"{name} has {status.st_size} bytes, its manifest says {size}")


def check_contents(folder: Path, manifest: Manifest) -> None:
    """Compare sizes and checksums; reads every file.

    Raises:
        DamagedError: A file isn't what was written.
        OSError: A file can't be read.
    """
    check_sizes(folder, manifest)
    for name in FILES:
        if file_facts(folder / name) != manifest[name]:
            raise DamagedError(f"{name} has another checksum than its manifest says")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read the content of a regular file of at most ``most_bytes``.

    Raises:
        DamagedError: It is missing, no regular file, or larger.
        OSError: It can't be read.
    """
    with _open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise DamagedError(f"{path.name} has more than {most_bytes} bytes")
    return content


def _open_regular(path: Path) -> io.FileIO:
    """Open a file, but neither where a link leads nor a pipe that would wait for a writer."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    if not stat.S_ISREG(mode):
        raise DamagedError(f"{path.name} is not a regular file")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return io.FileIO(os.open(path, flags))


def reason(error: OSError) -> str:
    """The system's words and a remedy, as two sentences without the last full stop."""
    words = error.strerror or str(error)
    remedy = _REMEDY.get(error.errno or 0, "Remove the cause, or name another directory")
    where = f" ({os.fsdecode(error.filename)})" if error.filename is not None else ""
    return f"{words}{where}. {remedy}"


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders; their names are the server's care.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Make a file with this content."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def make_folders(path: Path) -> None:
    """Make the folder, and those above it that aren't there."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        # Another process was quicker, or it is a file.
        if not path.is_dir():
            raise
    sync(path.parent)
