"""A model of how long a training step takes on a cluster, from the costs of its parts; pure.

A step computes for a set time, in whose last part gradients come one after the other. They are
combined in buckets, each as soon as it is complete and the one before it is done. An allreduce
takes what its slowest resource takes: the links, ``2 (h - 1) / h`` times its bytes out of each of h
hosts (Patarasuk and Yuan 2009); the memory of a host, in which its ranks add up first; or a rank's
core, which each message between hosts costs some microseconds, and its bytes as well. Chunks,
segments and buckets are those that ``collectives`` would choose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple

from hvdtrain.collectives.hierarchy import choose_chunk_bytes, choose_turns
from hvdtrain.collectives.link_speed import (
    MESSAGE_S,
    Link,
    choose_bucket_bytes,
    choose_segment_bytes,
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

    ``benchmarks/scaling.py`` measures them; these are of two cores of an Intel Xeon.

    Attributes:
        call_s: What one costs by itself, on a host.
        message_s: What a message between hosts takes of the core of the rank that sends it; the
            one that it gets for it included.
        core_bytes_per_s: How much a core sends while it receives as much, and adds it up.
        host_bytes_per_s: How much of each rank's gradients the ranks of a host add up and spread.
    """

    call_s: float = 800e-6
    message_s: float = MESSAGE_S
    core_bytes_per_s: float = 1e9
    host_bytes_per_s: float = 3.5e9


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts, ranks and links that a training runs on.

    Attributes:
        hosts: How many.
        ranks_per_host: How many on each.
        link: What a host sends while it receives as much.
        ranks_per_core: How many ranks share a core; 1 where each has one of its own.
    """

    hosts: int
    ranks_per_host: int
    link: Link
    ranks_per_core: float = 1.0

    @property
    def chunk_bytes(self) -> int:
        """How much goes through shared memory at a time."""
        return choose_chunk_bytes(self.hosts)

    @property
    def turns(self) -> int:
        """In how many turns the ranks of a host carry chunks to others."""
        return choose_turns(self.hosts, self.ranks_per_host, self.chunk_bytes)

    @property
    def carriers(self) -> int:
        """How many ranks of a host carry a chunk."""
        return self.ranks_per_host // self.turns

    @property
    def ranks(self) -> int:
        """The number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of each rank in a step.

    Attributes:
        compute_s: How long it computes.
        gradient_bytes: How much it sends for combining.
        backward: In which last part of that time gradients come; two of three, as the backward pass
            has two products of matrices for each of the forward pass.
        spread: The standard deviation of that time, as a share of it; all wait for the slowest.
    """

    compute_s: float
    gradient_bytes: int
    backward: float = 2 / 3
    spread: float = 0.0


class Allreduce(NamedTuple):
    """One allreduce: its seconds, and what it takes them for."""

    seconds: float
    limit: Limit


class StepTime(NamedTuple):
    """The time that a step takes, and for what.

    Attributes:
        seconds: The time of the whole step.
        waiting_s: The part of it that is spent waiting for the slowest rank.
        combining_s: The part for gradients after computing is over.
        limit: What takes longest: computing, or that which the last allreduce takes its time for.
    """

    seconds: float
    waiting_s: float
    combining_s: float
    limit: Limit


def predict_allreduce(costs: Costs, cluster: Cluster, nbytes: int) -> Allreduce:
    """Predict how long ranks take to combine arrays of ``nbytes`` in all on each."""
    if cluster.ranks == 1:
        return Allreduce(0.0, "calls")
    hosts, inside = cluster.hosts, cluster.ranks_per_host
    parts: dict[Limit, float] = {
        "memory": nbytes / costs.host_bytes_per_s if inside > 1 else 0.0,
        "calls": costs.call_s,
    }
    base_s = costs.call_s
    if hosts > 1:
        # Calls are agreed on, parts are sent to who adds them up, and sums come back.
        base_s += 3 * cluster.link.latency_s
        parts["calls"] = base_s
        leaves = 2 * (hosts - 1) / hosts * nbytes
        parts["the link"] = leaves / cluster.link.bytes_per_s
        core_s = _messages(cluster, nbytes) * costs.message_s
        chunks = math.ceil(nbytes / cluster.chunk_bytes)
        # Of few chunks not all ranks carry some.
        carriers = cluster.carriers * min(cluster.turns, max(1, chunks))
        core_s += leaves / carriers / costs.core_bytes_per_s
        parts["a core"] = core_s * cluster.ranks_per_core
    busy_s = max(seconds for limit, seconds in parts.items() if limit != "calls")
    longest = max(parts, key=lambda limit: parts[limit])
    return Allreduce(base_s + busy_s, longest)


def predict_step(costs: Costs, cluster: Cluster, step: Step) -> StepTime:
    """Predict how long a step takes whose gradients are combined while others are computed."""
    waiting_s = step.compute_s * step.spread * _most_deviations(cluster.ranks)
    compute_s = step.compute_s + waiting_s
    limit: Limit = "computing"
    done_s = compute_s * (1 - step.backward)
    buckets = _buckets(cluster, step.gradient_bytes) if cluster.ranks > 1 else 0
    if buckets:
        bucket_bytes = math.ceil(step.gradient_bytes / buckets)
        bucket_s, limit = predict_allreduce(costs, cluster, bucket_bytes)
    for number in range(buckets):
        come_s = compute_s * (1 - step.backward * (1 - (number + 1) / buckets))
        done_s = max(done_s, come_s) + bucket_s
    seconds = max(done_s, compute_s)
    combining_s = seconds - compute_s
    return StepTime(
        seconds, waiting_s, combining_s, limit if combining_s > compute_s / 10 else "computing"
    )


def failure_overhead(
    *, mean_s: float, checkpoint_s: float, restart_s: float
) -> tuple[float, float]:
    """Predict the cost of failures at the best interval of checkpoints, and that interval.

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval":
    ``sqrt(2 c m)`` for checkpoints that take c and failures that are m apart.

    Args:
        mean_s: From one failure of the job to the next, in the mean.
        checkpoint_s: For which one keeps training waiting.
        restart_s: From a failure to the step after the checkpoint that training goes on from.

    Returns:
        The share of time that is lost, and the seconds between two checkpoints.
    """
    interval_s = math.sqrt(2 * checkpoint_s * mean_s)
    lost = checkpoint_s / interval_s if interval_s else 0.0
    return lost + (interval_s / 2 + restart_s) / mean_s, interval_s


def _messages(cluster: Cluster, nbytes: int) -> int:
    """Return how many messages a rank sends to other hosts in one allreduce."""
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


def _most_deviations(ranks: int) -> float:
    """By how many standard deviations the largest of so many normal values lies above the mean.

    Source: Blom 1958, "Statistical estimates and transformed beta-variables", approximation of the
    expected value of the largest of n.
    """
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0
