"""Horovod's batch normalization over the batches of all ranks."""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain import world
from hvdtrain.compat.horovod.reduction_arguments import Sum
from hvdtrain.compat.horovod.torch.reductions import allreduce

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance of the batches of all ranks.

    The arguments are the same as for ``torch.nn.BatchNorm2d``. Inputs must have at least two axes.
    Inputs may be on the CPU, and the number of rows may differ between ranks.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize a batch."""
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if not uses_batch or world.size() == 1:
            return super().forward(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor([values.numel() // max(1, values.size(1))])
        sums = allreduce(torch.cat([values.sum(axes), count]), op=Sum, name="batch norm sums")
        total = sums[-1].detach()
        mean = sums[:-1] / total
        centered = values - mean.view(shape)
        squares = allreduce(centered.square().sum(axes), op=Sum, name="batch norm squares")
        variance = squares / total
        if self.training and self.track_running_stats:
            self._track(mean.detach(), squares.detach() / (total - 1).clamp(min=1))
        result = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"input must have at least two axes, got {input.dim()}.")

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Update the running mean and variance of the layer."""
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)
