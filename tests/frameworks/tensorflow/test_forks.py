"""Results of collectives in forked child processes."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

ITEMS = 1 << 17


def _calls(tensor: tf.Tensor) -> dict[str, tf.Tensor]:
    return {
        "allreduce": hvd.allreduce(tensor, op=hvd.Sum),
        "grouped_allreduce": hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum)[1],
        "allgather": hvd.allgather(tensor),
        "broadcast": hvd.broadcast(tensor, 1),
        "reducescatter": hvd.reducescatter(tensor, op=hvd.Sum),
        "in a graph": tf.function(lambda value: hvd.allreduce(value, op=hvd.Sum))(tensor),
    }


@pytest.mark.ranks(2)
def test_results_in_a_forked_child(world) -> None:
    results = _calls(tf.fill([ITEMS], float(world.rank() + 1)))
    expected = {name: result.numpy().sum() for name, result in results.items()}
    assert expected["allreduce"] == 3 * ITEMS
    context = multiprocessing.get_context("fork")
    sums = context.SimpleQueue()
    child = context.Process(
        target=lambda: sums.put({name: np.sum(r.numpy()) for name, r in results.items()})
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert sums.get() == expected
