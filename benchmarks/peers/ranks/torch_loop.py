"""Training with a PyTorch loop: one process, DistributedDataParallel with Gloo, or hvdtrain."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from peers.ranks.clocks import StepClock, figures_of
from peers.ranks.torch_group import join

__all__ = ["measure"]

SEED = 7
CLASSES = 10


def measure(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure samples per second of the loop and memory, after a warm-up."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rank, size = _join_hvdtrain() if job["library"] == "hvdtrain.torch" else join(job)
    clock = StepClock(rank, job)
    results: dict[str, Any] = {"versions": {"torch": torch.__version__}, "ranks": size}
    for name, (batch, steps) in job["models"].items():
        make, shape = MODELS[name]
        torch.manual_seed(SEED)
        model = make()
        if distributed.is_initialized():
            model = nn.parallel.DistributedDataParallel(model)
        generator = np.random.default_rng(SEED)
        x = torch.from_numpy(generator.random((batch * steps, *shape), np.float32))
        y = torch.from_numpy(generator.integers(0, CLASSES, len(x)))
        optimizer = torch.optim.SGD(model.parameters(), 0.001)
        if size > 1 and not distributed.is_initialized():
            optimizer = _distribute(optimizer, model)
        _run(model, optimizer, x, y, batch, job["warmup_steps"], clock.step_ended)
        start_s = time.perf_counter()
        _run(model, optimizer, x, y, batch, steps, lambda: None)
        results |= figures_of(name, len(x) * size, time.perf_counter() - start_s)
    if distributed.is_initialized():
        distributed.destroy_process_group()
    return {**results, **clock.figures()} if rank == 0 else None


def _join_hvdtrain() -> tuple[int, int]:
    import hvdtrain.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


def _distribute(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    import hvdtrain.torch as hvd

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def _run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    batch: int,
    steps: int,
    step_ended: Callable[[], None],
) -> None:
    loss_of = nn.CrossEntropyLoss()
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss_of(model(x[rows]), y[rows]).backward()
        optimizer.step()
        step_ended()


def _lenet() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 7 * 7, 512), nn.ReLU(), nn.Linear(512, CLASSES)),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()),
        nn.Linear(4096, CLASSES),
    )


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, CLASSES))


# The small models of hvdtrain.bench.models, with the shape of a sample.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (_lenet, (1, 28, 28)),
    "mlp": (_mlp, (784,)),
    "small": (_small, (32,)),
}
