"""Horovod's functions that broadcast and gather parameters, optimizer states and objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdtrain.compat.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.compat.horovod.torch.call_queue import calls
from hvdtrain.compat.horovod.torch.exchanges import broadcast_, broadcast_async_
from hvdtrain.compat.horovod.torch.operations import synchronize
from hvdtrain.errors import ConfigurationError

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Copy the parameters of ``root_rank`` to all ranks.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
        root_rank: Rank whose values are used.
        process_set: Participating ranks. Defaults to all ranks.

    Raises:
        MismatchError: If names, shapes or types differ between ranks.
        ValueError: If ``params`` contains no tensors.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, torch.Tensor)):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError(
            f"params must be a dict or an iterable of tensors, got {type(params).__name__}."
        )
    handles = [
        broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    if named and not handles:
        raise ValueError(f"params must contain tensors, got {type(named[0][1]).__name__}.")
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Copy the state and options of the optimizer on ``root_rank`` to all ranks.

    Only the optimizer on ``root_rank`` needs to have a state. Nothing is sent as a pickle.

    Args:
        optimizer: Optimizer with the same parameters in the same order on all ranks.
        root_rank: Rank whose state is used.
        model: Ignored.

    Raises:
        ConfigurationError: If the state contains values other than tensors, numbers, strings, lists
            and None.
        ValueError: If the optimizer is ``torch.optim.LBFGS``.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("torch.optim.LBFGS can't be broadcast, because its state is not regular.")
    root = global_process_set.group_rank(root_rank)
    is_root = global_process_set.collectives().rank == root
    state = optimizer.state_dict()
    sizes = [len(group["params"]) for group in state["param_groups"]]
    tensors: list[torch.Tensor] = []
    text = json.dumps(None)
    if is_root:
        try:
            text = json.dumps(_flatten(state, tensors))
        except TypeError as error:
            text = json.dumps(f"The state of {type(optimizer).__name__} can't be sent: {error}.")
    label = f"optimizer with {sizes} parameters"
    received = calls.run(
        lambda: global_process_set.collectives().broadcast_object(text, root, name=label)
    )
    structure = json.loads(received)
    if isinstance(structure, str):
        raise ConfigurationError(structure)
    if is_root:
        for number, tensor in enumerate(tensors):
            broadcast_(tensor, root_rank, f"tensor {number} of the optimizer")
        return
    counter: list[int] = []

    def receive(shape: list[int], dtype: str) -> torch.Tensor:
        counter.append(0)
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        return broadcast_(tensor, root_rank, f"tensor {len(counter) - 1} of the optimizer")

    optimizer.load_state_dict(_restore(structure, receive))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank`` on every rank.

    The object is sent as a pickle, so use this only if you trust all ranks.

    Args:
        obj: Any object that can be pickled. Only the object of ``root_rank`` is used.
        root_rank: Rank whose object is returned.
        name: Name for error messages, which must be the same on all ranks.
        process_set: Participating ranks. Defaults to all ranks.
    """
    root = process_set.group_rank(root_rank)
    return calls.run(
        lambda: process_set.collectives().broadcast_object(
            obj, root, name=name or "object", codec="pickle"
        )
    )


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks in rank order.

    The arguments are the same as for ``broadcast_object``.
    """
    return calls.run(
        lambda: process_set.collectives().allgather_object(
            obj, name=name or "object", codec="pickle"
        )
    )


def _flatten(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Describe nested values as JSON, and append the tensors among them to a list.

    A dict, list or tuple becomes a list that starts with the name of its kind, such as ``"dict"``.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", list(value.shape), str(value.dtype).removeprefix("torch.")]
    if isinstance(value, Mapping):
        return ["dict", *([key, _flatten(entry, tensors)] for key, entry in value.items())]
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, *(_flatten(entry, tensors) for entry in value)]
    if value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"it contains a {type(value).__name__}")
    return value


def _restore(value: Any, receive: Any) -> Any:
    """Return the values that ``_flatten`` has described, with tensors from ``receive``."""
    if not isinstance(value, list):
        return value
    kind, *entries = value
    if kind == "tensor":
        return receive(*entries)
    if kind == "dict":
        return {key: _restore(entry, receive) for key, entry in entries}
    values = [_restore(entry, receive) for entry in entries]
    return tuple(values) if kind == "tuple" else values
