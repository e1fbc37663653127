"""The content of a checkpoint in memory, and its encoding as JSON and safetensors files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from hvdtrain.errors import CheckpointError

__all__ = [
    "Snapshot",
    "check_arrays",
    "decode_state",
    "encode_state",
    "read_arrays",
    "write_arrays",
]

# JSON lacks infinity and NaN, so they are written as objects such as {"$float": "inf"}.
_FLOAT = "$float"

# The types that safetensors can read into both NumPy and TensorFlow.
_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bfloat16", "complex64"),
)
# A value of another type is stored as a native type of the same size, or as two float64 numbers.
# The file's metadata contains the original type.
_METADATA_KEY = "hvdtrain.dtypes"
_BYTE_SIZED = (
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int4 uint4 int2 uint2"
)
_STORED_AS: dict[str, tuple[np.dtype, np.dtype]] = {
    name: (np.dtype(getattr(ml_dtypes, name)), np.dtype(np.uint8))
    for name in _BYTE_SIZED.split()
    if hasattr(ml_dtypes, name)
}
_STORED_AS["complex128"] = (np.dtype(np.complex128), np.dtype(np.float64))
_RESERVED = "__metadata__"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The complete state of a training after a step."""

    # The number of completed optimizer steps of the whole training. The name of the checkpoint
    # contains this number.
    step: int
    # JSON values, including infinity and NaN. Tuples are read back as lists.
    state: Mapping[str, Any]
    model: Mapping[str, np.ndarray]  # weights and optimizer variables by name
    # arrays that differ between ranks, with names such as ``rank/3/seed``
    ranks: Mapping[str, np.ndarray]


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Return the content of state.json.

    Raises:
        CheckpointError: If a value can't be stored as JSON.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"The state must be a dict, got {type(state).__name__}.")
    try:
        text = json.dumps(_to_json(state, "state"), allow_nan=False, indent=1)
    except RecursionError:
        raise CheckpointError(
            "The state is nested too deeply or contains itself. Make it flatter."
        ) from None
    return text.encode("ascii") + b"\n"


def decode_state(text: bytes) -> dict[str, Any]:
    """Return the state that ``encode_state`` encoded.

    Raises:
        ValueError: If the text is not valid.
    """
    try:
        state = json.loads(text, object_hook=_from_json)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(state, dict):
        raise ValueError("it is not a JSON object")
    return state


def _to_json(value: Any, path: str) -> Any:
    # Types must match exactly, because JSON would turn subclasses, such as NumPy's float64, into
    # their base classes.
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, (list, tuple)):
        return [_to_json(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str or key == _FLOAT:
                raise CheckpointError(
                    f"Keys of {path} must be strings other than {_FLOAT!r}, got {key!r} of type "
                    f"{type(key).__name__}. Rename or convert it."
                )
        return {key: _to_json(entry, f"{path}[{key!r}]") for key, entry in value.items()}
    raise CheckpointError(
        f"{path} must be None, bool, int, float, str, or a list or dict of these, got "
        f"{kind.__module__}.{kind.__qualname__}. Convert it, for example with float(), or store "
        "arrays in the snapshot's model or ranks."
    )


def _from_json(content: dict[str, Any]) -> Any:
    return float(str(content[_FLOAT])) if set(content) == {_FLOAT} else content


def check_arrays(arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Check that ``write_arrays`` can store the arrays.

    Raises:
        CheckpointError: If the name or the type of an array is not supported.
    """
    for name, array in arrays.items():
        is_text = type(name) is str and name.encode(errors="ignore").decode() == name
        if not is_text or name == _RESERVED:
            raise CheckpointError(
                f"The names of arrays in {where} must be valid Unicode other than {_RESERVED!r}, "
                f"got {name!r}; rename it."
            )
        if not isinstance(array, (np.ndarray, np.generic)):
            raise CheckpointError(
                f"{where}[{name!r}] must be a NumPy array, got {type(array).__name__}; convert it "
                "with numpy.asarray."
            )
        if array.dtype.name not in _NATIVE and array.dtype.name not in _STORED_AS:
            raise CheckpointError(
                f"{where}[{name!r}] must have a bool, integer, float or complex dtype, got "
                f"{array.dtype}; convert it, or store it in the snapshot's state."
            )


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a safetensors file. Contiguous arrays are not copied in memory.

    Raises:
        OSError: If the file can't be written.
    """
    stored, dtypes = {}, {}
    for name, array in arrays.items():
        # ascontiguousarray would turn scalars into vectors.
        array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
        if array.dtype.name in _STORED_AS:
            dtype, stored_dtype = _STORED_AS[array.dtype.name]
            dtypes[name] = dtype.name
            if dtype.itemsize != stored_dtype.itemsize:
                array = array.reshape((*array.shape, 1))  # two numbers for each value
            array = array.view(stored_dtype)
        stored[name] = array
    specs = {
        name: TensorSpec(
            dtype=array.dtype.name,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in stored.items()
    }
    try:
        serialize_file(
            specs, path, metadata={_METADATA_KEY: json.dumps(dtypes)} if dtypes else None
        )
    except SafetensorError as error:
        # The exception contains the error number only in its text.
        match = re.search(r"\(os error (\d+)\)", str(error))
        if match is None:
            raise OSError(f"{path.name}: {error}") from error
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a file that ``write_arrays`` wrote.

    Raises:
        ValueError: If the file is not valid.
        OSError: If the file can't be read.
    """
    try:
        # If the file were memory-mapped, a failing disk would cause SIGBUS instead of an exception.
        with safe_open(path, framework="np", backend="pread") as file:
            dtypes = json.loads((file.metadata() or {}).get(_METADATA_KEY, "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, dtype_name in dtypes.items():
            dtype, stored_dtype = _STORED_AS[dtype_name]
            array = arrays[name]
            if array.dtype != stored_dtype:
                raise ValueError(f"{dtype_name} is stored as {array.dtype}, not {stored_dtype}")
            shape = array.shape if dtype.itemsize == stored_dtype.itemsize else array.shape[:-1]
            arrays[name] = array.view(dtype).reshape(shape)
        return arrays
    except (SafetensorError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"it can't be read as safetensors: {error}") from error
