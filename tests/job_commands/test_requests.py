"""What is to be different in a job that is started again or copied."""

from __future__ import annotations

import argparse
from pathlib import Path

from hvdtrain.job_commands.requests import changes_of
from hvdtrain.jobs.spec import Backend


def test_changes_come_from_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("np = 8\non = 'slurm'")
    changes = ["-np", "3", "--config", str(path), "--", "a", "--config", "b"]
    arguments = argparse.Namespace(argv=["NAME", *changes], changes=changes)
    words = ["--num-proc=8", "-np", "3", "--", "a", "--config", "b"]
    assert changes_of(arguments) == (words, Backend("slurm"))
