"""The datasets that the TensorFlow backend reads."""

from __future__ import annotations

import pytest

from hvdtrain.data.partition import Position
from tests.trainer.data.ranks import shard_on_ranks
from tests.trainer.data.test_begin import kinds

pytestmark = pytest.mark.slow


@kinds
def test_deleting_an_iterator_doesnt_wait_for_autotuning(make, options) -> None:
    (share,) = shard_on_ranks(1, make, **options)
    datasets = [
        share.dataset,
        *(share.begin(Position(epoch=epoch, start=4 * epoch)).dataset for epoch in (0, 1)),
    ]
    assert [dataset.options().autotune.enabled for dataset in datasets] == [False] * 3
