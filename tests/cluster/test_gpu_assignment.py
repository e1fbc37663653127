"""The assignment of GPUs to ranks, and warnings about them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hvdtrain.cluster.gpu_assignment import RankGpus, assign_gpus, describe_sharing, gpu_warnings
from hvdtrain.cluster.gpus import Gpu, GpuState
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


def test_more_ranks_than_parts_of_a_gpu() -> None:
    part = Gpu("MIG-0", "0000:3B:00.0", "NVIDIA A100 MIG 3g.20gb", 20 << 30)
    assert assign_gpus([[part], [part._replace(id="MIG-1")]], share=False) == [(0,), (0,)]
    with pytest.raises(LaunchError, match=r"rank 1 sees 1 GPU, .*CUDA_VISIBLE_DEVICES=MIG-"):
        assign_gpus([[part], [part]], share=False)


def on(hostname: str, *gpus: Gpu, pid: int = 1, **fields) -> RankGpus:
    return RankGpus(hostname=hostname, pid=pid, visible=gpus, **fields)


def warnings(*ranks: RankGpus, share: bool = False) -> list[str]:
    # Other ranks see them through JSON.
    sent = json.dumps([dataclasses.asdict(one) for one in ranks])
    received = [RankGpus.from_json(values) for values in json.loads(sent)]
    return gpu_warnings(received, assign_gpus([one.visible for one in received], share=share))


def test_the_same_gpus_need_no_warning() -> None:
    slightly_more = B0._replace(memory_bytes=81 << 30)
    unknown = Gpu("host GPU 0")
    none = RankGpus(hostname="c", pid=1, visible=None)
    assert warnings(on("a", A0, A1), on("a", A0, A1), on("b", slightly_more), none) == []
    assert warnings(on("a", A0), on("b", unknown)) == []
    assert warnings(on("a"), on("b")) == [], "no rank has a GPU"


def test_gpus_of_different_models() -> None:
    small, other = B0._replace(memory_bytes=40 << 30), B1._replace(model="NVIDIA T4")
    (warning,) = warnings(on("a", A0, other), on("b", small), on("c", A2), on("d", other))
    assert warning == (
        "GPUs differ, and all ranks wait for the slowest: NVIDIA H100 (80 GiB) on a, c; "
        "NVIDIA H100 (40 GiB) on b; NVIDIA T4 (80 GiB) on d"
    )
    (warning,) = warnings(on("a", A0), on("b", B0._replace(memory_bytes=94 << 30)))
    assert "NVIDIA H100 (94 GiB) on b" in warning


def test_ranks_that_share_gpus() -> None:
    ranks = [on("a", A0, A1)] * 3 + [on("b", B0)]
    chosen = assign_gpus([one.visible for one in ranks], share=True)
    assert describe_sharing(ranks, chosen) == "ranks 0, 2 use GPU-a0 on a"
    assert describe_sharing(ranks[1:], chosen[1:]) == ""


def test_suspect_gpus_of_ranks() -> None:
    faulty = GpuState(number="0", id="GPU-a0", model="NVIDIA H100", faults=["2 errors"])
    used = GpuState(number="1", id="GPU-a1", processes=[(5, "python", 3 << 30), (7, "", 0)])
    ranks = [
        on("a", A0, A1, A2, pid=5, suspects=[faulty, used]),
        on("a", A0, A1, A2, pid=6, suspects=[faulty, used]),
        on("b", B0, pid=7),
    ]
    fault, use = warnings(*ranks)
    assert fault == (
        "on a, GPU 0 (NVIDIA H100, GPU-a0) is faulty: 2 errors. To fix this, when no process uses "
        "it, reset it with nvidia-smi --gpu-reset -i 0, or reboot the host; until then, leave it "
        "out with CUDA_VISIBLE_DEVICES; if errors return, replace it."
    )
    # Process 5 is rank 0. Process 7 of host a isn't rank 2, which is on host b.
    assert use.startswith("on a, GPU 1 (GPU-a1) is in use by process 7. To fix")
    assert "ps -fp 7" in use
    # No rank uses the second GPU of the host.
    (fault,) = warnings(ranks[0])
    assert "faulty" in fault


def test_unusable_gpus_are_reported_once() -> None:
    ranks = [on("a", obstacle="CUDA fails"), on("a", obstacle="CUDA fails"), on("b", B0)]
    missing, reason = warnings(*ranks)
    assert missing.startswith("2 of 3 ranks run without a GPU and slow down the others: 0, 1")
    assert reason == "a has GPUs, but CUDA fails"
