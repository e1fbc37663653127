from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import available_cores, format_places, place, share_of_cores
from hvdtrain.errors import ConfigurationError
from tests.harness.jobs import REPOSITORY


def host(name: str, slots: int, max_slots: int | None = None) -> Host:
    return Host(name=name, slots=slots, max_slots=max_slots)


A2, B2, C1 = host("a", 2), host("b", 2), host("c", 1)

# Hosts, ranks, whether to oversubscribe, and the ranks of each host.
SHARES = {
    "all-slots": ([A2, B2, C1], None, False, {"a": 2, "b": 2, "c": 1}),
    "first-host-first": ([C1, B2, A2], 4, False, {"c": 1, "b": 2, "a": 1}),
    "unused-hosts": ([A2, B2, C1], 1, False, {"a": 1}),
    "oversubscription-not-needed": ([A2, B2], 3, True, {"a": 2, "b": 1}),
    "slots-by-default": ([A2, B2], None, True, {"a": 2, "b": 2}),
    "one-more-in-turn": ([A2, B2, C1], 6, True, {"a": 3, "b": 2, "c": 1}),
    "several-turns": ([A2, C1], 8, True, {"a": 5, "c": 3}),
    "full-host-skipped": ([host("a", 2, 2), B2, C1], 8, True, {"a": 2, "b": 4, "c": 2}),
    "all-full": ([host("a", 2, 3), host("b", 1, 4)], 7, True, {"a": 3, "b": 4}),
    "max-without-oversubscription": ([host("a", 2, 4), B2], 4, False, {"a": 2, "b": 2}),
    "same-host-twice": ([A2, C1, host("A", 3)], None, False, {"a": 5, "c": 1}),
}


@pytest.mark.parametrize(
    ("hosts", "ranks", "oversubscribe", "expected"), SHARES.values(), ids=SHARES
)
def test_ranks_per_host(
    hosts: list[Host], ranks: int | None, oversubscribe: bool, expected: dict[str, int]
) -> None:
    places = place(hosts, ranks, oversubscribe=oversubscribe)
    assert list(Counter(entry.host for entry in places).items()) == list(expected.items())


def test_all_fields_of_a_place() -> None:
    places = place([A2, C1], None, gpus={"a": 2, "c": 0}, cores={"a": 8})
    on_a = {"host": "a", "local_size": 2, "node_rank": 0}
    on_c = {"host": "c", "local_size": 1, "node_rank": 1}
    assert [dataclasses.asdict(entry) for entry in places] == [
        {"rank": 0, **on_a, "local_rank": 0, "role": "chief", "gpus": (0,), "cores": (0, 3)},
        {"rank": 1, **on_a, "local_rank": 1, "role": "worker", "gpus": (1,), "cores": (4, 7)},
        {"rank": 2, **on_c, "local_rank": 0, "role": "worker", "gpus": (), "cores": None},
    ]


def _clusters() -> list[tuple[list[Host], int | None, bool]]:
    """Return random clusters that have room for their ranks."""
    random_numbers = random.Random(1)
    clusters: list[tuple[list[Host], int | None, bool]] = []
    for _ in range(300):
        hosts = []
        for number in range(random_numbers.randint(1, 5)):
            slots = random_numbers.randint(1, 4)
            limit = random_numbers.choice([None, slots, slots + 1, slots + 5])
            hosts.append(host(f"n{number}", slots, limit))
        slots = sum(entry.slots for entry in hosts)
        limits = [entry.max_slots for entry in hosts]
        most = 3 * slots if None in limits else sum(limits)  # type: ignore[arg-type]
        ranks = random_numbers.choice([None, random_numbers.randint(1, most)])
        clusters.append((hosts, ranks, ranks is not None and ranks > slots))
    return clusters


def test_invariants_of_every_placement() -> None:
    clusters = _clusters()
    assert {oversubscribe for *_, oversubscribe in clusters} == {False, True}
    for hosts, ranks, oversubscribe in clusters:
        case = f"{hosts}, {ranks} ranks"
        places = place(hosts, ranks, oversubscribe=oversubscribe)
        size = sum(entry.slots for entry in hosts) if ranks is None else ranks
        assert [entry.rank for entry in places] == list(range(size)), case
        assert [entry.role for entry in places] == ["chief"] + ["worker"] * (size - 1), case

        groups = [list(group) for _, group in itertools.groupby(places, lambda p: p.host)]
        names = [group[0].host for group in groups]
        order = [entry.name for entry in hosts]
        assert names == sorted(set(names), key=order.index), f"host order: {case}"
        for node_rank, group in enumerate(groups):
            assert [entry.local_rank for entry in group] == list(range(len(group))), case
            assert {entry.local_size for entry in group} == {len(group)}, case
            assert {entry.node_rank for entry in group} == {node_rank}, case

        counts = Counter(entry.host for entry in places)
        for index, entry in enumerate(hosts):
            count = counts[entry.name]
            assert count <= (entry.max_slots or size), case
            if oversubscribe:
                assert count >= entry.slots, case
            else:
                assert count <= entry.slots, case
                filled = all(counts[h.name] == h.slots for h in hosts[:index])
                assert count == 0 or filled, f"an earlier host has free slots: {case}"


def test_surplus_ranks_are_spread_evenly() -> None:
    for hosts, ranks, oversubscribe in _clusters():
        if not oversubscribe:
            continue
        counts = Counter(entry.host for entry in place(hosts, ranks, oversubscribe=True))
        extra = [counts[entry.name] - entry.slots for entry in hosts]
        full = [counts[entry.name] == entry.max_slots for entry in hosts]
        open_hosts = [number for number, is_full in zip(extra, full) if not is_full]
        assert max(open_hosts, default=0) - min(open_hosts, default=0) <= 1, (hosts, ranks)
        assert open_hosts == sorted(open_hosts, reverse=True), "the first hosts come first"
        assert max(extra) <= max(open_hosts, default=max(extra)) + 1, (hosts, ranks)


MANY = [host(f"n{number}", 1) for number in range(12)]

# Hosts, ranks, whether to oversubscribe, and the start of the message.
TOO_MANY = {
    "one-more": (
        ([A2, C1], 4, False),
        "4 ranks don't fit: a has 2 slots, c has 1 slot, 3 in total. Start 3 or name more hosts, "
        "or pass --oversubscribe.",
    ),
    "max-forbids": (
        ([host("a", 1, 2)], 3, False),
        "3 ranks don't fit: a has 1 slot, 1 in total. Start 1 or name more hosts.",
    ),
    "max-exceeded": (
        ([host("a", 1, 2), host("b", 3, 3)], 6, True),
        "6 ranks don't fit, even with --oversubscribe: a takes at most 2, b takes at most 3, 5 in "
        "total. Start 5, name more hosts, or raise max_slots.",
    ),
    "many-hosts": (
        (MANY, 13, False),
        "13 ranks don't fit: "
        + "".join(f"n{number} has 1 slot, " for number in range(8))
        + "4 more hosts, 12 in total. Start 12",
    ),
    "zero": (([A2], 0, False), "The number of ranks must be at least 1, got 0."),
    "negative": (([A2], -1, True), "The number of ranks must be at least 1, got -1."),
    "no-hosts": (([], 2, True), "The list of hosts is empty; name at least one with -H."),
}


@pytest.mark.parametrize(("arguments", "message"), TOO_MANY.values(), ids=TOO_MANY)
def test_ranks_that_do_not_fit(
    arguments: tuple[list[Host], int | None, bool], message: str
) -> None:
    hosts, ranks, oversubscribe = arguments
    with pytest.raises(ConfigurationError) as raised:
        place(hosts, ranks, oversubscribe=oversubscribe)
    assert str(raised.value).startswith(message)


# GPUs per host, whether to share them, and the GPU of each rank on host a (4 ranks) and b (1 rank).
GPUS = {
    "unknown": (None, False, [None] * 5),
    "no-gpus": ({"a": 0, "b": 0}, True, [None] * 5),
    "one-each": ({"a": 4, "b": 1}, False, [0, 1, 2, 3, 0]),
    "more-than-ranks": ({"a": 8, "b": 8}, True, [0, 1, 2, 3, 0]),
    "one-host-known": ({"b": 2, "c": 1}, False, [None, None, None, None, 0]),
    "shared": ({"a": 2, "b": 1}, True, [0, 1, 0, 1, 0]),
    "shared-unevenly": ({"a": 3}, True, [0, 1, 2, 0, None]),
}


@pytest.mark.parametrize(("gpus", "share", "expected"), GPUS.values(), ids=GPUS)
def test_gpus(gpus: dict[str, int] | None, share: bool, expected: list[int | None]) -> None:
    places = place([host("a", 4), host("b", 1)], None, gpus=gpus, share_gpus=share)
    assert [entry.gpus for entry in places] == [() if gpu is None else (gpu,) for gpu in expected]


# The same with 2 GPUs per rank, for 2 ranks on host a and 1 rank on host b.
GPU_PAIRS = {
    "just-enough": ({"a": 4, "b": 2}, False, [(0, 1), (2, 3), (0, 1)]),
    "one-host-known": ({"a": 5}, False, [(0, 1), (2, 3), ()]),
    "shared": ({"a": 2, "b": 2}, True, [(0, 1), (0, 1), (0, 1)]),
    "shared-unevenly": ({"a": 3}, True, [(0, 1), (0, 2), ()]),
}


@pytest.mark.parametrize(("gpus", "share", "expected"), GPU_PAIRS.values(), ids=GPU_PAIRS)
def test_two_gpus_per_rank(
    gpus: dict[str, int] | None, share: bool, expected: list[tuple[int, ...]]
) -> None:
    places = place([A2, host("b", 1)], None, gpus=gpus, share_gpus=share, gpus_per_rank=2)
    assert [entry.gpus for entry in places] == expected


def test_parameter_servers_get_no_gpus() -> None:
    places = place([host("a", 4), B2], None, servers=(1, 5), gpus={"a": 3, "b": 1})
    assert [entry.role for entry in places] == ["chief", "ps", "worker", "worker", "worker", "ps"]
    assert [entry.gpus for entry in places] == [(0,), (), (1,), (2,), (0,), ()]
    assert [entry.local_rank for entry in places] == [0, 1, 2, 3, 0, 1]
    shared = place([host("a", 4)], None, servers=(1,), gpus={"a": 2}, share_gpus=True)
    assert [entry.gpus for entry in shared] == [(0,), (), (1,), (0,)]
    with pytest.raises(ConfigurationError, match=r"more workers than GPUs: a has 2 GPUs for 3 wor"):
        place([host("a", 4), B2], None, servers=(1, 5), gpus={"a": 2, "b": 1})


def test_more_ranks_than_gpus() -> None:
    hosts = [host("a", 4), host("B", 2), host("c", 1)]
    with pytest.raises(ConfigurationError) as raised:
        place(hosts, None, gpus={"a": 2, "B": 1, "c": 1})
    message = str(raised.value)
    assert "more ranks than GPUs: a has 2 GPUs for 4 ranks, B has 1 GPU for 2 ranks." in message
    assert "--share-gpus" in message
    assert "CUDA_VISIBLE_DEVICES=-1" in message
    # The number of a host's ranks is decisive, not the number of its slots.
    assert [entry.gpus for entry in place(hosts, 2, gpus={"a": 2, "B": 1})] == [(0,), (1,)]
    with pytest.raises(ConfigurationError, match="a has 2 GPUs for 3 ranks"):
        place([host("a", 2)], 3, oversubscribe=True, gpus={"a": 2})


def test_too_few_gpus_for_two_per_rank() -> None:
    message = (
        r"few GPUs for 2 per rank \(--devices-per-rank\): a has 3 GPUs for 2 ranks\. .*--share"
    )
    with pytest.raises(ConfigurationError, match=message):
        place([A2], None, gpus={"a": 3}, gpus_per_rank=2)
    with pytest.raises(ConfigurationError, match=r"a has 1 GPU for 2 ranks\.") as raised:
        place([A2], None, gpus={"a": 1}, gpus_per_rank=2, share_gpus=True)
    assert "--share-gpus" not in str(raised.value)


# The number of ranks, the cores of the host, and the cores of each rank.
CORES = {
    "even": (2, 8, [(0, 3), (4, 7)]),
    "uneven": (3, 8, [(0, 1), (2, 4), (5, 7)]),
    "fewer-cores": (5, 2, [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]),
    "unknown": (2, 0, [None, None]),
}


@pytest.mark.parametrize(("ranks", "cores", "expected"), CORES.values(), ids=CORES)
def test_cores(ranks: int, cores: int, expected: list[tuple[int, int] | None]) -> None:
    places = place([host("a", ranks)], None, cores={"a": cores})
    assert [entry.cores for entry in places] == expected


def test_ranks_share_all_cores_evenly() -> None:
    for ranks, cores in itertools.product(range(1, 20), range(1, 40)):
        shares = [share_of_cores(rank, ranks, cores) or (0, -1) for rank in range(ranks)]
        sizes = [last - first + 1 for first, last in shares]
        if ranks > cores:
            assert set(sizes) == {1}
            continue
        given = [core for first, last in shares for core in range(first, last + 1)]
        assert given == list(range(cores)), (ranks, cores)
        assert max(sizes) - min(sizes) <= 1, (ranks, cores)


def test_format_places() -> None:
    hosts = [host("node01", 3), host("b", 1), host("c", 1)]
    places = place(
        hosts, None, servers=(2,), gpus={"node01": 4}, cores={"node01": 36, "b": 1}, gpus_per_rank=2
    )
    assert format_places(places).splitlines() == [
        "rank  host    local rank  role    GPU  cores",
        "   0  node01           0  chief   0,1   0-11",
        "   1  node01           1  worker  2,3  12-23",
        "   2  node01           2  ps        -  24-35",
        "   3  b                0  worker    -      0",
        "   4  c                0  worker    -      -",
    ]
    assert format_places([]) == "rank  host  local rank  role  GPU  cores"


def test_only_cores_of_the_affinity_mask_are_available() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert available_cores() == len(allowed)
    code = (
        f"import os; os.sched_setaffinity(0, [{allowed[0]}])\n"
        "from hvdtrain.cluster.placement import available_cores; print(available_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, timeout=30, check=True
    )
    assert done.stdout == b"1\n"
