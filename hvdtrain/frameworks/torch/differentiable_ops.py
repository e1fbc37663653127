"""Differentiable operations of PyTorch that call collectives."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.collectives.engine import Engine
from hvdtrain.frameworks.rank_stack import RankStack
from hvdtrain.frameworks.torch.tensors import run_on_host

__all__ = ["stack_ranks"]


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stack: RankStack) -> torch.Tensor:
        ctx.stack, ctx.shape = stack, tensor.shape
        shape = (stack.rows, *tensor.shape)
        return run_on_host(lambda array: [stack.gather(array)], [tensor], [shape])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scatter = ctx.stack.scatter
        return run_on_host(lambda array: [scatter(array)], gradients, [ctx.shape])[0], None


@torch.compiler.disable
def stack_ranks(collectives: Engine, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Stack the tensors of all ranks along a new first axis, in rank order."""
    return _Stack.apply(tensor, RankStack(collectives, name))
