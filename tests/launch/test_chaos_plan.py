"""The plans of the chaos test."""

from __future__ import annotations

import pytest

from tests.launch.chaos_plan import KINDS, LOSES_HOST, make_plan

HOSTS = ("a", "b", "c", "d")
SEEDS = range(300)


@pytest.mark.parametrize("duration_s", [0.0, 60.0, 120.0, 1200.0])
def test_a_seed_repeats_the_plan(duration_s: float) -> None:
    plans = [make_plan(seed, duration_s, HOSTS, min_hosts=2) for seed in (7, 7, 8)]
    assert plans[0] == plans[1]
    assert (plans[0] != plans[2]) == (duration_s > 0)


@pytest.mark.parametrize("duration_s", [120.0, 130.0, 300.0, 1200.0])
def test_every_kind_occurs(duration_s: float) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, duration_s, HOSTS, min_hosts=2)
        assert {fault.kind for fault in plan} == set(KINDS)
        assert len(plan) == duration_s // 20


@pytest.mark.parametrize(
    ("duration_s", "min_hosts", "cuts"),
    [(120.0, 2, 1), (480.0, 2, 2), (1200.0, 2, 2), (1200.0, 3, 1), (1200.0, 4, 0)],
)
def test_as_many_hosts_are_lost_as_allowed(duration_s: float, min_hosts: int, cuts: int) -> None:
    for seed in SEEDS:
        plan = make_plan(seed, duration_s, HOSTS, min_hosts=min_hosts)
        lost = [fault.host for fault in plan if fault.kind == LOSES_HOST]
        assert len(lost) == len(set(lost)) == cuts


def test_faults_only_affect_hosts_with_ranks() -> None:
    for seed in SEEDS:
        left = set(HOSTS)
        for fault in make_plan(seed, 1200.0, HOSTS, min_hosts=2):
            assert fault.host in left
            if fault.kind == LOSES_HOST:
                left.remove(fault.host)


def test_elastic_faults_only_affect_running_ranks() -> None:
    for seed in SEEDS:
        left, running = set(HOSTS), set(HOSTS)
        for fault in make_plan(seed, 1200.0, HOSTS, min_hosts=2, elastic=True):
            assert fault.host in (running if fault.kind in ("kill", "stop") else left)
            assert not fault.early or running == left
            if fault.kind == "kill":
                assert fault.host != "a", "the chief writes to the disk"
                running.remove(fault.host)
            elif fault.kind == LOSES_HOST:
                left.remove(fault.host)
            if fault.kind in ("stop", LOSES_HOST) or len(running) < 2:
                running = set(left)
