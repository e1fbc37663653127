"""``DistributedOptimizer`` for PyTorch on two ranks, compared with one process."""

from __future__ import annotations

# ruff: noqa: F821


def set_up():
    global make_model, train, close
    functional = torch.nn.functional

    def make_model(seed=0):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)]
        return torch.nn.Sequential(*layers)

    def train(make, distributed, steps=6, rows=slice(None), accumulate=1, **options):
        """Return the weights after training on a rank's part of the rows, or on all rows."""
        model = make_model(rank if distributed else 0)
        optimizer = make(model.parameters())
        # The scheduler has the optimizer's method `step` before it is distributed.
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if distributed:
            hvd.DistributedOptimizer(
                optimizer,
                model.named_parameters(),
                backward_passes_per_step=accumulate,
                **options,
            )
            hvd.broadcast_parameters(model.state_dict(), 0)
            hvd.broadcast_optimizer_state(optimizer, 0)
        generator = torch.Generator().manual_seed(3)
        for _ in range(steps):
            for _ in range(accumulate):
                x, y = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
                if distributed:
                    x, y = x[rank::size], y[rank::size]
                (functional.cross_entropy(model(x), y) / accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def close(a, b):
        assert (a - b).abs().max() < 1e-6, (a - b).abs().max()


def equal_to_one_process():
    for make in (
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, 0.01),
    ):
        for options in ({}, {"groups": 3}, {"accumulate": 2}, {"gradient_predivide_factor": 2.0}):
            accumulate = options.get("accumulate", 1)
            close(train(make, True, **options), train(make, False, accumulate=accumulate))


def optimizer_with_closure():
    def run(distributed):
        model = make_model()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        if distributed:
            hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
        x = x[rank::size] if distributed else x

        def closure():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            # All ranks need the same loss.
            return hvd.allreduce(model(x).square().mean().detach())

        optimizer.step(closure)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    close(run(True), run(False))


def unused_and_frozen_parameters():
    """A parameter without a gradient on all ranks keeps its momentum and value, as alone."""
    used, partly, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    parameters = [used, partly, unused, frozen]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 1.0))
    for step in range(3):
        loss = used.sum() * (rank + 1)
        if rank == 0:
            loss = loss + partly.sum()
        if step == 2:
            frozen.requires_grad_()
        loss = loss + frozen.sum()
        loss.backward()
        optimizer.step()
        assert unused.grad is None
        optimizer.zero_grad()
    values = [float(p.detach()[0]) for p in parameters]
    assert values == [1 - 3 * 1.5, 1 - 3 * 0.5, 1.0, 0.0], values


def sparse_gradients():
    for as_dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = torch.optim.SGD(table.parameters(), 1.0)
        hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=as_dense)
        table(torch.tensor([rank, 3])).sum().backward()
        optimizer.step()
        assert table.weight.detach()[:, 0].tolist() == [0.5, 0.5, 1.0, 0.0]


def sparse_gradient_on_one_rank():
    for as_dense, is_used in ((True, False), (True, True), (False, False), (False, True)):
        table = torch.nn.Embedding(4, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = torch.optim.SGD(table.parameters(), 1.0)
        hvd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=as_dense)
        if rank == 0:
            table(torch.tensor([1])).sum().backward()
        elif is_used:
            table.weight[3].sum().backward()
        if as_dense:
            optimizer.step()
            assert table.weight.detach()[:, 0].tolist() == [1.0, 0.5, 1.0, 1.0 - is_used / 2]
        else:
            with pytest.raises(RuntimeError, match="without sparse gradients of weight"):
                optimizer.step()


def uneven_data():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    for _ in range(1 + 2 * rank):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert hvd.join() == 1
    assert hvd.broadcast(weight.detach(), 1) == -2.0  # one step of both ranks, two of one rank


def clipped_gradients():
    import warnings

    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    (weight.sum() * (10.0 * rank)).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(weight, torch.full((4,), -0.5)), weight
    weight.sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert "skip_synchronize" in str(caught[0].message)


def discarded_gradients():
    """In a GAN, the step of one network leaves gradients in the other."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0))
    for _ in range(2):
        (weight.sum() * 100).backward()
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert weight == -2.0
    weight.sum().backward()
    with pytest.raises(AssertionError, match="backward_passes_per_step"):
        weight.sum().backward()
    optimizer.zero_grad()


def adasum():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
    weight[rank].backward()  # the changes of the ranks are orthogonal
    optimizer.step()
    assert weight.detach().tolist() == [-1.0, -1.0]


def differing_parameters():
    for shape, name in (((2 + rank,), "weight"), ((2,), f"weight of rank {rank}")):
        weight = torch.nn.Parameter(torch.zeros(shape))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), [(name, weight)])
        weight.sum().backward()
        with pytest.raises(RuntimeError, match=r"weight(.|\n)*rank 1"):
            optimizer.step()


def state_of_rank_0():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.9))
    if rank == 0:
        model(torch.ones(1, 6)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    assert state["param_groups"][0]["betas"] == (0.5, 0.9)
    sums = [float(s["exp_avg_sq"].sum()) for s in state["state"].values()]
    assert len(sums) == 4
    assert hvd.allgather_object(sums) == [sums] * 2
    optimizer.param_groups[0]["hook"] = print
    with pytest.raises(ValueError, match="AdamW"):
        hvd.broadcast_optimizer_state(optimizer, 0)


def batch_norm_of_all_ranks():
    rows = torch.randn(7, 3, generator=torch.Generator().manual_seed(2))
    own = (rows[:5] if rank == 0 else rows[5:]).requires_grad_()
    joint = rows.clone().requires_grad_()
    layer, alone = hvd.SyncBatchNorm(3), torch.nn.BatchNorm1d(3)
    output, expected = layer(own), alone(joint)
    part = slice(0, 5) if rank == 0 else slice(5, 7)
    close(output, expected[part])
    output.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert torch.allclose(own.grad, joint.grad[part], atol=1e-5)
    close(layer.running_var, alone.running_var)
    close(layer.running_mean, alone.running_mean)


def test_training_equals_one_process(on_ranks):
    on_ranks(2, set_up, equal_to_one_process, optimizer_with_closure)


def test_buckets_that_overlap_the_backward_pass(on_ranks):
    functions = set_up, equal_to_one_process, unused_and_frozen_parameters, discarded_gradients
    on_ranks(2, *functions, uneven_data, sparse_gradients, HVDTRAIN_BUCKET_BYTES="4")


def test_gradients_of_several_kinds(on_ranks):
    functions = unused_and_frozen_parameters, sparse_gradients, uneven_data, clipped_gradients
    more = discarded_gradients, adasum, differing_parameters, sparse_gradient_on_one_rank
    on_ranks(2, set_up, *functions, *more, state_of_rank_0, batch_norm_of_all_ranks)
