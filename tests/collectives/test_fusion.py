"""Arrangement of arrays in chunks, and reuse of buffers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdtrain.collectives.fusion import (
    ALIGNMENT_BYTES,
    BufferPool,
    Scratch,
    empty_outputs,
    pack,
    plan_fusion,
    split_evenly,
    unpack,
)

SHAPES = {
    "one": ((5,),),
    "scalars": ((), (), ()),
    "ends-with-a-chunk": ((4,), (4,)),
    "one-more": ((9,), (4,), (3, 3)),
    "empty-between": ((3,), (0, 7), (), (2, 2)),
    "larger-than-chunks": ((1,), (3, 7, 5), (2,)),
    "no-items": ((0,), (0, 3)),
}


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("chunk_items", [1, 4, 7, 1000])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_item_has_one_position(shapes, chunk_items: int, shares: int) -> None:
    layout = plan_fusion(shapes, 4, chunk_items, shares)
    sizes = [math.prod(shape) for shape in shapes]
    positions = [np.full(size, -1) for size in sizes]
    start = 0
    for chunk in layout.chunks:
        filled = 0
        for piece in chunk.pieces:
            assert piece.chunk_start == filled
            assert piece.chunk_stop - piece.chunk_start == piece.stop - piece.start > 0
            filled = piece.chunk_stop
            positions[piece.index][piece.start : piece.stop] = np.arange(
                start + piece.chunk_start, start + piece.chunk_stop
            )
        assert filled == chunk.items <= chunk_items
        items = [sum(piece.stop - piece.start for piece in share) for share in chunk.shares]
        assert items == [b - a for a, b in split_evenly(chunk.items, shares)]
        start += chunk.items
    assert np.concatenate(positions).tolist() == list(range(sum(sizes)))
    assert len(layout.chunks) == max(1, -(-sum(sizes) // chunk_items))


def test_unpack_restores_dtypes() -> None:
    arrays = [np.arange(5, dtype=np.float16), np.zeros(0, np.float16), np.arange(9.0, 12.0)]
    layout = plan_fusion(((5,), (0,), (3,)), 2, 6, shares=2)
    results = [np.full_like(array, -1) for array in arrays]
    for chunk in layout.chunks:
        buffer = np.empty(chunk.items, np.float32)
        pack(chunk.pieces, arrays, buffer)
        unpack(chunk.pieces, buffer, results)
    for array, result in zip(arrays, results):
        assert array.dtype == result.dtype
        assert array.tolist() == result.tolist()


def test_scratch_memory_grows_and_is_reused() -> None:
    scratch = Scratch()
    first = scratch.take("sums", np.dtype(np.float64), 10)
    assert first.shape == (10,)
    assert scratch.take("other", np.dtype(np.float64), 10).ctypes.data != first.ctypes.data
    assert scratch.take("sums", np.dtype(np.float16), 40).ctypes.data == first.ctypes.data
    assert scratch.take("sums", np.dtype(np.float64), 1000).shape == (1000,)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_outputs_are_aligned_and_do_not_overlap(dtype: str) -> None:
    shapes = ((3,), (), (0, 2), (5, 5), (1,))
    layout = plan_fusion(shapes, np.dtype(dtype).itemsize, 10)
    buffer = BufferPool().take(layout.output_bytes)
    arrays, flat = empty_outputs(buffer, layout, np.dtype(dtype))
    for index, (array, line) in enumerate(zip(arrays, flat)):
        assert array.shape == shapes[index]
        assert line.shape == (math.prod(shapes[index]),)
        assert array.ctypes.data % ALIGNMENT_BYTES == 0
        line[:] = index
    for index, array in enumerate(arrays):
        assert (array == index).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_split_evenly(parts: int) -> None:
    for items in range(23):
        ranges = split_evenly(items, parts)
        sizes = [stop - start for start, stop in ranges]
        assert [start for start, _ in ranges] == [0, *np.cumsum(sizes)[:-1]]
        assert ranges[-1][1] == items
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_the_pool_reuses_buffers_without_views() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    view = first.view(np.float32)[10:].reshape(-1, 10)
    second = pool.take(1000)
    assert not np.shares_memory(first, second)
    address = _address(first)
    del first
    assert _address(pool.take(1000)) != address, "a view still refers to it"
    del view
    assert _address(pool.take(1000)) == address


def test_the_pool_prefers_the_smallest_buffer_that_fits() -> None:
    pool = BufferPool()
    small, large = pool.take(100_000), pool.take(150_000)
    address = _address(small)
    del small, large
    assert _address(pool.take(90_000)) == address


def test_the_pool_does_not_use_large_buffers_for_small_results() -> None:
    pool = BufferPool()
    address = _address(pool.take(1_000_000))
    little = pool.take(10)
    assert _address(little) != address
    assert _address(pool.take(1_000_000)) == address


def test_the_pool_keeps_few_unused_buffers() -> None:
    pool = BufferPool(max_idle=2)
    held = [pool.take(size) for size in range(1000, 10_000_000, 1_000_000)]
    del held
    pool.take(50_000_000)
    assert len(pool._buffers) <= 3
