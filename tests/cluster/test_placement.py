"""Every rank gets one place, in the order of the hosts, within what the hosts take."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys

import pytest

from hvdtrain.cluster.hosts import Host
from hvdtrain.cluster.placement import Place, available_cores, place, table
from hvdtrain.errors import ConfigurationError
from tests.harness.jobs import REPOSITORY


def host(name: str, slots: int, max_slots: int | None = None) -> Host:
    return Host(name=name, slots=slots, max_slots=max_slots)


def ranks_by_host(places: list[Place]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in places:
        counts[entry.host] = counts.get(entry.host, 0) + 1
    return counts


A2, B2, C1 = host("a", 2), host("b", 2), host("c", 1)

# Hosts, ranks, whether to oversubscribe, ranks of each host.
SHARES = {
    "all-slots": ([A2, B2, C1], None, False, {"a": 2, "b": 2, "c": 1}),
    "just-fits": ([A2, B2, C1], 5, False, {"a": 2, "b": 2, "c": 1}),
    "block": ([A2, B2, C1], 3, False, {"a": 2, "b": 1}),
    "one": ([A2, B2, C1], 1, False, {"a": 1}),
    "order": ([C1, B2, A2], 4, False, {"c": 1, "b": 2, "a": 1}),
    "not-needed": ([A2, B2], 3, True, {"a": 2, "b": 1}),
    "all-slots-only": ([A2, B2], None, True, {"a": 2, "b": 2}),
    "turns": ([A2, B2, C1], 6, True, {"a": 3, "b": 2, "c": 1}),
    "turns-whole": ([A2, B2, C1], 8, True, {"a": 3, "b": 3, "c": 2}),
    "turns-twice": ([A2, C1], 8, True, {"a": 5, "c": 3}),
    "single": ([C1], 4, True, {"c": 4}),
    "max-skipped": ([host("a", 2, 2), B2, C1], 8, True, {"a": 2, "b": 4, "c": 2}),
    "max-reached": ([host("a", 2, 3), B2], 8, True, {"a": 3, "b": 5}),
    "max-filled": ([host("a", 2, 3), host("b", 1, 4)], 7, True, {"a": 3, "b": 4}),
    "max-without-surplus": ([host("a", 2, 4), B2], 4, False, {"a": 2, "b": 2}),
    "same-host-again": ([A2, C1, host("A", 3)], None, False, {"a": 5, "c": 1}),
}


@pytest.mark.parametrize(
    ("hosts", "ranks", "oversubscribe", "expected"), SHARES.values(), ids=SHARES
)
def test_shares(
    hosts: list[Host], ranks: int | None, oversubscribe: bool, expected: dict[str, int]
) -> None:
    counts = ranks_by_host(place(hosts, ranks, oversubscribe=oversubscribe))
    assert list(counts.items()) == list(expected.items())


def test_a_whole_plan() -> None:
    places = place([A2, C1], None, gpus={"a": 2, "c": 0}, cores={"a": 8})
    on_a = {"host": "a", "local_size": 2, "node_rank": 0}
    on_c = {"host": "c", "local_size": 1, "node_rank": 1}
    assert [dataclasses.asdict(entry) for entry in places] == [
        {"rank": 0, **on_a, "local_rank": 0, "role": "chief", "gpus": (0,), "cores": (0, 3)},
        {"rank": 1, **on_a, "local_rank": 1, "role": "worker", "gpus": (1,), "cores": (4, 7)},
        {"rank": 2, **on_c, "local_rank": 0, "role": "worker", "gpus": (), "cores": None},
    ]


def _clusters() -> list[tuple[list[Host], int | None, bool]]:
    """Clusters of all sorts that have room for their ranks."""
    dice = random.Random(1)
    clusters: list[tuple[list[Host], int | None, bool]] = []
    for _ in range(300):
        hosts = []
        for number in range(dice.randint(1, 5)):
            slots = dice.randint(1, 4)
            limit = dice.choice([None, slots, slots + 1, slots + 5])
            hosts.append(host(f"n{number}", slots, limit))
        slots = sum(entry.slots for entry in hosts)
        limits = [entry.max_slots for entry in hosts]
        most = 3 * slots if None in limits else sum(limits)  # type: ignore[arg-type]
        ranks = dice.choice([None, dice.randint(1, most)])
        clusters.append((hosts, ranks, ranks is not None and ranks > slots))
    return clusters


def test_what_holds_for_every_plan() -> None:
    clusters = _clusters()
    assert {oversubscribe for *_, oversubscribe in clusters} == {False, True}
    for hosts, ranks, oversubscribe in clusters:
        told = f"{hosts}, {ranks} ranks"
        places = place(hosts, ranks, oversubscribe=oversubscribe)
        size = sum(entry.slots for entry in hosts) if ranks is None else ranks
        assert [entry.rank for entry in places] == list(range(size)), told
        assert [entry.role for entry in places] == ["chief"] + ["worker"] * (size - 1), told

        groups = [list(group) for _, group in itertools.groupby(places, lambda p: p.host)]
        names = [group[0].host for group in groups]
        order = [entry.name for entry in hosts]
        assert names == sorted(set(names), key=order.index), f"blocks in order: {told}"
        for node_rank, group in enumerate(groups):
            assert [entry.local_rank for entry in group] == list(range(len(group))), told
            assert {entry.local_size for entry in group} == {len(group)}, told
            assert {entry.node_rank for entry in group} == {node_rank}, told

        counts = ranks_by_host(places)
        for before, entry in enumerate(hosts):
            count = counts.get(entry.name, 0)
            assert count <= (entry.max_slots or size), told
            if oversubscribe:
                assert count >= entry.slots, told
            else:
                assert count <= entry.slots, told
                filled = all(counts.get(h.name) == h.slots for h in hosts[:before])
                assert count == 0 or filled, f"a host before has free slots: {told}"


def test_surplus_is_dealt_out_evenly() -> None:
    for hosts, ranks, oversubscribe in _clusters():
        if not oversubscribe:
            continue
        counts = ranks_by_host(place(hosts, ranks, oversubscribe=True))
        extra = [counts[entry.name] - entry.slots for entry in hosts]
        full = [counts[entry.name] == entry.max_slots for entry in hosts]
        still_open = [number for number, is_full in zip(extra, full) if not is_full]
        assert max(still_open, default=0) - min(still_open, default=0) <= 1, (hosts, ranks)
        assert still_open == sorted(still_open, reverse=True), "the first hosts come first"
        assert max(extra) <= max(still_open, default=max(extra)) + 1, (hosts, ranks)


MANY = [host(f"n{number}", 1) for number in range(12)]

# What is asked for (hosts, ranks, whether to oversubscribe), and how the message starts.
TOO_MANY = {
    "one-more": (
        ([A2, B2], 5, False),
        "5 ranks don't fit: a has 2 slots, b has 2 slots, 4 in all. Ask for 4, name more hosts, or "
        "pass --oversubscribe.",
    ),
    "one-slot": (
        ([C1], 2, False),
        "2 ranks don't fit: c has 1 slot, 1 in all. Ask for 1, name more hosts, or pass "
        "--oversubscribe.",
    ),
    "max-allows": (([host("a", 1, 2)], 2, False), "2 ranks don't fit: a has 1 slot, 1 in all. Ask"),
    "max-forbids": (
        ([host("a", 1, 2)], 3, False),
        "3 ranks don't fit: a has 1 slot, 1 in all. Ask for 1, name more hosts.",
    ),
    "max-exceeded": (
        ([host("a", 1, 2), host("b", 3, 3)], 6, True),
        "6 ranks don't fit, even with --oversubscribe: a takes at most 2, b takes at most 3, 5 in "
        "all. Ask for 5, name more hosts, or raise their max_slots.",
    ),
    "many-hosts": (
        (MANY, 13, False),
        "13 ranks don't fit: "
        + "".join(f"n{number} has 1 slot, " for number in range(8))
        + "4 more hosts, 12 in all. Ask for 12",
    ),
    "zero": (([A2], 0, False), "0 ranks can't be placed; ask for 1 or more."),
    "negative": (([A2], -1, True), "-1 ranks can't be placed"),
    "no-hosts": (([], None, False), "No host to run on; expected at least one"),
    "no-hosts-with-ranks": (([], 2, True), "No host to run on"),
}


@pytest.mark.parametrize(("asked", "told"), TOO_MANY.values(), ids=TOO_MANY)
def test_what_does_not_fit(asked: tuple[list[Host], int | None, bool], told: str) -> None:
    hosts, ranks, oversubscribe = asked
    with pytest.raises(ConfigurationError) as raised:
        place(hosts, ranks, oversubscribe=oversubscribe)
    assert str(raised.value).startswith(told)


# GPUs by host, whether to share, GPU of each rank on a (4 ranks) and b (1 rank).
GPUS = {
    "unknown": (None, False, [None] * 5),
    "none-there": ({"a": 0, "b": 0}, False, [None] * 5),
    "one-each": ({"a": 4, "b": 1}, False, [0, 1, 2, 3, 0]),
    "more-than-ranks": ({"a": 8, "b": 8}, False, [0, 1, 2, 3, 0]),
    "one-host-known": ({"b": 2}, False, [None, None, None, None, 0]),
    "shared": ({"a": 2, "b": 1}, True, [0, 1, 0, 1, 0]),
    "shared-unevenly": ({"a": 3}, True, [0, 1, 2, 0, None]),
    "sharing-not-needed": ({"a": 4, "b": 2}, True, [0, 1, 2, 3, 0]),
    "sharing-without-gpus": ({"a": 0}, True, [None] * 5),
    "other-case": ({"A": 4, "B": 1}, False, [0, 1, 2, 3, 0]),
    "other-host": ({"c": 1}, False, [None] * 5),
}


@pytest.mark.parametrize(("gpus", "share", "expected"), GPUS.values(), ids=GPUS)
def test_gpus(gpus: dict[str, int] | None, share: bool, expected: list[int | None]) -> None:
    places = place([host("a", 4), host("b", 1)], None, gpus=gpus, share_gpus=share)
    assert [entry.gpus for entry in places] == [() if gpu is None else (gpu,) for gpu in expected]


def test_servers() -> None:
    """They have no use for a GPU, and leave theirs to workers."""
    places = place([host("a", 4), B2], None, servers=(1, 5), gpus={"a": 3, "b": 1})
    assert [entry.role for entry in places] == ["chief", "ps", "worker", "worker", "worker", "ps"]
    assert [entry.gpus for entry in places] == [(0,), (), (1,), (2,), (0,), ()]
    assert [entry.local_rank for entry in places] == [0, 1, 2, 3, 0, 1]
    with pytest.raises(ConfigurationError, match=r"more workers than GPUs: a has 2 GPUs for 3 wor"):
        place([host("a", 4), B2], None, servers=(1, 5), gpus={"a": 2, "b": 1})
    shared = place([host("a", 4)], None, servers=(1,), gpus={"a": 2}, share_gpus=True)
    assert [entry.gpus for entry in shared] == [(0,), (), (1,), (0,)]
    assert table(places).splitlines()[2] == "   1  a              1  ps        -      -"


def test_more_ranks_than_gpus() -> None:
    hosts = [host("a", 4), host("B", 2), host("c", 1)]
    with pytest.raises(ConfigurationError) as raised:
        place(hosts, None, gpus={"a": 2, "b": 1, "c": 1})
    message = str(raised.value)
    assert "a has 2 GPUs for 4 ranks, B has 1 GPU for 2 ranks." in message
    assert "--share-gpus" in message
    assert "CUDA_VISIBLE_DEVICES=-1" in message, "says what to do"
    # What counts are the ranks that a host gets, not its slots.
    assert [entry.gpus for entry in place(hosts, 2, gpus={"a": 2, "b": 1})] == [(0,), (1,)]
    with pytest.raises(ConfigurationError, match="a has 2 GPUs for 3 ranks"):
        place([host("a", 2)], 3, oversubscribe=True, gpus={"a": 2})


# GPUs by host, whether to share, GPUs of each rank on a (2 ranks) and b (1 rank), with 2 a rank.
PAIRS = {
    "just-enough": ({"a": 4, "b": 2}, False, [(0, 1), (2, 3), (0, 1)]),
    "unknown": (None, False, [(), (), ()]),
    "one-host-known": ({"a": 5}, False, [(0, 1), (2, 3), ()]),
    "shared": ({"a": 2, "b": 2}, True, [(0, 1), (0, 1), (0, 1)]),
    "shared-unevenly": ({"a": 3}, True, [(0, 1), (0, 2), ()]),
}


@pytest.mark.parametrize(("gpus", "share", "expected"), PAIRS.values(), ids=PAIRS)
def test_several_gpus_a_rank(
    gpus: dict[str, int] | None, share: bool, expected: list[tuple[int, ...]]
) -> None:
    places = place([A2, host("b", 1)], None, gpus=gpus, share_gpus=share, gpus_each=2)
    assert [entry.gpus for entry in places] == expected


def test_too_few_gpus_for_several_a_rank() -> None:
    too_few = r"few GPUs for 2 a rank \(--devices-per-rank\): a has 3 GPUs for 2 ranks\. .*--share"
    with pytest.raises(ConfigurationError, match=too_few):
        place([A2], None, gpus={"a": 3}, gpus_each=2)
    with pytest.raises(ConfigurationError, match=r"a has 1 GPU for 2 ranks\.") as raised:
        place([A2], None, gpus={"a": 1}, gpus_each=2, share_gpus=True)
    assert "--share-gpus" not in str(raised.value), "it is given"
    pairs = table(place([A2], None, gpus={"a": 4}, gpus_each=2)).splitlines()
    assert pairs[2] == "   1  a              1  worker  2,3      -"


# Ranks, cores of the host, cores of each rank.
CORES = {
    "even": (2, 8, [(0, 3), (4, 7)]),
    "alone": (1, 6, [(0, 5)]),
    "one-each": (3, 3, [(0, 0), (1, 1), (2, 2)]),
    "uneven": (3, 8, [(0, 1), (2, 4), (5, 7)]),
    "fewer-cores": (5, 2, [(0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]),
    "one-core": (2, 1, [(0, 0), (0, 0)]),
    "unknown": (2, 0, [None, None]),
}


@pytest.mark.parametrize(("ranks", "cores", "expected"), CORES.values(), ids=CORES)
def test_cores(ranks: int, cores: int, expected: list[tuple[int, int] | None]) -> None:
    assert [
        entry.cores for entry in place([host("a", ranks)], None, cores={"A": cores})
    ] == expected


def test_cores_are_each_given_once() -> None:
    for ranks, cores in itertools.product(range(1, 20), range(1, 40)):
        shares = [
            entry.cores or (0, -1) for entry in place([host("a", ranks)], None, cores={"a": cores})
        ]
        sizes = [last - first + 1 for first, last in shares]
        if ranks > cores:
            assert set(sizes) == {1}
            continue
        given = [core for first, last in shares for core in range(first, last + 1)]
        assert given == list(range(cores)), (ranks, cores)
        assert max(sizes) - min(sizes) <= 1, (ranks, cores)


def test_the_table() -> None:
    places = place(
        [host("node01", 2), host("b", 9)], None, gpus={"node01": 2}, cores={"node01": 24, "b": 9}
    )
    assert table(places).splitlines() == [
        "rank  host    local rank  role    GPU  cores",
        "   0  node01           0  chief     0   0-11",
        "   1  node01           1  worker    1  12-23",
        "   2  b                0  worker    -      0",
        "   3  b                1  worker    -      1",
        "   4  b                2  worker    -      2",
        "   5  b                3  worker    -      3",
        "   6  b                4  worker    -      4",
        "   7  b                5  worker    -      5",
        "   8  b                6  worker    -      6",
        "   9  b                7  worker    -      7",
        "  10  b                8  worker    -      8",
    ]


def test_the_table_without_what_is_not_known() -> None:
    assert table(place([C1], None)).splitlines() == [
        "rank  host  local rank  role   GPU  cores",
        "   0  c              0  chief    -      -",
    ]
    assert table([]) == "rank  host  local rank  role  GPU  cores"


def test_only_those_that_are_allowed_count() -> None:
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
