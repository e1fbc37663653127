"""Horovod's collectives on PyTorch tensors: values, gradients, handles and errors."""

from __future__ import annotations

# ruff: noqa: F821


def reductions():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
        tensor = torch.arange(6).reshape(2, 3).to(dtype) + rank
        every = [torch.arange(6).reshape(2, 3) + other for other in range(size)]
        total = sum(every).to(dtype)
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), total), dtype
        assert torch.equal(hvd.allreduce(tensor, op=hvd.Max), every[-1].to(dtype))
        strided = tensor.t()
        assert hvd.allreduce_(strided, op=hvd.Sum) is strided
        assert torch.equal(tensor, total), "a view of the tensor was changed in place"
    mixed = [torch.ones(2) * rank, torch.ones(3, dtype=torch.float64) * rank]
    for value in hvd.grouped_allreduce(mixed, prescale_factor=4.0, postscale_factor=0.5):
        assert torch.equal(value, torch.full_like(value, size - 1))
    sent = hvd.allreduce(torch.tensor([1.0 + 2**-20]), compression=hvd.Compression.fp16)
    assert sent.dtype == torch.float32
    assert sent == 1.0
    share = hvd.reducescatter(torch.arange(3.0) + rank, op=hvd.Sum)
    rows = [2, 1] if size == 2 else [3]
    assert share.shape == (rows[rank],)
    entries = torch.sparse_coo_tensor([[rank]], [2.0], (4,))
    dense = hvd.sparse_allreduce_async(entries, "entries")().to_dense()
    assert torch.equal(dense, torch.tensor([1.0, 1.0, 0, 0]) if size == 2 else entries.to_dense())


def exchanges():
    rows = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    assert torch.equal(rows[:, 0], torch.tensor([0.0, 1.0, 1.0][: rows.shape[0]]))
    tensor = torch.full((3,), float(rank))
    assert torch.equal(hvd.broadcast(tensor, size - 1), torch.full((3,), size - 1.0))
    assert tensor[0] == rank
    hvd.broadcast_(tensor, 0)
    assert tensor[0] == 0
    rows, received = hvd.alltoall(torch.arange(3) + 10 * rank, [1, 2] if size == 2 else [3])
    if size == 2:
        assert rows.tolist() == ([0, 10] if rank == 0 else [1, 2, 11, 12])
        assert received.tolist() == [rank + 1] * 2
    assert hvd.broadcast_object({"of": rank}, size - 1) == {"of": size - 1}
    assert hvd.allgather_object(rank) == list(range(size))
    hvd.barrier()


def gradients():
    def gradient(function, value):
        value = value.clone().requires_grad_()
        (function(value) * (rank + 1)).sum().backward()
        return value.grad

    upstream = sum(range(1, size + 1))
    ones = torch.ones(2)
    assert torch.equal(gradient(lambda v: hvd.allreduce(v, op=hvd.Sum), ones), ones * upstream)
    assert torch.equal(gradient(hvd.allreduce, ones), ones * upstream / size)
    numbers = torch.arange(2.0 * size)
    expected = numbers[2 * rank : 2 * rank + 2] * upstream / size
    assert torch.equal(gradient(lambda v: hvd.allgather(v) * numbers, ones), expected)
    expected = ones * upstream / size if rank == 0 else ones * 0
    assert torch.equal(gradient(lambda v: hvd.broadcast(v, 0), ones), expected)
    expected = ones * upstream if rank == size - 1 else ones * 0
    assert torch.equal(gradient(lambda v: hvd.allreduce(v, op=hvd.Max), ones + rank), expected)
    value = torch.ones(size)
    assert gradient(hvd.alltoall, value).tolist() == [float(r + 1) for r in range(size)]


def calls_in_order():
    """Synchronous calls wait for all calls before them."""
    handles = [hvd.allreduce_async(torch.ones(1_000_000), name=f"async {n}") for n in range(5)]
    hvd.barrier()
    assert all(hvd.poll(handle) for handle in handles)
    assert hvd.synchronize(handles[0]) is hvd.synchronize(handles[0])


def errors():
    for call in (
        lambda: hvd.allreduce(torch.ones(3 + rank), name="shape"),
        lambda: hvd.allreduce(torch.ones(3), name=f"of rank {rank}"),
        lambda: hvd.synchronize(hvd.broadcast_async(torch.ones(3), rank)),
    ):
        with pytest.raises(RuntimeError) as raised:
            call()
        assert raised.type.__name__ == "MismatchError"
    assert hvd.allreduce(torch.ones(1)) == 1.0


def process_sets():
    own = hvd.add_process_set([size - 1])
    if own.included():
        assert hvd.allreduce(torch.tensor([5.0]), op=hvd.Sum, process_set=own) == 5.0
    hvd.remove_process_set(own)


def test_collectives_on_two_ranks(on_ranks):
    on_ranks(2, reductions, exchanges, gradients, calls_in_order, errors, process_sets)


def test_collectives_of_one_process(on_ranks):
    on_ranks(1, reductions, exchanges, gradients)
