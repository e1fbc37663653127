"""Operations of a ``tf.data`` pipeline that don't work, or not alike, on several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.private_api.tensorflow import (
    cache_file,
    function_graphs,
    parts_of,
    variant_of,
    yields_in_any_order,
)

__all__ = ["cache_files", "unordered_operations"]

_IGNORE_EXTERNAL_STATE = 1  # ExternalStatePolicy of tf.data: the graph never leaves the process
_UNORDERED = {"deterministic": b"false", "sloppy": True}


def cache_files(dataset: Any) -> list[str]:
    """Return the files that ``Dataset.cache`` would write.

    Complete files, which are only read, are left out, and so are file names that a function of the
    pipeline computes from its elements.
    """
    names = set()
    for part in _all_parts(dataset):
        names.add(cache_file(part))
        for nodes in _function_bodies(part):
            names |= _cached_by_operations(nodes)
    paths = [name if "://" in name else os.path.abspath(name) for name in names if name]
    return sorted(path for path in paths if not tf.io.gfile.exists(f"{path}.index"))


def unordered_operations(dataset: Any) -> list[str]:
    """Return the kinds of datasets that were made with ``deterministic=False``.

    That argument counts more than ``tf.data.Options.deterministic``, which hvdtrain sets.
    """
    found = set()
    for part in _all_parts(dataset):
        kind = type(part).__name__
        unordered = yields_in_any_order(part)
        if unordered is None and ("Interleave" in kind or "Parallel" in kind):
            unordered = any(map(_is_unordered, _graph_of(part).node))
        if unordered:
            found.add(_plain(kind))
        for nodes in _function_bodies(part):
            found |= {_plain(node.op) for node in nodes if _is_unordered(node)}
    return sorted(found)


def _plain(kind: str) -> str:
    return kind.strip("_").split("Dataset")[0]


def _all_parts(dataset: Any) -> Iterator[Any]:
    yield dataset
    for part in parts_of(dataset):
        yield from _all_parts(part)


def _function_bodies(dataset: Any) -> Iterator[Any]:
    """Return the ``NodeDef`` messages of each function of a dataset, and of those that it calls."""
    for graph in function_graphs(dataset):
        definition = graph.as_graph_def()
        yield definition.node
        yield from (function.node_def for function in definition.library.function)


def _cached_by_operations(nodes: Iterable[Any]) -> set[str]:
    constants = {node.name: node.attr["value"].tensor for node in nodes if node.op == "Const"}
    names = set()
    for node in nodes:
        name = constants.get(node.input[1].split(":")[0]) if "CacheDataset" in node.op else None
        if name is not None:
            names.add(tf.make_ndarray(name).item().decode())
    return names


def _is_unordered(node: Any) -> bool:
    if "Interleave" not in node.op and "Parallel" not in node.op:
        return False
    return any(
        name in node.attr and value in (node.attr[name].s, node.attr[name].b)
        for name, value in _UNORDERED.items()
    )


def _graph_of(dataset: Any) -> Any:
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=variant_of(dataset), external_state_policy=_IGNORE_EXTERNAL_STATE
    )
    return tf.compat.v1.GraphDef.FromString(graph.numpy())
