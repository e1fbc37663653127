"""The assignment of GPUs to ranks, and warnings about them."""

from __future__ import annotations

import pytest

from hvdtrain.cluster.gpu_assignment import assign_gpus
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.errors import LaunchError

A0, A1, A2, A3, B0, B1 = (
    Gpu(f"GPU-{name}", f"0000:0{name[1]}:00.0", "NVIDIA H100", 80 << 30)
    for name in ("a0", "a1", "a2", "a3", "b0", "b1")
)
HOST_A = [A0, A1, A2, A3]
HOST_B = [B0, B1]

CASES = {
    "alone-without": ([[]], [None]),
    "alone-with-many": ([HOST_A], [0]),
    "mpirun-all-visible": ([HOST_A] * 4, [0, 1, 2, 3]),
    "fewer-ranks-than-gpus": ([HOST_A] * 2, [0, 1]),
    "uneven-hosts": ([HOST_A] * 3 + [HOST_B] * 2, [0, 1, 2, 0, 1]),
    "ranks-placed-round-robin": ([HOST_A, HOST_B] * 2, [0, 0, 1, 1]),
    "one-each-by-slurm": ([[A0], [A1], [B0], [B1]], [0, 0, 0, 0]),
    "two-each-by-slurm": ([HOST_A[:2], HOST_A[2:]], [0, 0]),
    "nearest-first": ([[A0, A1], [A1, A0]], [0, 0]),
    "some-hosts-without": ([HOST_B, HOST_B, [], []], [0, 1, None, None]),
}


@pytest.mark.parametrize(("visible", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("share", [False, True])
def test_each_rank_gets_its_own_gpu(visible, expected, share: bool) -> None:
    indices = [() if index is None else (index,) for index in expected]
    assert assign_gpus(visible, share=share) == indices


TOO_MANY = {
    "one-gpu": ([[A0]] * 2, 1, [0, 0]),
    "five-on-two": ([HOST_B] * 5, 2, [0, 1, 0, 1, 0]),
    "second-host": ([HOST_A] * 2 + [[B0]] * 2, 3, [0, 1, 0, 0]),
}


@pytest.mark.parametrize(("visible", "rank", "shared"), TOO_MANY.values(), ids=TOO_MANY)
def test_more_ranks_than_gpus(visible, rank: int, shared: list[int]) -> None:
    with pytest.raises(LaunchError, match=rf"rank {rank} sees .*HVDTRAIN_SHARE_GPUS=1") as raised:
        assign_gpus(visible, share=False)
    assert visible[rank][0].id in str(raised.value)
    assert assign_gpus(visible, share=True) == [(index,) for index in shared]


PAIRS = {
    "mpirun-all-visible": ([HOST_A] * 2, False, [(0, 1), (2, 3)]),
    "two-hosts": ([HOST_A, HOST_B], False, [(0, 1), (0, 1)]),
    "two-each-by-slurm": ([HOST_A[:2], HOST_A[2:]], False, [(0, 1), (0, 1)]),
    "some-hosts-without": ([HOST_B, []], False, [(0, 1), ()]),
    "shared": ([HOST_A[:3]] * 2, True, [(0, 1), (0, 2)]),
}


@pytest.mark.parametrize(("visible", "share", "expected"), PAIRS.values(), ids=PAIRS)
def test_several_gpus_per_rank(visible, share: bool, expected) -> None:
    assert assign_gpus(visible, share=share, each=2) == expected


def test_too_few_gpus_for_several_per_rank() -> None:
    with pytest.raises(
        LaunchError, match=r"devices-per-rank 2: rank 1 sees 3 GPUs, .* \(GPU-a0: rank 0; "
    ):
        assign_gpus([HOST_A[:3]] * 2, share=False, each=2)
    for share in (False, True):
        with pytest.raises(
            LaunchError, match=r"Rank 1 sees 2 GPUs, .* 3 needs 3.*DEVICES_PER_RANK=2"
        ):
            assign_gpus([HOST_A, HOST_B], share=share, each=3)
