from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.errors import JobError
from hvdtrain.jobs.slurm import cancel, sbatch_argv, script_path, slurm_states, submit
from hvdtrain.jobs.spec import Backend, JobSpec

SPEC = JobSpec(
    options=("-np", "4", "--max-restarts", "2"),
    program=("python", "a b.py", "$(id)"),
    folder="/work",
    backend=Backend("slurm", ("--partition=gpu",)),
)


def test_the_command_is_a_list_of_words() -> None:
    assert sbatch_argv("a-1", Path("/jobs/a-1"), SPEC, ranks=4) == [
        *("sbatch", "--parsable", "--job-name=a-1", "--output=/jobs/a-1/slurm.txt"),
        *("--ntasks=4", "--partition=gpu", str(script_path())),
        *("-np", "4", "--max-restarts", "2", "--", "python", "a b.py", "$(id)"),
    ]
    assert not any("ntasks" in word for word in sbatch_argv("a", Path("/a"), SPEC, ranks=None))


def test_without_slurm_the_message_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_states(["1"]) is None
    with pytest.raises(JobError, match="sbatch is not there; sbatch is on Slurm's login"):
        submit(["sbatch"], {"PATH": str(tmp_path)}, "/")
    with pytest.raises(JobError, match="scancel is not there"):
        cancel("1", save=True)
