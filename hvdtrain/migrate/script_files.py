"""Scripts on the disk: read, and put in place with the original kept beside them."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from hvdtrain.errors import ConfigurationError

__all__ = ["read", "refuse_to_lose_originals", "write"]


def read(path: Path) -> bytes:
    """Read the bytes of a script.

    Raises:
        ConfigurationError: It can't be read, or isn't a script.
    """
    if path.suffix.lower() == ".ipynb":
        quoted = shlex.quote(str(path))
        raise ConfigurationError(
            f"it is a notebook; write it as a script (jupyter nbconvert --to script {quoted}), and "
            "migrate that"
        )
    try:
        return path.read_bytes()
    except IsADirectoryError as error:
        raise ConfigurationError(
            f"it can't be read: {error.strerror}; name the scripts in it, and write its notebooks "
            "(.ipynb) as scripts first: jupyter nbconvert --to script"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"it can't be read: {error.strerror}") from None


def _original_of(path: Path) -> Path:
    """Return where the original is kept; beside the file itself where the path is a link to it."""
    path = Path(os.path.realpath(path))
    return path.with_name(f"{path.name}.orig")


def refuse_to_lose_originals(paths: Iterable[Path]) -> None:
    """Make sure that no kept original is in the way of another.

    Raises:
        ConfigurationError: One is there already.
    """
    there = [str(_original_of(path)) for path in paths if os.path.lexists(_original_of(path))]
    if there:
        raise ConfigurationError(
            f"{', '.join(there)}: there already, and would be lost. Nothing was written. Move it "
            "away, or remove it."
        )


def write(path: Path, old: bytes, new: bytes) -> None:
    """Put ``new`` into the file, which is the old or the new one at every moment.

    Raises:
        ConfigurationError: The disk or the folder doesn't take it; the file is as it was.
    """
    target, original = Path(os.path.realpath(path)), _original_of(path)
    try:
        with original.open("xb") as file:
            try:
                _fill(file, old)
                shutil.copymode(target, original)
                _replace(target, new)
            except BaseException:
                original.unlink()
                raise
    except OSError as error:
        raise ConfigurationError(
            f"{path}: it can't be written: {error.strerror}. It is as it was."
        ) from None


def _replace(target: Path, new: bytes) -> None:
    """Write a file beside it, and give it the name when it is whole."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with open(descriptor, "wb") as file:
            _fill(file, new)
        shutil.copymode(target, name)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _fill(file: BinaryIO, content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())
