"""Functions that serialize the rows of sparse gradients.

Values, indices and the weight of a rank are exchanged in one operation. With two operations, a rank
could be lost after sending its values, but before sending the indices of these values.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["pack_rows", "unpack_rows"]

# Index that marks the row with the rank's weight.
_WEIGHT = -1


def pack_rows(values: np.ndarray, indices: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Serialize n rows, their indices of shape (n,), and the scalar weight of this rank.

    Returns:
        A uint8 array of shape (n + 1, m), where m is the number of bytes of a row and its index.
    """
    width = math.prod(values.shape[1:])
    table = np.empty((len(values) + 1, width), values.dtype)
    table[:-1] = values.reshape(len(values), width)
    table[-1] = weight
    labels = np.append(indices, np.array(_WEIGHT, indices.dtype)).astype(indices.dtype)
    return np.concatenate([_bytes(table), _bytes(labels[:, np.newaxis])], axis=1)


def unpack_rows(
    joined: np.ndarray, values: np.ndarray, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Deserialize the concatenated rows of several ranks.

    ``values`` and ``indices`` are this rank's own arrays. They provide dtypes and shape.

    Returns:
        The values and indices of all ranks, and the weight of each rank.
    """
    item = indices.dtype.itemsize
    labels = np.ascontiguousarray(joined[:, -item:]).view(indices.dtype)[:, 0]
    width = math.prod(values.shape[1:])
    table = np.ascontiguousarray(joined[:, :-item]).view(values.dtype).reshape(-1, width)
    is_weight = labels == _WEIGHT
    rows = table[~is_weight].reshape(-1, *values.shape[1:])
    return rows, labels[~is_weight], table[is_weight][:, 0].astype(np.float64)


def _bytes(table: np.ndarray) -> np.ndarray:
    return table.view(np.uint8).reshape(len(table), -1)
