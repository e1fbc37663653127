"""Horovod's queries of the job and the installation."""

from __future__ import annotations

import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.compat.horovod.build_info import cross_ranks


@pytest.mark.ranks(1, 3)
def test_queries_of_a_job_on_one_host(world):
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == (hvd.size() > 1)
    assert hvd.mpi_threads_supported() == (hvd.size() > 1)
    for built in (hvd.gloo_built, hvd.gloo_enabled, hvd.ddl_built, hvd.ccl_built):
        assert not built()
    assert hvd.nccl_built() == (hvd.cuda_built() or hvd.rocm_built())


@pytest.mark.ranks(1, 3)
def test_tensors_that_hold_ranks_and_sizes(world, in_mode):
    queries = [
        hvd.rank_op,
        hvd.local_rank_op,
        hvd.size_op,
        hvd.local_size_op,
        hvd.process_set_included_op,
    ]
    results = in_mode(lambda: [query() for query in queries])()
    rank, size = hvd.rank(), hvd.size()
    assert [int(value) for value in results] == [rank, rank, size, size, 1]
    assert all(value.dtype == tf.int32 for value in results)


def test_cross_ranks_of_hosts_with_different_numbers_of_ranks():
    ranks = [cross_ranks((0, 0, 1, 0, 1), rank) for rank in range(5)]
    assert ranks == [[0, 2], [1, 4], [0, 2], [3], [1, 4]]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"hvdtrain\.tensorflow.*broadcast_hook"):
        _ = hvd.broadcast_hook
