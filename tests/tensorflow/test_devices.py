"""The assignment of GPUs to ranks. These tests need no GPUs."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.log import configure_log
from hvdtrain.tensorflow.devices import assign_gpus, bind, visible_gpus

HOST_A = ["GPU-a0", "GPU-a1", "GPU-a2", "GPU-a3"]
HOST_B = ["GPU-b0", "GPU-b1"]

CASES = {
    "alone-without": ([[]], [None]),
    "alone-with-many": ([HOST_A], [0]),
    "mpirun-all-visible": ([HOST_A] * 4, [0, 1, 2, 3]),
    "fewer-ranks-than-gpus": ([HOST_A] * 2, [0, 1]),
    "uneven-hosts": ([HOST_A] * 3 + [HOST_B] * 2, [0, 1, 2, 0, 1]),
    "ranks-placed-round-robin": ([HOST_A, HOST_B] * 2, [0, 0, 1, 1]),
    "one-each-by-slurm": ([["GPU-a0"], ["GPU-a1"], ["GPU-b0"], ["GPU-b1"]], [0, 0, 0, 0]),
    "two-each-by-slurm": ([HOST_A[:2], HOST_A[2:]], [0, 0]),
    "nearest-first": ([["GPU-a0", "GPU-a1"], ["GPU-a1", "GPU-a0"]], [0, 0]),
    "some-hosts-without": ([HOST_B, HOST_B, [], []], [0, 1, None, None]),
}


@pytest.mark.parametrize(("visible", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("share", [False, True])
def test_each_rank_gets_its_own_gpu(visible, expected, share: bool) -> None:
    indices = [() if index is None else (index,) for index in expected]
    assert assign_gpus(visible, share=share) == indices


TOO_MANY = {
    "one-gpu": ([["GPU-a0"]] * 2, 1, [0, 0]),
    "five-on-two": ([HOST_B] * 5, 2, [0, 1, 0, 1, 0]),
    "second-host": ([HOST_A] * 2 + [["GPU-b0"]] * 2, 3, [0, 1, 0, 0]),
}


@pytest.mark.parametrize(("visible", "rank", "shared"), TOO_MANY.values(), ids=TOO_MANY)
def test_more_ranks_than_gpus(visible, rank: int, shared: list[int]) -> None:
    with pytest.raises(LaunchError, match=rf"rank {rank} sees .*HVDTRAIN_SHARE_GPUS=1") as raised:
        assign_gpus(visible, share=False)
    assert visible[rank][0] in str(raised.value)
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


needs_no_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@needs_no_gpu
def test_without_gpus_there_are_no_ids() -> None:
    assert visible_gpus("host", {"CUDA_VISIBLE_DEVICES": "0,1"}) == []


def report(visible: list[list[str]], rank: int = 0, log_level: str = "info") -> None:
    topology = Topology(rank=rank, size=len(visible), local_rank=rank, local_size=len(visible))
    configure_log(log_level)
    bind(topology, Settings(), visible)


def test_only_the_chief_reports_missing_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], []], rank=1)
    report([[], []], log_level="warning")
    assert capsys.readouterr().err == ""
    report([[], []])
    assert capsys.readouterr().err == "hvdtrain: no GPU found; computing on the CPU\n"


def test_ranks_without_a_gpu_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], ["GPU-b0"], []])
    assert (
        "2 of 3 ranks run without a GPU and slow down the others: 0, 2" in capsys.readouterr().err
    )


PARALLEL_OPERATIONS = """
import os, threading
import numpy as np, tensorflow as tf
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ.pop("TF_NUM_INTEROP_THREADS", None)
if rank == 1:
    os.environ["TF_NUM_INTEROP_THREADS"] = "1"
if rank == 2:
    tf.config.threading.set_inter_op_parallelism_threads(3)
import hvdtrain
hvdtrain.init()
started = [threading.Event(), threading.Event()]

def meet(number):
    started[number].set()
    return np.bool_(started[1 - number].wait(5))

@tf.function
def both(first, second):
    # Stateless operations may run in parallel.
    return [tf.numpy_function(meet, [n], tf.bool, stateful=False) for n in (first, second)]

met = all(value.numpy() for value in both(tf.constant(0), tf.constant(1)))
print(rank, met, tf.config.threading.get_inter_op_parallelism_threads(), flush=True)
"""


@pytest.mark.parametrize(
    ("bucket_bytes", "lines"),
    [("100000", ["0 True 2", "1 False 0", "2 True 3"]), ("0", ["0 False 0"])],
)
def test_a_rank_with_one_core_computes_during_buckets(
    launch, bucket_bytes: str, lines: list[str]
) -> None:
    done = launch(
        len(lines), PARALLEL_OPERATIONS, env={"HVDTRAIN_BUCKET_BYTES": bucket_bytes}, timeout_s=100
    )
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, lines), done
