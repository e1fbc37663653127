"""A model of the duration of a training step on a cluster, from the costs of its parts.

A step computes for a fixed time. Gradients become available in the last part of that time, and are
reduced in buckets, one after another. An allreduce takes as long as its busiest resource needs:

- The links carry ``2 (h - 1) / h`` times the allreduce's bytes out of each of h hosts (Patarasuk
  and Yuan 2009).
- The ranks of a host first add up their own gradients, which keeps the host's memory busy.
- A rank's core is busy with each message and each byte between hosts.

Chunks, segments and buckets have the sizes that ``hvdtrain.collectives`` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

from hvdtrain.collectives.tuning import (
    MESSAGE_S,
    Link,
    choose_bucket_bytes,
    choose_chunk_bytes,
    choose_segment_bytes,
    choose_turns,
)

__all__ = [
    "Allreduce",
    "Cluster",
    "Costs",
    "Step",
    "StepTime",
    "failure_overhead",
    "predict_allreduce",
    "predict_step",
]

Limit = Literal["computing", "the link", "memory", "a core", "calls"]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of the parts of an allreduce on machines of one kind.

    The defaults were measured on two cores of an Intel Xeon.
    """

    call_s: float = 800e-6  # fixed cost of a call, in seconds
    # seconds that a core needs to send a message to another host and to receive one in return
    message_s: float = MESSAGE_S
    core_bytes_per_s: float = 1e9  # bytes per second that a core can send, receive and add up
    # Speed at which the ranks of a host add up their gradients. It is the size of one rank's
    # gradients, divided by the seconds that the addition takes.
    host_bytes_per_s: float = 3.5e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts, ranks and links of a training job."""

    hosts: int  # number of hosts
    ranks_per_host: int  # number of ranks on each host
    link: Link  # latency and speed of a host's link, in each direction

    @property
    def chunk_bytes(self) -> int:
        """The size in bytes of the chunks into which ranks cut arrays."""
        return choose_chunk_bytes(self.hosts)

    @property
    def turns(self) -> int:
        """The number of groups of a host's ranks. The groups take turns to send chunks."""
        return choose_turns(self.hosts, self.ranks_per_host, self.chunk_bytes)

    @property
    def carriers(self) -> int:
        """The number of ranks on a host that share the work of sending one chunk."""
        return self.ranks_per_host // self.turns

    @property
    def ranks(self) -> int:
        """The total number of ranks."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of each rank in a step."""

    compute_s: float  # seconds of computation
    gradient_bytes: int  # bytes of the gradients
    # The share of the computation, at its end, during which gradients become available. The default
    # is two thirds, because the backward pass has two matrix products for each matrix product of
    # the forward pass.
    backward: float = 2 / 3
    spread: float = 0.0  # standard deviation of ``compute_s``, divided by ``compute_s``


class Allreduce(NamedTuple):
    """The duration of an allreduce and its limiting resource."""

    seconds: float
    limit: Limit


class StepTime(NamedTuple):
    """The duration of a step and its parts."""

    seconds: float  # duration of the step
    waiting_s: float  # time spent waiting for the slowest rank
    combining_s: float  # time that reductions take after the computation has ended
    limit: Limit  # "computing", or the limiting resource of the last allreduce


def predict_allreduce(costs: Costs, cluster: Cluster, nbytes: int) -> Allreduce:
    """Predict the duration of an allreduce of an array of ``nbytes`` per rank."""
    if cluster.ranks == 1:
        return Allreduce(0.0, "calls")
    hosts, inside = cluster.hosts, cluster.ranks_per_host
    parts: dict[Limit, float] = {
        "memory": nbytes / costs.host_bytes_per_s if inside > 1 else 0.0,
        "calls": costs.call_s,
    }
    base_s = costs.call_s
    if hosts > 1:
        # There are three messages, one after another. They compare the calls, send parts to the
        # ranks that add them up, and send the sums back.
        base_s += 3 * cluster.link.latency_s
        parts["calls"] = base_s
        leaves = 2 * (hosts - 1) / hosts * nbytes
        parts["the link"] = leaves / cluster.link.bytes_per_s
        core_s = _messages(cluster, nbytes) * costs.message_s
        chunks = math.ceil(nbytes / cluster.chunk_bytes)
        # With few chunks, some ranks send none.
        carriers = cluster.carriers * min(cluster.turns, max(1, chunks))
        core_s += leaves / carriers / costs.core_bytes_per_s
        parts["a core"] = core_s
    busy_s = max(seconds for limit, seconds in parts.items() if limit != "calls")
    longest = max(parts, key=lambda limit: parts[limit])
    return Allreduce(base_s + busy_s, longest)


def predict_step(costs: Costs, cluster: Cluster, step: Step) -> StepTime:
    """Predict the duration of a step in which gradients are reduced while others are computed."""
    waiting_s = step.compute_s * step.spread * _expected_maximum(cluster.ranks)
    compute_s = step.compute_s + waiting_s
    limit: Limit = "computing"
    done_s = compute_s * (1 - step.backward)
    buckets = _buckets(cluster, step.gradient_bytes) if cluster.ranks > 1 else 0
    if buckets:
        bucket_bytes = math.ceil(step.gradient_bytes / buckets)
        bucket_s, limit = predict_allreduce(costs, cluster, bucket_bytes)
    for number in range(buckets):
        available_s = compute_s * (1 - step.backward * (1 - (number + 1) / buckets))
        done_s = max(done_s, available_s) + bucket_s
    seconds = max(done_s, compute_s)
    combining_s = seconds - compute_s
    return StepTime(
        seconds, waiting_s, combining_s, limit if combining_s > compute_s / 10 else "computing"
    )


def failure_overhead(
    *, mean_s: float, checkpoint_s: float, restart_s: float
) -> tuple[float, float]:
    """Return the cost of failures and checkpoints at the optimal checkpoint interval.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval":
    ``sqrt(2 c m)`` for checkpoints of duration c and a mean time m between failures.

    Args:
        mean_s: Mean seconds between failures of the job.
        checkpoint_s: Seconds that a checkpoint blocks the training.
        restart_s: Seconds from a failure to the first step after the checkpoint.

    Returns:
        The share of time that is lost, and the optimal number of seconds between checkpoints.
    """
    interval_s = math.sqrt(2 * checkpoint_s * mean_s)
    blocked = checkpoint_s / interval_s if interval_s else 0.0
    return blocked + (interval_s / 2 + restart_s) / mean_s, interval_s


def _messages(cluster: Cluster, nbytes: int) -> int:
    """Return the number of messages that a rank sends to other hosts in an allreduce."""
    share = min(nbytes, cluster.chunk_bytes) / cluster.carriers / cluster.hosts
    segments = math.ceil(share / choose_segment_bytes(cluster.link.bytes_per_s, cluster.hosts))
    chunks = math.ceil(nbytes / cluster.chunk_bytes / cluster.turns)
    return chunks * 2 * (cluster.hosts - 1) * segments


def _buckets(cluster: Cluster, nbytes: int) -> int:
    if cluster.hosts == 1:
        return 1
    at_once = cluster.chunk_bytes * cluster.turns
    bucket_bytes = choose_bucket_bytes(cluster.link, cluster.hosts, at_once)
    return max(1, round(nbytes / bucket_bytes))


def _expected_maximum(ranks: int) -> float:
    """Return the expected maximum of ``ranks`` standard normal values.

    Source: Blom 1958, "Statistical estimates and transformed beta-variables".
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
