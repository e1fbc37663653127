"""Differentiable operations of JAX that call collectives."""

from __future__ import annotations

from typing import Any

import jax

from hvdtrain.collectives.engine import Engine
from hvdtrain.frameworks.jax.tensors import run_on_host
from hvdtrain.frameworks.rank_stack import RankStack

__all__ = ["stack_ranks"]


def stack_ranks(collectives: Engine, tensor: jax.Array, name: str) -> jax.Array:
    """Stack the arrays of all ranks along a new first axis, in rank order."""
    operation = RankStack(collectives, name)

    @jax.custom_vjp
    def stack(value: jax.Array) -> jax.Array:
        shape = (operation.rows, *value.shape)
        return run_on_host(lambda array: [operation.gather(array)], [value], [shape])[0]

    def forward(value: jax.Array) -> tuple[jax.Array, Any]:
        return stack(value), None

    def backward(_: Any, gradient: jax.Array) -> tuple[jax.Array]:
        shape = gradient.shape[1:]
        return (run_on_host(lambda array: [operation.scatter(array)], [gradient], [shape])[0],)

    stack.defvjp(forward, backward)
    return stack(tensor)
