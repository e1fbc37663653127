"""Recovery from the death of ranks in operations, between them, and during recovery."""

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

# Recovery takes far less time than this, except on busy machines.
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
    """Run a plan and check the reports of the surviving ranks, which it returns."""

    def run(**options: Any) -> list[dict[str, Any]]:
        plan = Plan(folder=str(tmp_path), **options)
        module = [*forked_python, "-m", "tests.collectives.survivors", plan.to_json()]
        argv = mpirun(len(plan.hosts), module)
        for _ in range(2):
            done = run_command([argv[0], "--with-ft", "ulfm", *argv[1:]], timeout_s=90)
            assert done.returncode == 0, done
            if not _mpi_crashed(done):
                break
        return read_reports(done, plan)

    return run


def _mpi_crashed(done: Completed) -> bool:
    """Return whether a rank died while Open MPI activated a communicator.

    docs/elastic.md describes this limitation.
    """
    return bool(re.search(r"Segmentation fault\n\n.*\n.* in _shrink\n", done.stderr))


def read_reports(done: Completed, plan: Plan) -> list[dict[str, Any]]:
    """Return the reports of the survivors by rank, which must agree."""
    files = sorted(Path(plan.folder).glob("*.json"))
    reports = [json.loads(file.read_text()) for file in files]
    mortal = {death.rank for death in plan.deaths}
    alive = [report["member"] for report in reports]
    assert set(range(len(plan.hosts))) - mortal <= set(alive), done
    first = reports[0]
    for report in reports:
        assert len(report["results"]) == plan.operations
        assert report["results"] == first["results"], "the ranks have different results"
        assert report["members"] == first["members"]
        assert report["generation"] == first["generation"]
        assert report["rank"] == report["members"].index(report["member"])
    remaining = set(range(len(plan.hosts)))
    for name, members, _ in first["results"]:
        if members is not None:
            assert set(members) <= remaining, f"a dead rank contributed to {name}"
            assert members == sorted(members)
            remaining = set(members)
    assert remaining >= set(first["members"]) >= set(alive)
    return reports


def _dead(reports: Sequence[dict[str, Any]], size: int) -> set[int]:
    return set(range(size)) - set(reports[0]["members"])


@pytest.mark.parametrize(("kind", "hosts"), ENGINES)
@pytest.mark.parametrize("turn", range(2))
def test_two_ranks_die_at_random_times(
    survive, kind: str, hosts: tuple[int, ...], turn: int
) -> None:
    """One of them is the chief."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    deaths = tuple(
        Death(rank=rank, after_s=chance.uniform(0.0, 0.4)) for rank in (0, chance.choice((1, 2, 3)))
    )
    reports = survive(kind=kind, hosts=hosts, deaths=deaths, operations=900)
    longest_s = max(report["longest_s"] for report in reports)
    print(
        f"{longest_s * 1000:.0f} ms in the longest operation, {reports[0]['generation']} recoveries"
    )
    assert longest_s < LIMIT_S


STAGES = {
    "mpi": (
        *("allreduce", "agree", "confirm", "_counts", "gather_bytes"),
        *("_scatter", "_combine", "_gather", "finish"),
        *("broadcast_bytes", "_reduce_rows", "alltoall_bytes", "_operate"),
    ),
    "one-host": ("agree", "_pack", "_reduce", "_unpack", "_check_finite", "_signal", "confirm"),
    "arena": ("_pack", "_reduce", "_find_buffers", "_check_finite", "_unpack"),
    "two-hosts": (
        *("agree", "_pack", "_reduce", "_send", "_receive", "_unpack", "_check_finite", "confirm"),
        *("_scatter", "_combine", "_gather"),
    ),
    "small": (
        "_digests_match",
        "_cross_small",
        "_publish_agreement",
        "_await_agreement",
        "_copy_out",
    ),
}
HOSTS = {"two-hosts": TWO_HOSTS, "small": (0, 0, 1, 2)}


# Called many times in an operation.
OF_CHUNKS = {
    *("_pack", "_reduce", "_send", "_receive", "_unpack", "_check_finite", "_signal"),
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
def test_ranks_die_in_each_stage(
    survive, kind: str, hosts: tuple[int, ...], stage: str, chunk_bytes: int
) -> None:
    """The last rank dies first, and the chief dies some operations later."""
    later = 20 if stage in OF_CHUNKS else 6
    deaths = (
        Death(rank=len(hosts) - 1, where=stage, call=2),
        Death(rank=0, where=stage, call=later),
    )
    reports = survive(kind=kind, hosts=hosts, deaths=deaths, operations=60, chunk_bytes=chunk_bytes)
    assert _dead(reports, len(hosts)) == {0, len(hosts) - 1}
    assert reports[0]["generation"] == 2


@pytest.mark.parametrize("call", [2, 4])
def test_the_chief_dies_before_it_contributes(survive, call: int) -> None:
    """Open MPI's own gather of small data at the chief would miss its death."""
    deaths = (Death(rank=0, where="gather_bytes", call=call),)
    reports = survive(kind="mpi", hosts=(0, 0, 0, 0), deaths=deaths, operations=20)
    assert _dead(reports, 4) == {0}


WAITS = """
import os, signal, time
import numpy as np
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives.mpi_start import start_mpi
from hvdtrain.collectives.recovery import await_messages

mpi = start_mpi(read_topology(os.environ))
comm = mpi.COMM_WORLD
comm.Barrier()
if comm.Get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 20
while not comm.Get_failed().Get_size() and time.monotonic() < end:
    comm.Iprobe(0)  # reads the news
    time.sleep(0.01)
for wait in (lambda requests: await_messages(mpi, requests), mpi.Request.Testall):
    requests = [comm.Irecv(np.empty(4), 1), comm.Isend(np.ones(4), 0), comm.Irecv(np.empty(4), 0)]
    try:
        while not wait(requests) and time.monotonic() < end:
            pass
    except mpi.Exception as error:
        print(error, flush=True)
os._exit(0)
"""


def test_messages_of_a_rank_that_is_known_to_be_dead_are_errors(
    run_command, mpirun, forked_python: list[str]
) -> None:
    argv = mpirun(2, [*forked_python, "-c", WAITS])
    done = run_command([argv[0], "--with-ft", "ulfm", *argv[1:]], timeout_s=60)
    assert done.stdout.count("MPI_ERR") == 2, done


# Steps that differ between transports; the other steps share their code.
OWN_STEPS = ("revoke", "connect", "rest")
STEPS = (*OWN_STEPS, "_stop", "stop", "_reconnect", "_shrink", "_agree_that", "resume")


@pytest.mark.parametrize(
    ("kind", "hosts", "step"),
    [
        pytest.param(*engine.values, step, id=f"{engine.id}-{step}")
        for engine in ENGINES
        for step in (STEPS if engine.id == "two-hosts" else OWN_STEPS)
    ],
)
def test_the_chief_dies_during_recovery(
    survive, kind: str, hosts: tuple[int, ...], step: str
) -> None:
    second = Death(rank=0, where=step)
    if step == "rest":
        second = Death(rank=0, where="run", call=11)
    deaths = (Death(rank=1, where="run", call=10), second)
    reports = survive(kind=kind, hosts=hosts, deaths=deaths, operations=40)
    assert _dead(reports, len(hosts)) == {0, 1}
    assert reports[0]["generation"] in (1, 2)


@pytest.mark.parametrize("kind", ["mpi", "shared_memory"])
def test_ranks_die_on_two_hosts(cluster: Cluster, kind: str) -> None:
    """One death leaves a host with a single rank."""
    deaths = (Death(rank=3, after_s=0.3), Death(rank=0, after_s=0.6))
    reports = _survive_on_two_hosts(cluster, kind=kind, deaths=deaths, operations=900)
    longest_s = max(report["longest_s"] for report in reports)
    print(
        f"{longest_s * 1000:.0f} ms in the longest operation, {reports[0]['generation']} recoveries"
    )
    assert longest_s < LIMIT_S


@pytest.mark.parametrize("part", [1, 6])
def test_a_rank_dies_within_an_allreduce_between_hosts(cluster: Cluster, part: int) -> None:
    """The rank dies in the middle of the operation, or in its last segment."""
    deaths = (Death(rank=3, where="_scatter", call=part),)
    reports = _survive_on_two_hosts(cluster, kind="mpi", deaths=deaths, operations=40)
    assert _dead(reports, 4) == {3}


def _survive_on_two_hosts(cluster: Cluster, **options: Any) -> list[dict[str, Any]]:
    folder = tempfile.mkdtemp(dir=cluster.folder)
    plan = Plan(folder=folder, hosts=TWO_HOSTS, **options)
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
    return read_reports(done, plan)
