"""The faults of the chaos test: which, when, and that a seed repeats them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.launch.chaos_plan import KINDS, LASTS_S, LOSES_HOST, MOST_CALM_S, make_plan

HOSTS = ("a", "b", "c", "d")
SEEDS = range(300)


@pytest.mark.parametrize("duration_s", [0.0, 60.0, 120.0, 1200.0])
def test_a_seed_repeats_them(duration_s: float) -> None:
    plans = [make_plan(seed, duration_s, HOSTS, min_hosts=2) for seed in (7, 7, 8)]
    assert plans[0] == plans[1]
    assert (plans[0] != plans[2]) == (duration_s > 0)


@pytest.mark.parametrize("duration_s", [120.0, 130.0, 300.0, 1200.0])
def test_every_kind_comes_up(duration_s: float) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, duration_s, HOSTS, min_hosts=2)
        assert {fault.kind for fault in plan} == set(KINDS)
        assert len(plan) == duration_s // 20


def test_they_are_spread_over_the_time() -> None:
    for seed in SEEDS:
        times = [fault.at_s for fault in make_plan(seed, 400.0, HOSTS, min_hosts=2)]
        assert times == sorted(times)
        assert 0 <= times[0] <= 20
        assert 380 <= times[-1] <= 400
        assert all(later - earlier <= 40 for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("duration_s", "min_hosts", "cuts"),
    [(120.0, 2, 1), (480.0, 2, 2), (1200.0, 2, 2), (1200.0, 3, 1), (1200.0, 4, 0)],
)
def test_as_many_hosts_are_lost_as_can_be_spared(
    duration_s: float, min_hosts: int, cuts: int
) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, duration_s, HOSTS, min_hosts=min_hosts)
        lost = [fault.host for fault in plan if fault.kind == LOSES_HOST]
        assert len(lost) == len(set(lost)) == cuts


def test_nothing_happens_where_nothing_runs() -> None:
    for seed in SEEDS:
        left = set(HOSTS)
        for fault in make_plan(seed, 1200.0, HOSTS, min_hosts=2):
            assert fault.host in left
            if fault.kind == LOSES_HOST:
                left.remove(fault.host)


def test_the_first_host_keeps_its_link_and_has_the_disk() -> None:
    seen = set()
    for seed in SEEDS:
        for fault in make_plan(seed, 400.0, HOSTS, min_hosts=2):
            seen.add((fault.kind, fault.host))
    everywhere = {(kind, host) for kind in ("kill", "stop") for host in HOSTS}
    links = {(kind, host) for kind in ("cut", "interruption") for host in HOSTS[1:]}
    assert seen == {*everywhere, *links, ("full disk", "a")}


def test_how_long_they_last() -> None:
    early = set()
    for seed in SEEDS:
        plan = make_plan(seed, 400.0, HOSTS, min_hosts=2)
        for before, fault in pairwise(plan):
            shortest, longest = LASTS_S.get(fault.kind, (0.0, 0.0))
            assert shortest <= fault.lasts_s <= longest
            assert 0 <= fault.calm_s <= MOST_CALM_S
            assert (fault.room_bytes > 0) <= (fault.kind == "full disk")
            if fault.early:
                early.add((before.kind, fault.kind))
    # Ranks start again after these alone.
    assert early == {(kind, "kill") for kind in ("kill", "stop", "cut")}


def test_an_elastic_job_goes_on_without_ranks_that_are_killed() -> None:
    for seed in SEEDS:
        left, running = set(HOSTS), set(HOSTS)
        for fault in make_plan(seed, 1200.0, HOSTS, min_hosts=2, elastic=True):
            assert fault.host in (running if fault.kind in ("kill", "stop") else left)
            assert not fault.early or running == left
            if fault.kind == "kill":
                assert fault.host != "a", "the chief has the disk"
                running.remove(fault.host)
            elif fault.kind == LOSES_HOST:
                left.remove(fault.host)
            if fault.kind in ("stop", LOSES_HOST) or len(running) < 2:
                running = set(left)
