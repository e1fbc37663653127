"""The variables that ranks find in their environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.launch.rank_variables import (
    forwarded,
    hides_information,
    is_information,
    rank_environment,
)

TO_STDERR = "are written to STDERR"
FOLDERS = [Path("/venv/bin"), Path("/mpi/bin")]


def test_ranks_find_python_and_mpi_first() -> None:
    assert rank_environment({"PATH": "/usr/bin:/bin", "HOME": "/home/me"}, FOLDERS) == {
        "HOME": "/home/me",
        "I_MPI_PIN": "0",
        "PATH": "/venv/bin:/mpi/bin:/usr/bin:/bin",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/usr/bin::/venv/bin:/usr/bin:", "/venv/bin:/mpi/bin:/usr/bin"),
        ("", "/venv/bin:/mpi/bin"),
        (None, f"/venv/bin:/mpi/bin:{os.defpath}"),
    ],
)
def test_path_names_no_folder_twice(given: str | None, path: str) -> None:
    environ = {} if given is None else {"PATH": given}
    assert rank_environment(environ, FOLDERS)["PATH"] == path


def test_the_users_own_variables_win() -> None:
    mine = {
        "PYTHONUNBUFFERED": "",
        "PYTHONFAULTHANDLER": "0",
        "I_MPI_PIN": "1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    made = rank_environment(mine, [])
    assert {name: made[name] for name in mine} == mine


def test_what_is_forwarded() -> None:
    names = [
        *("CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "HVDTRAIN_LAUNCHER", "KERAS_BACKEND"),
        *("LD_LIBRARY_PATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "PYTHON", "PYTHONPATH"),
        *("TF_CPP_MIN_LOG_LEVEL", "VIRTUAL_ENV", "XLA_FLAGS"),
    ]
    stay = ["HOME", "HOSTNAME", "MANPATH", "MYPATH", "SLURM_JOB_ID", "PATHS", "AWS_SECRET_KEY"]
    environ = dict.fromkeys([*reversed(names), *stay], "x")
    assert forwarded(environ) == tuple(names)


def test_extra_names_are_forwarded_once() -> None:
    environ = {"PATH": "x", "HOME": "x"}
    assert forwarded(environ, ["HOME", "PATH", "HOME"]) == ("PATH", "HOME")


@pytest.mark.parametrize(
    ("level", "hidden"),
    [(None, True), ("1", True), ("3", True), ("0", False), ("", False), ("x", False)],
)
def test_who_asks_for_information_gets_it(level: str | None, hidden: bool) -> None:
    environ = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    assert hides_information(environ) is hidden


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("I0000 00:00:1795552261.046417   17820 port.cc:153] oneDNN is on", True),
        (f"WARNING: All log messages before absl::InitializeLog() is called {TO_STDERR}", True),
        ("W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] Cannot dlopen", False),
        # The program's own, through absl-py.
        ("I1124 20:29:51.046417 140 train.py:12] epoch 3", False),
        ("", False),
    ],
)
def test_information_that_can_not_be_turned_off(line: str, is_one: bool) -> None:
    assert is_information(line) is is_one
