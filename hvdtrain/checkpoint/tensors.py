"""Arrays in safetensors files, bit by bit, without a second copy in memory."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from hvdtrain.errors import CheckpointError

__all__ = ["check_arrays", "read_tensors", "write_tensors"]

# The types that safetensors' NumPy and TensorFlow front ends both read.
_READ_BY_ALL = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 bfloat16 "
    "complex64"
)
_PLAIN = frozenset(_READ_BY_ALL.split())

# The others are stored as numbers of their size, and the file's metadata says what they are:
# float8 has a name in the format, but NumPy's front end fails on it.
_NOTE = "hvdtrain.dtypes"
_SMALL = (
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 uint4 int2 uint2"
)
_VIEWED: dict[str, tuple[np.dtype, np.dtype]] = {
    **{
        name: (np.dtype(getattr(ml_dtypes, name)), np.dtype(np.uint8))
        for name in _SMALL.split()
        if hasattr(ml_dtypes, name)
    },
    "complex128": (np.dtype(np.complex128), np.dtype(np.float64)),
}

_RESERVED = "__metadata__"


def check_arrays(arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Refuse what ``write_tensors`` can't write.

    Raises:
        CheckpointError: A name or a type can't be stored.
    """
    for name, array in arrays.items():
        if type(name) is not str or name == _RESERVED or not _is_text(name):
            raise CheckpointError(
                f"{where} has an array called {name!r}; expected a str of valid Unicode other "
                f"than {_RESERVED!r}. Rename it."
            )
        if not isinstance(array, (np.ndarray, np.generic)):
            raise CheckpointError(
                f"{where}[{name!r}] is {type(array).__name__}; expected a NumPy array. Convert it "
                "with numpy.asarray."
            )
        if array.dtype.name not in _PLAIN and array.dtype.name not in _VIEWED:
            raise CheckpointError(
                f"{where}[{name!r}] has the type {array.dtype}, which a checkpoint can't store; "
                "expected bool, integers, float or complex numbers. Convert it, or put it into "
                "the snapshot's state."
            )


def write_tensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write the arrays from where they lie; only those that aren't contiguous are copied.

    Raises:
        OSError: The file can't be written.
    """
    stored, notes = {}, {}
    for name, array in arrays.items():
        stored[name], note = _storable(array)
        if note:
            notes[name] = note
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in stored.items()
    }
    metadata = {_NOTE: json.dumps(notes)} if notes else None
    try:
        serialize_file(specs, path, metadata=metadata)
    except SafetensorError as error:
        # The library tells the number of the system's error in its text only.
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise OSError(f"{path.name}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that ``write_tensors`` wrote.

    Raises:
        ValueError: It is no such file.
    """
    try:
        # Not mapped: a failing disk is to be an error, not a signal.
        with safe_open(path, framework="np", backend="pread") as file:
            notes = json.loads((file.metadata() or {}).get(_NOTE, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {name: _restored(array, notes.get(name)) for name, array in arrays.items()}
    except (SafetensorError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"it can't be read as safetensors: {error}") from error


def _storable(array: np.ndarray) -> tuple[np.ndarray, str | None]:
    """The array as the format takes it, and the name of its type if that is another."""
    # Not ascontiguousarray, which gives scalars an axis.
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    if array.dtype.name in _PLAIN:
        return array, None
    dtype, stored = _VIEWED[array.dtype.name]
    if dtype.itemsize == stored.itemsize:
        return array.view(stored), dtype.name
    # Two numbers for one: in an axis of their own.
    return array.reshape((*array.shape, 1)).view(stored), dtype.name


def _restored(array: np.ndarray, name: str | None) -> np.ndarray:
    if name is None:
        return array
    if name not in _VIEWED:
        raise ValueError(f"this version knows no type {name!r}")
    dtype, stored = _VIEWED[name]
    if array.dtype != stored:
        raise ValueError(f"{name} is stored as {array.dtype}, not {stored}")
    if dtype.itemsize == stored.itemsize:
        return array.view(dtype)
    return array.view(dtype).reshape(array.shape[:-1])


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
