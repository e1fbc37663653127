"""How arrays are laid end to end and cut into chunks, and how buffers come back."""

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
    "nothing": ((0,), (0, 3)),
}


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("chunk_items", [1, 4, 7, 1000])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_every_item_lies_in_one_place(shapes, chunk_items: int, shares: int) -> None:
    layout = plan_fusion(shapes, 4, chunk_items, shares)
    items = [math.prod(shape) for shape in shapes]
    where = [np.full(count, -1) for count in items]
    position = 0
    for chunk in layout.chunks:
        filled = 0
        for piece in chunk.pieces:
            assert piece.chunk_start == filled
            assert piece.chunk_stop - piece.chunk_start == piece.stop - piece.start > 0
            filled = piece.chunk_stop
            where[piece.index][piece.start : piece.stop] = np.arange(
                position + piece.chunk_start, position + piece.chunk_stop
            )
        assert filled == chunk.items <= chunk_items
        sizes = [sum(piece.stop - piece.start for piece in share) for share in chunk.shares]
        assert sizes == [stop - start for start, stop in split_evenly(chunk.items, shares)]
        position += chunk.items
    assert np.concatenate(where).tolist() == list(range(sum(items)))
    assert len(layout.chunks) == max(1, -(-sum(items) // chunk_items))


def test_what_is_packed_comes_back_in_its_own_type() -> None:
    arrays = [np.arange(5, dtype=np.float16), np.zeros(0, np.float16), np.arange(9.0, 12.0)]
    layout = plan_fusion(((5,), (0,), (3,)), 2, 6, shares=2)
    back = [np.full_like(array, -1) for array in arrays]
    for chunk in layout.chunks:
        buffer = np.empty(chunk.items, np.float32)
        pack(chunk.pieces, arrays, buffer)
        unpack(chunk.pieces, buffer, back)
    for array, again in zip(arrays, back):
        assert array.dtype == again.dtype
        assert array.tolist() == again.tolist()


def test_working_memory_grows_and_stays() -> None:
    scratch = Scratch()
    first = scratch.take("sums", np.dtype(np.float64), 10)
    assert first.shape == (10,)
    assert scratch.take("other", np.dtype(np.float64), 10).ctypes.data != first.ctypes.data
    assert scratch.take("sums", np.dtype(np.float16), 40).ctypes.data == first.ctypes.data
    assert scratch.take("sums", np.dtype(np.float64), 1000).shape == (1000,)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float64"])
def test_outputs_are_aligned_and_apart(dtype: str) -> None:
    shapes = ((3,), (), (0, 2), (5, 5), (1,))
    kind = np.dtype(dtype)
    layout = plan_fusion(shapes, kind.itemsize, 10)
    arrays, flat = empty_outputs(BufferPool().take(layout.output_bytes), layout, kind)
    for index, (array, line) in enumerate(zip(arrays, flat)):
        assert array.shape == shapes[index]
        assert line.shape == (math.prod(shapes[index]),)
        assert array.ctypes.data % ALIGNMENT_BYTES == 0
        line[:] = index
    for index, array in enumerate(arrays):
        assert (array == index).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("items", [*range(20), 21, 22])
def test_even_shares(items: int, parts: int) -> None:
    shares = split_evenly(items, parts)
    sizes = [stop - start for start, stop in shares]
    assert [start for start, _ in shares] == [0, *np.cumsum(sizes)[:-1]]
    assert shares[-1][1] == items
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def _address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_pool_gives_out_what_nobody_holds() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    view = first.view(np.float32)[10:].reshape(-1, 10)
    second = pool.take(1000)
    assert not np.shares_memory(first, second)
    address = _address(first)
    del first
    assert _address(pool.take(1000)) != address, "a view still holds it"
    del view
    assert _address(pool.take(1000)) == address


def test_pool_prefers_the_smallest_that_fits() -> None:
    pool = BufferPool()
    small, large = pool.take(100_000), pool.take(150_000)
    address = _address(small)
    del small, large
    assert _address(pool.take(90_000)) == address


def test_pool_wastes_no_large_buffer_on_little() -> None:
    pool = BufferPool()
    address = _address(pool.take(1_000_000))
    little = pool.take(10)
    assert _address(little) != address
    assert _address(pool.take(1_000_000)) == address


def test_pool_keeps_few_idle_buffers() -> None:
    pool = BufferPool(max_idle=2)
    held = [pool.take(size) for size in range(1000, 10_000_000, 1_000_000)]
    del held
    pool.take(50_000_000)
    assert len(pool._buffers) <= 3
