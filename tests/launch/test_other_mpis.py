"""``hvdtrain run`` with other MPIs than the project's own, here and on the cluster over ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import OWN_DEFAULTS, StartedJob, program
from tests.testbed.cluster import Cluster

pytestmark = pytest.mark.timeout(180)

# What each says that it is.
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
everyone = create(place, read_settings(os.environ))
total = everyone.allreduce(np.full(1000, place.rank + 1, np.float32))
library = MPI.Get_library_version().split("\\n")[0]
seen = (place.rank, place.size, place.local_rank, place.local_size, int(total[0]), library)
# In one piece: mpirun may mix what ranks write.
sys.stdout.write(";".join(map(str, ["seen", *seen, "\\n"])))
everyone.transport.leave()
"""
BEGUN = "open(os.path.join({folder!r}, str(rank)), 'w').close(); time.sleep(120)"
HOSTS = "node1:1,node2:2"


@dataclass(frozen=True)
class OtherMpi:
    """An environment with an MPI of its own."""

    name: str
    python: Path

    @property
    def hvdtrain_run(self) -> list[str]:
        return [str(self.python), "-m", "hvdtrain", "run", "--no-collapse"]

    @property
    def path(self) -> str:
        """PATH where no other MPI is first."""
        return os.pathsep.join([str(self.python.parent), os.defpath])

    @property
    def environ(self) -> dict[str, str | None]:
        """An environment in which hvdtrain's own defaults are on trial."""
        return {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY), "PATH": self.path}


@pytest.fixture(params=LIBRARIES)
def mpi(request: pytest.FixtureRequest, environment: Callable[[str], Path]) -> OtherMpi:
    return OtherMpi(request.param, environment(request.param))


def seen_by_ranks(output: str) -> list[list[str]]:
    """What ``TALK`` printed, in the order of ranks."""
    return sorted(
        line.rstrip().partition("seen;")[2].split(";")
        for line in output.splitlines()
        if "seen;" in line
    )


@pytest.mark.mpi
def test_ranks_talk(mpi: OtherMpi, run_command) -> None:
    argv = [*mpi.hvdtrain_run, "-np", "3", "--", *program(TALK)]
    done = run_command(argv, env=mpi.environ)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "3", str(r), "3", "6"] for r in range(3)]
    assert all(LIBRARIES[mpi.name] in place[5] for place in seen), done


@pytest.mark.mpi
def test_ranks_talk_under_its_mpirun_alone(mpi: OtherMpi, run_command) -> None:
    environ = {"PYTHONPATH": str(REPOSITORY), "PATH": mpi.path}
    done = run_command(["mpirun", "-np", "2", *program(TALK)], env=environ)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "2", str(r), "2", "3"] for r in range(2)]


@pytest.mark.mpi
def test_ranks_stay_unbound_on_request(mpi: OtherMpi, run_command) -> None:
    """Intel MPI and Open MPI would bind them, before or while MPI starts."""
    body = "from mpi4py import MPI; print(len(os.sched_getaffinity(0)))"
    argv = [*mpi.hvdtrain_run, "-np", "2", "--no-bind", "--chief-only", "--", *program(body)]
    done = run_command(argv, env=mpi.environ)
    assert (done.returncode, done.stdout) == (0, f"{len(os.sched_getaffinity(0))}\n"), done


@pytest.mark.mpi
def test_a_failing_rank_is_named_with_its_code(mpi: OtherMpi, run_command) -> None:
    body = "time.sleep(0.3)\nif rank == 1: sys.exit(7)\ntime.sleep(60)"
    done = run_command([*mpi.hvdtrain_run, "-np", "2", "--", *program(body)], env=mpi.environ)
    assert done.returncode == 7, done
    assert "failed first: exit code 7" in done.stderr
    assert "rank 1 on " in done.stderr


@pytest.mark.mpi
def test_ranks_do_not_go_on_without_a_lost_one(mpi: OtherMpi, run_command) -> None:
    body = (
        "print(os.environ['HVDTRAIN_ELASTIC']); time.sleep(0.3)\nif rank: os.kill(os.getpid(), 9)"
    )
    argv = [*mpi.hvdtrain_run, "-np", "2", "--elastic", "--max-restarts", "1", "--"]
    done = run_command([*argv, *program(body)], env=mpi.environ)
    assert done.returncode == 137, done
    assert "hvdtrain run: --elastic can't be had: only Open MPI 5" in done.stderr
    assert "the job is started again when a rank is lost" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[0] 0", "[1] 0", "[1] 0"]


@pytest.mark.mpi
def test_an_interrupt_leaves_nothing(
    mpi: OtherMpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", mpi.path)
    begun = BEGUN.format(folder=str(tmp_path))
    job = StartedJob(["-np", "2"], begun, uuid.uuid4().hex, command=mpi.hvdtrain_run)
    try:
        job.wait_for(2, tmp_path)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(timeout=20) == 130
        job.seconds_until_nothing_is_left(5.0)
    finally:
        job.end()


@pytest.mark.mpi
def test_programs_are_found_in_the_users_order(environment, run_command) -> None:
    """Only Python's folder goes before it, not that of an mpirun which PATH leads to anyway."""
    mpi = OtherMpi("openmpi4", environment("openmpi4"))
    path = f"/usr/local/bin:{os.defpath}"
    argv = [*mpi.hvdtrain_run, "-np", "1", "--", *program("print(os.environ['PATH'])")]
    done = run_command(argv, env={**mpi.environ, "PATH": path})
    assert (done.returncode, done.stdout) == (0, f"[0] {mpi.python.parent}:{path}\n"), done


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["the project's", "mpich", "intel-mpi"])
def test_the_mpirun_beside_python_comes_first(name: str, environment, run_command) -> None:
    """Whatever PATH leads to: mpi4py loads the library beside Python, too."""
    ours = Path(sys.executable)
    mpi = OtherMpi(name, ours if name == "the project's" else environment(name))
    if not mpi.python.with_name("mpirun").exists():
        pytest.skip("pip brought no mpirun")
    others = [os.defpath, str(ours.parent)]
    argv = [*mpi.hvdtrain_run, "-np", "2", "--dry-run", "--", "true"]
    for path in (others, others[::-1]):
        done = run_command(argv, env={**mpi.environ, "PATH": os.pathsep.join(path)})
        assert done.returncode == 0, done
        assert f"\n{mpi.python.with_name('mpirun')} -np 2 " in done.stdout


def test_over_ssh_the_plan_is_what_happens(mpi: OtherMpi, cluster: Cluster) -> None:
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


@pytest.fixture
def remote_job(mpi: OtherMpi, cluster: Cluster) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A job on two hosts whose ranks wait, and what all its processes have in the environment."""
    mark, folder = uuid.uuid4().hex, cluster.folder / uuid.uuid4().hex
    folder.mkdir()
    words = ["-H", HOSTS, "-x", "HVDTRAIN_TEST_MARK", "--"]
    process = cluster.start(
        [*mpi.hvdtrain_run, *words, *program(BEGUN.format(folder=str(folder)))],
        env={**mpi.environ, "HVDTRAIN_TEST_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    marker = f"HVDTRAIN_TEST_MARK={mark}"
    deadline = time.monotonic() + 40
    try:
        while len(os.listdir(folder)) < 3:
            assert time.monotonic() < deadline, "the ranks did not start"
            assert process.poll() is None, process.communicate(timeout=10)
            time.sleep(0.05)
        yield process, marker
    finally:
        for left in cluster.processes(marker):
            os.kill(left.pid, signal.SIGKILL)
        process.communicate(timeout=10)


def test_over_ssh_an_interrupt_leaves_nothing(remote_job, cluster: Cluster) -> None:
    process, marker = remote_job
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    deadline = time.monotonic() + 10
    while left := cluster.processes(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
