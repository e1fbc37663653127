"""``hvdtrain run`` with other MPIs, on this host and on the cluster over ssh."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import OWN_DEFAULTS, ClusterJob, StartedJob, program
from tests.testbed.cluster import Cluster

pytestmark = pytest.mark.timeout(180)

# How each library identifies itself.
LIBRARIES = {
    "openmpi4": "Open MPI v4.",
    "mpich": "MPICH Version",
    "intel-mpi": "Intel(R) MPI Library",
}
TALK = """
import numpy as np
from mpi4py import MPI
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create
from hvdtrain.config import read_settings

place = read_topology(os.environ)
engine = create(place, read_settings(os.environ))
total = engine.allreduce(np.full(1000, place.rank + 1, np.float32))
library = MPI.Get_library_version().split("\\n")[0]
seen = (place.rank, place.size, place.local_rank, place.local_size, int(total[0]), library)
# In one write: mpirun may interleave the output of ranks.
sys.stdout.write(";".join(map(str, ["seen", *seen, "\\n"])))
engine.transport.leave()
"""
READY = "open(os.path.join({folder!r}, str(rank)), 'w').close(); time.sleep(120)"
HOSTS = "node1:1,node2:2"


@dataclass(frozen=True)
class OtherMpi:
    """An environment with another MPI."""

    name: str
    python: Path

    @property
    def hvdtrain_run(self) -> list[str]:
        return [str(self.python), "-m", "hvdtrain", "run", "--no-collapse"]

    @property
    def path(self) -> str:
        """A PATH with this MPI first."""
        return os.pathsep.join([str(self.python.parent), os.defpath])

    @property
    def environ(self) -> dict[str, str | None]:
        """Environment variables with hvdtrain's own defaults."""
        return {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY), "PATH": self.path}


@pytest.fixture(params=LIBRARIES)
def mpi(request: pytest.FixtureRequest, environment: Callable[[str], Path]) -> OtherMpi:
    return OtherMpi(request.param, environment(request.param))


def seen_by_ranks(output: str) -> list[list[str]]:
    """Return the output of ``TALK``, in the order of ranks."""
    return sorted(
        line.rstrip().partition("seen;")[2].split(";")
        for line in output.splitlines()
        if "seen;" in line
    )


@pytest.mark.mpi
def test_ranks_communicate(mpi: OtherMpi, run_command) -> None:
    argv = [*mpi.hvdtrain_run, "-np", "3", "--", *program(TALK)]
    done = run_command(argv, env=mpi.environ)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "3", str(r), "3", "6"] for r in range(3)]
    assert all(LIBRARIES[mpi.name] in place[5] for place in seen), done


@pytest.mark.mpi
def test_ranks_communicate_under_mpirun(mpi: OtherMpi, run_command) -> None:
    environ = {"PYTHONPATH": str(REPOSITORY), "PATH": mpi.path}
    done = run_command(["mpirun", "-np", "2", *program(TALK)], env=environ)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "2", str(r), "2", "3"] for r in range(2)]


@pytest.mark.mpi
def test_no_bind(mpi: OtherMpi, run_command) -> None:
    """Intel MPI and Open MPI bind ranks by default."""
    body = "from mpi4py import MPI; print(len(os.sched_getaffinity(0)))"
    argv = [*mpi.hvdtrain_run, "-np", "2", "--no-bind", "--chief-only", "--", *program(body)]
    done = run_command(argv, env=mpi.environ)
    assert (done.returncode, done.stdout) == (0, f"{len(os.sched_getaffinity(0))}\n"), done


@pytest.mark.mpi
def test_the_first_failure_is_named(mpi: OtherMpi, run_command) -> None:
    body = "time.sleep(0.3)\nif rank == 1: sys.exit(7)\ntime.sleep(60)"
    done = run_command([*mpi.hvdtrain_run, "-np", "2", "--", *program(body)], env=mpi.environ)
    assert done.returncode == 7, done
    assert "failed first: exit code 7" in done.stderr
    assert "rank 1 on " in done.stderr


@pytest.mark.mpi
def test_elastic_is_not_available(mpi: OtherMpi, run_command, tmp_path: Path) -> None:
    body = f"""
print(os.environ['HVDTRAIN_ELASTIC'])
printed = {str(tmp_path)!r} + '/' + os.environ['HVDTRAIN_ATTEMPT']
if rank == 0:
    open(printed, 'w').close()
while not os.path.exists(printed):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), 9)
"""
    argv = [*mpi.hvdtrain_run, "-np", "2", "--elastic", "--max-restarts", "1", "--"]
    done = run_command([*argv, *program(body)], env=mpi.environ)
    assert done.returncode == 137, done
    assert "hvdtrain run: --elastic is not available: it requires Open MPI 5" in done.stderr
    assert "the job restarts when a rank is lost" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[0] 0", "[1] 0", "[1] 0"]


@pytest.mark.mpi
def test_an_interrupt_leaves_no_processes(
    mpi: OtherMpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", mpi.path)
    ready = READY.format(folder=str(tmp_path))
    job = StartedJob(["-np", "2"], ready, uuid.uuid4().hex, command=mpi.hvdtrain_run)
    try:
        job.wait_for(2, tmp_path)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=20) == 130
        job.seconds_until_nothing_is_left(5.0)
    finally:
        job.end()


@pytest.mark.mpi
def test_only_pythons_folder_precedes_the_users_path(environment, run_command) -> None:
    mpi = OtherMpi("openmpi4", environment("openmpi4"))
    path = f"/usr/local/bin:{os.defpath}"
    argv = [*mpi.hvdtrain_run, "-np", "1", "--", *program("print(os.environ['PATH'])")]
    done = run_command(argv, env={**mpi.environ, "PATH": path})
    assert (done.returncode, done.stdout) == (0, f"[0] {mpi.python.parent}:{path}\n"), done


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["the project's", "mpich", "intel-mpi"])
def test_the_mpirun_next_to_python_comes_first(name: str, environment, run_command) -> None:
    ours = Path(sys.executable)
    mpi = OtherMpi(name, ours if name == "the project's" else environment(name))
    if not mpi.python.with_name("mpirun").exists():
        pytest.skip("pip installs no mpirun")
    others = [os.defpath, str(ours.parent)]
    argv = [*mpi.hvdtrain_run, "-np", "2", "--dry-run", "--", "true"]
    for path in (others, others[::-1]):
        done = run_command(argv, env={**mpi.environ, "PATH": os.pathsep.join(path)})
        assert done.returncode == 0, done
        assert f"\n{mpi.python.with_name('mpirun')} -np 2 " in done.stdout


def test_ranks_run_where_planned_over_ssh(mpi: OtherMpi, cluster: Cluster) -> None:
    run = [*mpi.hvdtrain_run, "-H", HOSTS]
    plan = cluster.run([*run, "--dry-run", "--", "true"], env=mpi.environ, timeout_s=30)
    assert plan.returncode == 0, plan
    planned = [line.split()[:3] for line in plan.stdout.splitlines()[1:4]]
    assert planned == [["0", "node1", "0"], ["1", "node2", "0"], ["2", "node2", "1"]]
    body = TALK.replace("library)", "library, os.uname().nodename)")
    done = cluster.run([*run, "--", *program(body)], env=mpi.environ, timeout_s=60)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [[place[0], place[6], place[2]] for place in seen] == planned, done
    assert [place[3] for place in seen] == ["1", "2", "2"]
    assert {(place[1], place[4]) for place in seen} == {("3", "6")}


def test_an_interrupt_over_ssh_leaves_no_processes(mpi: OtherMpi, cluster: Cluster) -> None:
    run = [*mpi.hvdtrain_run, "-H", HOSTS, "--"]
    with ClusterJob(cluster, lambda body: [*run, *program(body)], 3, mpi.environ) as job:
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=20) == 130
        job.assert_all_gone()
