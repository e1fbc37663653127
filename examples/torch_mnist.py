"""Train a PyTorch model on synthetic digits.

    python examples/torch_mnist.py                       # one process
    hvdtrain run -np 2 -- python examples/torch_mnist.py

Each digit is a fixed pattern with noise. ``batch-size`` is the number of images on each rank.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional

import hvdtrain.torch as hvd


def make_digits(count: int, seed: int) -> torch.utils.data.TensorDataset:
    """Return images of 28 by 28 pixels, and their labels."""
    patterns = torch.rand(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 28, 28, generator=generator)
    return torch.utils.data.TensorDataset(patterns[labels] + noise, labels)


def make_model() -> torch.nn.Module:
    """Return a small convolutional network."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 5, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 12 * 12, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def main() -> None:
    """Train, and print the test accuracy on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    arguments = parser.parse_args()

    hvd.init()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    digits = make_digits(4000, seed=1)
    sampler: torch.utils.data.DistributedSampler = torch.utils.data.DistributedSampler(
        digits, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(digits, arguments.batch_size, sampler=sampler)
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        mean = float(hvd.allreduce(loss.detach(), name="loss"))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}, loss = {mean:.3f}")

    images, labels = make_digits(1000, seed=2).tensors
    with torch.no_grad():
        correct = (model(images.to(device)).argmax(1).cpu() == labels).float().mean()
    if hvd.rank() == 0:
        print(f"test accuracy = {float(correct):.3f}")


if __name__ == "__main__":
    main()
