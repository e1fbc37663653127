from __future__ import annotations

import pytest

from hvdtrain.jobs.naming import split_backend
from hvdtrain.jobs.spec import LOCAL, Backend

SAID = {
    "nothing": (["-np", "2"], (["-np", "2"], None)),
    "local": (["--on", "local", "-np", "2"], (["-np", "2"], LOCAL)),
    "slurm": (["-np", "2", "--on=slurm"], (["-np", "2"], Backend("slurm"))),
    "sbatch": (
        ["--sbatch=--time=5", "-x", "A=--on", "--sbatch=-p gpu"],
        (["-x", "A=--on"], Backend("slurm", ("--time=5", "-p gpu"))),
    ),
    "program": (["-np", "2", "--", "a", "--on", "x"], (["-np", "2", "--", "a", "--on", "x"], None)),
}


@pytest.mark.parametrize(("words", "found"), SAID.values(), ids=SAID)
def test_who_runs_a_job_is_no_option_of_it(words, found) -> None:
    assert split_backend(words) == found
