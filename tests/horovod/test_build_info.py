"""What Horovod's users ask: answered by what the job is."""

from __future__ import annotations

import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd
from hvdtrain.horovod.build_info import ranks_across


@pytest.mark.ranks(1, 3)
def test_the_job(world):
    """All ranks are on one host."""
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled() == (hvd.size() > 1)
    assert hvd.mpi_threads_supported() == (hvd.size() > 1)
    for built in (hvd.gloo_built, hvd.gloo_enabled, hvd.ddl_built, hvd.ccl_built):
        assert not built()
    assert hvd.nccl_built() == (hvd.cuda_built() or hvd.rocm_built())


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_when_the_graph_runs(world, compiled):
    def ask():
        return [
            hvd.rank_op(),
            hvd.local_rank_op(),
            hvd.size_op(),
            hvd.local_size_op(),
            hvd.process_set_included_op(),
        ]

    found = (tf.function(ask) if compiled else ask)()
    mine = hvd.rank()
    assert [int(value) for value in found] == [mine, mine, hvd.size(), hvd.size(), 1]
    assert all(value.dtype == tf.int32 for value in found)


def test_hosts_of_different_sizes():
    """Three ranks on one host, two on another."""
    across = [ranks_across((0, 0, 1, 0, 1), rank) for rank in range(5)]
    assert across == [[0, 2], [1, 4], [0, 2], [3], [1, 4]]


def test_a_name_that_there_is_not():
    with pytest.raises(AttributeError, match=r"hvdtrain\.tensorflow.*broadcast_hook"):
        _ = hvd.broadcast_hook
