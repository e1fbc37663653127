from __future__ import annotations

import dataclasses
from pathlib import Path

from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.job_view import command_line, view_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity


def _job(tmp_path: Path) -> JobFolder:
    spec = JobSpec(options=("-np", "2"), program=("a.py",), folder="/x", created_s=100.0)
    return create_job(tmp_path, spec)


def test_a_job_is_seen_as_it_is(tmp_path: Path) -> None:
    job = _job(tmp_path)
    job.write_state(JobState(phase="running", launcher=own_identity(), step=3, ranks=2))
    view = view_job(job)
    assert (view.status, view.is_over) == ("running", False)
    assert (view.spec.program, view.spec.folder, view.created_s) == (("a.py",), "/x", 100.0)
    assert (view.state.step, view.state.ranks, view.ended_s) == (3, 2, None)
    job.write_state(JobState(phase="ended", code=1, cause="exception", since_s=120.0))
    view = view_job(job)
    assert (view.status, view.is_over, view.ended_s) == ("failed", True, 120.0)
    assert set(view.to_json()) == {
        *("name", "status", "created_s", "ended_s", "verdict", "on", "slurm_job"),
        *("program", "options", "folder", "attempt", "ranks", "hosts", "mpi"),
        *("step", "epoch", "total_steps", "saved", "code"),
    }


def test_a_job_whose_launcher_was_killed_is_lost_with_its_last_words(tmp_path: Path) -> None:
    job = _job(tmp_path)
    gone = dataclasses.replace(own_identity(), pid=1, started_ticks=1)
    job.write_state(JobState(phase="running", launcher=gone))
    job.words.write_bytes(b"x" * 10_000 + b"\nMemoryError \xff\n")
    view = view_job(job)
    assert (view.status, view.is_over) == ("lost", True)
    assert view.verdict.startswith("its hvdtrain run is gone")
    assert view.verdict.endswith("MemoryError \ufffd")
    assert len(view.verdict) < 5000


def test_what_can_not_be_read_is_unknown(tmp_path: Path) -> None:
    view = view_job(JobFolder(tmp_path / "nothing"))
    assert (view.name, view.status, view.spec.program) == ("nothing", "unknown", ())
    assert not view.is_over
    assert view.verdict.startswith(f"{tmp_path}/nothing/state.json can't be read; ")
    job = _job(tmp_path)
    (job.path / "spec.json").write_bytes(b"\0" * 100)
    (job.path / "state.json").write_bytes(b"")
    assert view_job(job).status == "unknown"


def test_a_command_is_shown_on_one_line_and_draws_nothing() -> None:
    shown = command_line(["python", "train.py", "$(id)", "a'b\nc", "\x1b[2J", "größer"])
    assert shown == r"""python train.py '$(id)' 'a'"'"'b\nc' '\x1b[2J' 'größer'"""
