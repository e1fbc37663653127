"""The sizes of the gradients that are averaged, compared with a real network."""

from __future__ import annotations

import math

from hvdtrain.bench.measure_allreduce import array_sizes, resnet50_shapes


def test_resnet50_has_160_variables_of_102_mb_without_biases() -> None:
    shapes = resnet50_shapes()
    assert sum(map(math.prod, shapes)) == 25_556_032
    assert len(shapes) == 160
    assert round(4 * 25_556_032 / 1e6) == 102


def test_sizes_grow_up_to_the_limit() -> None:
    assert array_sizes(4) == [4]
    assert array_sizes(1023) == [4, 16, 64, 256]
    assert array_sizes(256 << 20)[-1] == 256 << 20
