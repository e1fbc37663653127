"""Horovod's elastic training for PyTorch.

``hvdtrain.compat.horovod.elastic_state`` explains it with an example.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from hvdtrain import world
from hvdtrain.compat.horovod.elastic_state import ObjectState
from hvdtrain.compat.horovod.torch.broadcast import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = ["ElasticSampler", "TorchState"]


class ElasticSampler(torch.utils.data.Sampler):
    """Sampler that divides a dataset among the ranks.

    If ranks are lost, the sampler divides the remaining samples again.

    Pass the sampler to ``TorchState``. Call ``record_batch`` after each batch, and ``set_epoch`` at
    the end of each epoch. All ranks get the same number of samples. If the number of samples is not
    divisible by the number of ranks, some samples are repeated.

    Args:
        dataset: Dataset of a constant size.
        shuffle: Whether to shuffle the samples in each epoch.
        seed: Seed for shuffling, which must be the same on all ranks.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch with all samples."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that each rank has processed a batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue at the epoch and sample that ``state_dict`` returned."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the current ranks."""
        self.num_replicas, self.rank = world.size(), world.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        missing = self.total_size - len(self.remaining_indices)
        indices = self.remaining_indices + self.remaining_indices[:missing]
        return iter(indices[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """Training state that consists of models, optimizers, samplers and other attributes.

    Args:
        model: Model.
        optimizer: Optimizer.
        attributes: Attributes of the state and their initial values. Attributes that are modules,
            optimizers or an ``ElasticSampler`` are saved with their ``state_dict`` method.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **attributes: Any,
    ) -> None:
        kinds = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        every = {"model": model, "optimizer": optimizer, **attributes}
        self._stateful = {k: value for k, value in every.items() if isinstance(value, kinds)}
        for name, value in self._stateful.items():
            setattr(self, name, value)
        self._states: dict[str, Any] = {}
        super().__init__(**{k: v for k, v in every.items() if k not in self._stateful})
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_stateful", {}):
            self._stateful[name] = value

    def save(self) -> None:
        """Keep a copy of the state in memory, to which ``restore`` returns."""
        self._states = {
            name: copy.deepcopy(value.state_dict()) for name, value in self._stateful.items()
        }
        super().save()

    def restore(self) -> None:
        """Restore the state from the last copy."""
        for name, state in self._states.items():
            self._stateful[name].load_state_dict(copy.deepcopy(state))
        super().restore()

    def reset(self) -> None:
        """Divide the samples among the remaining ranks."""
        for value in self._stateful.values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def sync(self) -> None:
        """Replace the state of all ranks with the state of rank 0. All ranks must call this."""
        for value in self._stateful.values():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            else:
                value.load_state_dict(broadcast_object(value.state_dict(), name="sampler"))
        super().sync()
