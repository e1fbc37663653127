"""The binding of ranks to GPUs, with a fake driver."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdtrain.cluster.gpu_assignment import RankGpus
from hvdtrain.cluster.gpus import Gpu
from hvdtrain.cluster.topology import Topology
from hvdtrain.config import Settings
from hvdtrain.log import configure_log
from hvdtrain.tensorflow.devices import bind, find_gpus

needs_no_gpu = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@needs_no_gpu
def test_without_gpus_there_are_no_ids() -> None:
    assert find_gpus(Topology(), {"CUDA_VISIBLE_DEVICES": "0,1"}).visible == []
    assert find_gpus(Topology(), {}, needed=False).visible is None


def report(visible: list[list[Gpu] | None], rank: int = 0, log_level: str = "info") -> None:
    topology = Topology(rank=rank, size=len(visible), local_rank=rank, local_size=len(visible))
    configure_log(log_level)
    bind(topology, Settings(), [RankGpus(hostname="a", pid=1, visible=one) for one in visible])


def test_only_the_chief_reports_missing_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], []], rank=1)
    report([[], []], log_level="warning")
    assert capsys.readouterr().err == ""
    report([[], []])
    assert capsys.readouterr().err == "hvdtrain: no GPU found; computing on the CPU\n"


def test_ranks_without_a_gpu_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report([[], [Gpu("GPU-b0")], []])
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
