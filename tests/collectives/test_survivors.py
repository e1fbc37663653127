"""Ranks that die in operations, between them, and while the others recover: those left go on."""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.collectives.survivors import Death, Plan
from tests.harness.jobs import REPOSITORY, Completed
from tests.testbed.cluster import Cluster

# Far more than recovery takes, for machines that are busy with other things.
LIMIT_S = 30.0

TWO_HOSTS = (0, 0, 1, 1)
ENGINES = [
    pytest.param("mpi", (0, 0, 0, 0), id="mpi"),
    pytest.param("shared_memory", (0, 0, 0, 0), id="one-host"),
    pytest.param("arena", (0, 0, 0, 0), id="arena"),
    pytest.param("shared_memory", TWO_HOSTS, id="two-hosts"),
]


@pytest.fixture
def survive(
    run_command, mpirun, forked_python: list[str], tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """Run a plan; returns what the ranks that came to the end said, after the common checks."""

    def run(**asked: Any) -> list[dict[str, Any]]:
        plan = Plan(folder=str(tmp_path), **asked)
        module = [*forked_python, "-m", "tests.collectives.survivors", plan.to_json()]
        argv = mpirun(len(plan.hosts), module)
        for _ in range(2):
            done = run_command([argv[0], "--with-ft", "ulfm", *argv[1:]], timeout_s=90)
            assert done.returncode == 0, done
            if not _mpi_crashed(done):
                break
        return accounts(done, plan)

    return run


def _mpi_crashed(done: Completed) -> bool:
    """Whether a loss came while Open MPI activated a communicator; see docs/elastic.md."""
    return bool(re.search(r"Segmentation fault\n\n.*\n.* in _shrink\n", done.stderr))


def accounts(done: Completed, plan: Plan) -> list[dict[str, Any]]:
    """What each survivor said, by rank; fails where they don't agree."""
    files = sorted(Path(plan.folder).glob("*.json"))
    said = [json.loads(file.read_text()) for file in files]
    mortal = {death.rank for death in plan.deaths}
    alive = [account["me"] for account in said]
    assert set(range(len(plan.hosts))) - mortal <= set(alive), done
    first = said[0]
    for account in said:
        assert len(account["done"]) == plan.operations
        assert account["done"] == first["done"], "the ranks have different results"
        assert account["members"] == first["members"]
        assert account["generation"] == first["generation"]
        assert account["rank"] == account["members"].index(account["me"])
    left = set(range(len(plan.hosts)))
    for name, members, _ in first["done"]:
        if members is not None:
            assert set(members) <= left, f"a dead rank had a part in {name}"
            assert members == sorted(members)
            left = set(members)
    assert left >= set(first["members"]) >= set(alive)
    return said


def _dead(said: Sequence[dict[str, Any]], size: int) -> set[int]:
    return set(range(size)) - set(said[0]["members"])


@pytest.mark.parametrize(("kind", "hosts"), ENGINES)
@pytest.mark.parametrize("turn", range(3))
def test_any_moment(survive, kind: str, hosts: tuple[int, ...], turn: int) -> None:
    """Two ranks die at random moments, one of them the chief."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    deaths = tuple(
        Death(rank=rank, after_s=chance.uniform(0.0, 0.4)) for rank in (0, chance.choice((1, 2, 3)))
    )
    said = survive(kind=kind, hosts=hosts, deaths=deaths, operations=900)
    longest_s = max(account["longest_s"] for account in said)
    print(f"{longest_s * 1000:.0f} ms in the longest operation, {said[0]['generation']} recoveries")
    assert longest_s < LIMIT_S


STAGES = {
    "mpi": (
        *("allreduce", "agree", "confirm", "_counts", "gather_bytes"),
        *("_scatter", "_combine", "_gather", "finish"),
        *("broadcast_bytes", "_reduce_rows", "alltoall_bytes", "_operate"),
    ),
    "one-host": ("agree", "_pack", "_reduce", "_unpack", "_look", "_signal", "confirm"),
    "arena": ("_pack", "_reduce", "_find_buffers", "_look", "_unpack"),
    "two-hosts": (
        *("agree", "_pack", "_reduce", "_send", "_receive", "_unpack", "_look", "confirm"),
        *("_scatter", "_combine", "_gather"),
    ),
    "small": ("_all_made_it", "_cross_small", "_tell_host", "_hear_hosts", "_copy_out"),
}
HOSTS = {"two-hosts": TWO_HOSTS, "small": (0, 0, 1, 2)}


# One operation passes these many times.
OF_CHUNKS = {
    *("_pack", "_reduce", "_send", "_receive", "_unpack", "_look", "_signal"),
    *("_scatter", "_combine", "_gather", "finish"),
}


def _stages() -> list[Any]:
    kinds = dict.fromkeys(("one-host", *HOSTS), "shared_memory")
    return [
        pytest.param(
            kinds.get(name, name),
            HOSTS.get(name, (0, 0, 0)),
            stage,
            1 << 16 if name == "small" else 4096,
            id=f"{name}-{stage}",
        )
        for name, stages in STAGES.items()
        for stage in stages
    ]


@pytest.mark.parametrize(("kind", "hosts", "stage", "chunk_bytes"), _stages())
def test_each_stage(
    survive, kind: str, hosts: tuple[int, ...], stage: str, chunk_bytes: int
) -> None:
    """The last rank dies on the way in, the chief some operations later."""
    later = 20 if stage in OF_CHUNKS else 6
    deaths = (
        Death(rank=len(hosts) - 1, where=stage, call=2),
        Death(rank=0, where=stage, call=later),
    )
    said = survive(kind=kind, hosts=hosts, deaths=deaths, operations=60, chunk_bytes=chunk_bytes)
    assert _dead(said, len(hosts)) == {0, len(hosts) - 1}
    assert said[0]["generation"] == 2


@pytest.mark.parametrize("call", [2, 4])
def test_the_chief_dies_before_it_gives_its_part(survive, call: int) -> None:
    """Where all of them are small Open MPI gathers them at the chief, and misses its death."""
    deaths = (Death(rank=0, where="gather_bytes", call=call),)
    said = survive(kind="mpi", hosts=(0, 0, 0, 0), deaths=deaths, operations=20)
    assert _dead(said, 4) == {0}


# The steps that every engine does in its own way; the others are the same code for all.
OWN_STEPS = ("revoke", "connect", "rest")
STEPS = (*OWN_STEPS, "_stop", "stop", "_reconnect", "_shrink", "_agree_that", "go_on")


@pytest.mark.parametrize(
    ("kind", "hosts", "step"),
    [
        pytest.param(*engine.values, step, id=f"{engine.id}-{step}")
        for engine in ENGINES
        for step in (STEPS if engine.id == "two-hosts" else OWN_STEPS)
    ],
)
def test_death_in_recovery(survive, kind: str, hosts: tuple[int, ...], step: str) -> None:
    """While the ranks go on without the second, the chief dies as well."""
    second = Death(rank=0, where=step)
    if step == "rest":
        second = Death(rank=0, where="carry_out", call=11)
    deaths = (Death(rank=1, where="carry_out", call=10), second)
    said = survive(kind=kind, hosts=hosts, deaths=deaths, operations=40)
    assert _dead(said, len(hosts)) == {0, 1}
    assert said[0]["generation"] in (1, 2)


@pytest.mark.parametrize("kind", ["mpi", "shared_memory"])
def test_on_two_hosts(cluster: Cluster, kind: str) -> None:
    """Over a network, where one of the dead leaves a host with a single rank."""
    deaths = (Death(rank=3, after_s=0.3), Death(rank=0, after_s=0.6))
    said = _survive_on_two_hosts(cluster, kind=kind, deaths=deaths, operations=900)
    longest_s = max(account["longest_s"] for account in said)
    print(f"{longest_s * 1000:.0f} ms in the longest operation, {said[0]['generation']} recoveries")
    assert longest_s < LIMIT_S


@pytest.mark.parametrize("part", [1, 6])
def test_within_an_allreduce_between_hosts(cluster: Cluster, part: int) -> None:
    """In the middle of it, and in its last part, which has none after it."""
    deaths = (Death(rank=3, where="_scatter", call=part),)
    said = _survive_on_two_hosts(cluster, kind="mpi", deaths=deaths, operations=40)
    assert _dead(said, 4) == {3}


def _survive_on_two_hosts(cluster: Cluster, **asked: Any) -> list[dict[str, Any]]:
    folder = tempfile.mkdtemp(dir=cluster.folder)
    plan = Plan(folder=folder, hosts=TWO_HOSTS, **asked)
    hostfile = cluster.folder / "two"
    hostfile.write_text("node1 slots=2\nnode2 slots=2\n")
    mpirun = [f"{sys.prefix}/bin/mpirun", "--with-ft", "ulfm", "--prefix", sys.prefix]
    where = ["--hostfile", str(hostfile), "--bind-to", "none", "-np", "4"]
    passed_on = [word for name in ("PYTHONPATH", "OMPI_MCA_osc") for word in ("-x", name)]
    program = [sys.executable, "-m", "tests.collectives.survivors", plan.to_json()]
    environ = {
        "PYTHONPATH": str(REPOSITORY),
        "OMPI_MCA_osc": "^ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    done = cluster.run([*mpirun, *where, *passed_on, *program], env=environ, timeout_s=100)
    assert done.returncode == 0, done
    return accounts(done, plan)
