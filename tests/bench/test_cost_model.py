"""Known properties of the cost model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvdtrain.bench.cost_model import (
    Cluster,
    Costs,
    Step,
    failure_overhead,
    predict_allreduce,
    predict_step,
)
from hvdtrain.collectives.tuning import Link

MIB = 1 << 20
FREE = Costs(call_s=0.0, message_s=0.0, core_bytes_per_s=math.inf, host_bytes_per_s=math.inf)
LINK = Link(latency_s=0.0, bytes_per_s=10.0 * MIB)


def on(hosts: int, ranks_per_host: int = 1, link: Link = LINK) -> Cluster:
    return Cluster(hosts=hosts, ranks_per_host=ranks_per_host, link=link)


@pytest.mark.parametrize(("hosts", "seconds"), [(1, 0.0), (2, 10.0), (4, 15.0), (1000, 19.98)])
def test_the_link_limits_an_allreduce(hosts: int, seconds: float) -> None:
    for ranks_per_host in (1, 8):
        predicted = predict_allreduce(FREE, on(hosts, ranks_per_host), 100 * MIB)
        assert predicted.seconds == pytest.approx(seconds)


def test_the_busiest_resource_is_the_limit() -> None:
    large, small = 100 * MIB, 4
    quick = Costs(message_s=1e-6)
    assert predict_allreduce(quick, on(8), large).limit == "the link"
    assert predict_allreduce(quick, on(8), small).limit == "calls"
    fast = Link(latency_s=0.0, bytes_per_s=1e12)
    assert predict_allreduce(Costs(), on(8, link=fast), large).limit == "a core"
    assert predict_allreduce(Costs(), on(1, 8), large).limit == "memory"


def test_many_hosts_send_many_messages() -> None:
    """A chunk of 4 MiB is sent in parts of 4 KiB to 1,023 hosts and received back."""
    costs = replace(FREE, message_s=1e-6)
    predicted = predict_allreduce(costs, on(1024), 4 * MIB)
    assert predicted.seconds == pytest.approx(2 * 4 * 1023 / 1024 / 10)
    slow = replace(FREE, message_s=1e-3)
    assert predict_allreduce(slow, on(1024), 4 * MIB).seconds == pytest.approx(2 * 1023e-3)


def test_ranks_of_many_hosts_take_turns() -> None:
    """Each of 8 ranks sends 2 of 16 chunks, 64 KiB to each of 31 other hosts and back."""
    costs = replace(FREE, message_s=1e-3)
    fast = Link(latency_s=0.0, bytes_per_s=1e12)
    assert predict_allreduce(costs, on(32, 8, fast), 32 * MIB).seconds == pytest.approx(4 * 31e-3)


def test_one_rank_only_computes() -> None:
    step = Step(compute_s=0.5, gradient_bytes=MIB, spread=0.1)
    assert predict_step(Costs(), on(1), step) == (0.5, 0.0, 0.0, "computing")


def test_reduction_overlaps_the_backward_pass() -> None:
    """4 of 10 s of reduction overlap the backward pass, except for the first bucket."""
    step = Step(compute_s=6.0, gradient_bytes=100 * MIB, backward=2 / 3)
    predicted = predict_step(FREE, on(2), step)
    assert predicted.limit == "the link"
    assert 12.0 <= predicted.seconds < 12.5
    sequential = predict_step(FREE, on(2), replace(step, backward=0.0))
    assert sequential.seconds == pytest.approx(16.0)
    hidden = predict_step(FREE, on(2), replace(step, compute_s=60.0))
    assert hidden.limit == "computing"
    assert 60.0 < hidden.seconds < 60.5


def test_waiting_grows_with_the_number_of_ranks() -> None:
    step = Step(compute_s=1.0, gradient_bytes=4, spread=0.1)
    waiting = [predict_step(FREE, on(hosts), step).waiting_s for hosts in (2, 100, 10_000)]
    # Expected maximum of 2, 100 and 10,000 normal values: 0.564, 2.508, 3.852.
    assert waiting == pytest.approx([0.0564, 0.2508, 0.3852], rel=0.05)


def test_the_checkpoint_interval_minimizes_the_cost() -> None:
    arguments = {"mean_s": 50_000.0, "checkpoint_s": 4.0, "restart_s": 100.0}
    lost, interval_s = failure_overhead(**arguments)
    assert interval_s == pytest.approx(632.5, abs=0.1)
    assert lost == pytest.approx(4 / 632.5 + (632.5 / 2 + 100) / 50_000, abs=1e-5)
    for other_s in (interval_s / 2, interval_s * 2):
        assert 4 / other_s + (other_s / 2 + 100) / 50_000 > lost
