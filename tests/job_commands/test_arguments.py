from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hvdtrain.job_commands.again import read_changes
from hvdtrain.job_commands.arguments import split_backend
from hvdtrain.jobs.spec import LOCAL, Backend

OPTIONS = {
    "none": (["-np", "2"], (["-np", "2"], None)),
    "local": (["--on", "local", "-np", "2"], (["-np", "2"], LOCAL)),
    "slurm": (["-np", "2", "--on=slurm"], (["-np", "2"], Backend("slurm"))),
    "sbatch": (
        ["--sbatch=--time=5", "-x", "A=--on", "--sbatch=-p gpu"],
        (["-x", "A=--on"], Backend("slurm", ("--time=5", "-p gpu"))),
    ),
    "program": (["-np", "2", "--", "a", "--on", "x"], (["-np", "2", "--", "a", "--on", "x"], None)),
}


@pytest.mark.parametrize(("words", "split"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_the_queue_are_split_off(words, split) -> None:
    assert split_backend(words) == split


def test_changes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("np = 8\non = 'slurm'")
    changes = ["-np", "3", "--config", str(path), "--", "a", "--config", "b"]
    arguments = argparse.Namespace(argv=["NAME", *changes], changes=changes)
    words = ["--num-proc=8", "-np", "3", "--", "a", "--config", "b"]
    assert split_backend(read_changes(arguments)) == (words, Backend("slurm"))
