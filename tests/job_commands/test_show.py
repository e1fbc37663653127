from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.job_commands.show import command_line
from hvdtrain.jobs.files import append_json_line
from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState, own_identity


def test_details_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = JobSpec(
        options=(),
        program=("a.py",),
        folder="/",
        version="1.2",
        versions={"Python": "3.11.7", "Keras": "3.14"},
        created_s=1.0,
    )
    job = create_job(tmp_path, spec)
    state = JobState(
        phase="running", launcher=own_identity(), step=20, epoch=1, total_steps=620, mpi="MPICH 4.1"
    )
    job.write_state(state)
    for step in (0, 10, 20):
        append_json_line(job.metrics, {"time": float(step), "step": step})
    ended = {"kind": "ended", "attempt": 1, "code": 1, "lost_s": 61.4, "words": "no data\nat all"}
    append_json_line(job.events, {"time": 0, "kind": "began", "hosts": {"a": 2, "b": 1}})
    append_json_line(job.events, {"time": 0, **ended})
    append_json_line(job.events, {"time": 0, "kind": "summary", "kept": 0.283, "lost": 0.0})
    assert main(["show", job.name, "--jobs-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "step        20 of 620 (epoch 2)" in lines
    assert "remaining   about 10 min" in lines
    events = [line.split(maxsplit=2)[2] for line in lines[-3:]]
    assert events == [
        "began: hosts a:2, b:1",
        "ended: attempt 1, code 1, lost 1 min 1 s (no data)",
        "summary: kept 28%",
    ]
    assert "versions    hvdtrain 1.2, Python 3.11.7, Keras 3.14, MPICH 4.1" in lines


def test_a_command_is_quoted_on_one_line() -> None:
    line = command_line(["python", "train.py", "$(id)", "a'b\nc", "\x1b[2J", "größer"])
    assert line == r"""python train.py '$(id)' 'a'"'"'b\nc' '\x1b[2J' 'größer'"""
