"""Collectives within process sets, and invalid process sets."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.compat.horovod.process_sets import find_process_set
from hvdtrain.errors import ConfigurationError, MismatchError

three = pytest.mark.ranks(3)


@pytest.fixture
def ends():
    """The process set of the first and the last of three ranks."""
    hvd.init()
    process_set = hvd.add_process_set([2, 0])
    yield process_set
    hvd.remove_process_set(process_set)


@three
def test_membership(ends):
    rank = hvd.rank()
    assert (ends.ranks, ends.process_set_id, ends.size()) == ([0, 2], 1, 2)
    assert ends.included() == (rank != 1)
    if rank != 1:
        assert ends.rank() == [0, None, 1][rank]
    everyone = hvd.global_process_set
    assert (everyone.ranks, everyone.size(), everyone.rank()) == ([0, 1, 2], 3, rank)
    assert everyone.included()
    assert [int(hvd.size_op(number)) for number in (0, 1)] == [3, 2]
    assert int(hvd.process_set_included_op(1)) == (rank != 1)


@three
def test_every_collective(ends, in_mode):
    """Meanwhile, the rank that is not in the set does something else."""

    def call_all(x: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.IndexedSlices(x[tf.newaxis], tf.constant([0]), tf.constant([3, 2]))
        return {
            "allreduce": hvd.allreduce(x, op=hvd.Sum, process_set=ends),
            "average": hvd.allreduce(x, process_set=ends),
            "rows": tf.convert_to_tensor(hvd.allreduce(rows, process_set=ends)),
            "grouped": hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Max, process_set=ends)[1],
            "allgather": hvd.allgather(x, process_set=ends),
            "grouped_allgather": hvd.grouped_allgather([x, x], process_set=ends)[1],
            "broadcast": hvd.broadcast(x, 2, process_set=ends),
            "alltoall": hvd.alltoall(x, process_set=ends),
            "splits": hvd.alltoall(x, [1, 1], process_set=ends)[1],
            "reducescatter": hvd.reducescatter(x, op=hvd.Sum, process_set=ends),
        }

    rank = hvd.rank()
    if rank != 1:
        x = tf.constant([rank + 1.0, 10.0 * rank])
        results = in_mode(call_all)(x)
        group_rank = [0, None, 1][rank]
        expected = {
            "allreduce": [4, 20],
            "average": [2, 10],
            "rows": [[2, 10], [0, 0], [0, 0]],
            "grouped": [6, 40],
            "allgather": [1, 0, 3, 20],
            "grouped_allgather": [1, 0, 3, 20],
            "broadcast": [3, 20],
            "alltoall": [[1, 3], [0, 20]][group_rank],
            "splits": [1, 1],
            "reducescatter": [[4], [20]][group_rank],
        }
        for name, value in expected.items():
            np.testing.assert_array_equal(results[name], value, err_msg=name)
        assert hvd.broadcast_object({"rank": rank}, 2, process_set=ends) == {"rank": 2}
        assert hvd.allgather_object(rank, process_set=ends) == [0, 2]
        variable = tf.Variable([float(rank)])
        hvd.broadcast_variables([variable], 2, process_set=ends)
        assert float(variable[0]) == 2
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum), [3.0, 3.0])


@three
def test_gradients(ends):
    if hvd.rank() == 1:
        return
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape(persistent=True) as tape:
        total = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, process_set=ends) ** 2)
        gathered = tf.reduce_sum(hvd.allgather(x, process_set=ends) ** 2)
        received = tf.reduce_sum(hvd.broadcast(x, 2, process_set=ends))
    np.testing.assert_allclose(tape.gradient(total, x), [8.0, 16.0])
    np.testing.assert_allclose(tape.gradient(gathered, x), [2.0, 4.0])
    np.testing.assert_allclose(tape.gradient(received, x), [float(hvd.rank() == 2)] * 2)


@three
def test_invalid_process_sets(ends):
    with pytest.raises(ValueError, match=r"process set of ranks \[0, 2\] already exists"):
        hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="already"):
        hvd.add_process_set([0, 1, 2])
    with pytest.raises(ConfigurationError, match="distinct ranks between 0 and 2, got"):
        hvd.add_process_set([1, 3])
    with pytest.raises(ValueError, match="must be ranks or an mpi4py communicator"):
        hvd.ProcessSet(["one"])
    with pytest.raises(ValueError, match="must be ranks or an mpi4py communicator"):
        hvd.ProcessSet(1.5)
    with pytest.raises(ConfigurationError, match="process_set_id 7 is unknown"):
        find_process_set(7)
    if hvd.rank() == 1:
        with pytest.raises(ConfigurationError, match="does not include rank 1, which called"):
            hvd.allreduce(tf.ones(2), process_set=ends)
    else:
        with pytest.raises(ConfigurationError, match=r"ProcessSet\(.*\) does not include rank 1\."):
            hvd.broadcast(tf.ones(2), 1, process_set=ends)


@three
def test_adding_and_removing(world):
    later = hvd.ProcessSet([1])
    assert (later.process_set_id, later.size(), later.rank()) == (None, None, None)
    with pytest.raises(ConfigurationError, match="is not usable"):
        hvd.allreduce(tf.ones(2), process_set=later)
    hvd.add_process_set(later)
    assert later.size() == 1
    assert hvd.remove_process_set(later)
    assert later.size() is None
    assert not hvd.remove_process_set(later)
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.add_process_set(later).process_set_id == 1
    hvd.remove_process_set(later)


@three
def test_init_with_process_sets(world):
    hvd.shutdown()
    first, other = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2])
    hvd.init(process_sets=[first, other])
    assert (first.process_set_id, other.process_set_id) == (1, 2)
    if first.included():
        assert int(hvd.allreduce(tf.constant(1), op=hvd.Sum, process_set=first)) == 2
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert first.size() is None
    assert hvd.add_process_set(first).process_set_id == 1
    hvd.remove_process_set(first)
    with pytest.raises(ConfigurationError, match="comm must be None"):
        hvd.init([0, 1])
    with pytest.raises(ConfigurationError, match="got 'static'"):
        hvd.init(process_sets="static")


@three
def test_mpi4py_communicator(world):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Split(hvd.rank() // 2, -hvd.rank())
    assert hvd.ProcessSet(comm).ranks == ([2] if hvd.rank() == 2 else [0, 1])


@three
def test_adding_different_process_sets_is_an_error(world):
    with pytest.raises(MismatchError, match="subset"):
        hvd.add_process_set([0] if hvd.rank() == 2 else [1])
    assert hvd.remove_process_set(hvd.add_process_set([0]))
