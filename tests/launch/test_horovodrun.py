"""A program of hvdtrain's under the real ``horovodrun``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples.digits import MNIST, write_few
from tests.harness.jobs import REPOSITORY, Completed
from tests.launch.test_other_mpis import HOSTS, TALK, seen_by_ranks
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def command(environment: Callable[[str], Path]) -> Path:
    """The real horovodrun; it finds its Python by the path in its first line."""
    return environment("horovod").parent / "horovodrun"


@pytest.fixture
def horovodrun(command: Path, run_command) -> Callable[..., Completed]:
    """Run a Python program on two ranks, with the mpirun that is in ``folder``."""

    def run(*arguments: str | Path, folder: Path | None = None) -> Completed:
        argv = [command, "-np", "2", *arguments]
        return run_command(argv, env=environ_with(folder), timeout_s=150)

    return run


def environ_with(folder: Path | None) -> dict[str, str | None]:
    path = os.pathsep.join([*([str(folder)] if folder else []), os.defpath])
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("name", ["openmpi4", "intel-mpi"])
def test_mpi_is_mpirun(name: str, environment, horovodrun, tmp_path: Path) -> None:
    python = environment(name)
    script = tmp_path / "talk.py"
    script.write_text(f"import os, sys\n{TALK}")
    done = horovodrun("--mpi", "python", script, folder=python.parent)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "2", str(r), "2", "3"] for r in range(2)]


def test_mpi_is_mpirun_over_ssh(environment, command: Path, cluster: Cluster) -> None:
    folder = environment("openmpi4").parent
    (cluster.folder / "talk.py").write_text(f"import os, sys\n{TALK}")
    argv = [command, "--mpi", "-np", "3", "-H", HOSTS, "python", cluster.folder / "talk.py"]
    done = cluster.run(argv, env=environ_with(folder), timeout_s=100)
    assert done.returncode == 0, done
    seen = [place[:5] for place in seen_by_ranks(done.stdout)]
    assert seen == [["0", "3", "0", "1", "6"], ["1", "3", "0", "2", "6"], ["2", "3", "1", "2", "6"]]


def test_mpi_trains_with_open_mpi_5(horovodrun, mpirun, forked_python, tmp_path) -> None:
    """Horovod's own words for binding are Open MPI 4's; 5 takes them for the program."""
    binding = "--binding-args=--bind-to none --map-by slot"
    data = ("--epochs", "2", "--data-dir", write_few(tmp_path))
    program = (*forked_python, MNIST, *data)
    done = horovodrun("--mpi", binding, *program, folder=Path(mpirun(2, [])[0]).parent)
    assert done.returncode == 0, done
    # Two times five joint batches, and the chief alone tells.
    assert done.stdout.count("step 10,") == 1, done
    assert done.stdout.count("test accuracy = ") == 1


def test_gloo_says_what_to_do(horovodrun, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import hvdtrain\nhvdtrain.init()\nprint('trained')\n")
    done = horovodrun("--gloo", sys.executable, script)
    assert done.returncode != 0, done
    assert "trained" not in done.stdout
    assert "LaunchError: Horovod is to do the reductions and can't be imported" in done.stderr
    assert "or start with horovodrun --mpi, mpirun or hvdtrain run" in done.stderr
