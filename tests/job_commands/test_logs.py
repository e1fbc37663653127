from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.job_commands.logs import _line_filter, _matches
from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState


@pytest.mark.timeout(60)
def test_all_commands_explain_an_unknown_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    job = create_job(tmp_path, JobSpec(options=(), program=("a.py",), folder="/", created_s=1.0))
    (job.path / "state.json").write_bytes(b"")
    message = f"{job.name} may be running: {job.path}/state.json can't be read; if none of"
    for command in ("stop", "restart"):
        assert main([command, "--jobs-dir", str(tmp_path), job.name]) == 1
        assert message in capsys.readouterr().err

    def end() -> None:
        while message not in caplog.text:
            time.sleep(0.05)
        job.write_state(JobState(phase="ended", code=0))

    caplog.clear()
    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    with caplog.at_level(logging.WARNING, "hvdtrain.job_commands"):
        assert main(["logs", job.name, "-f", "--jobs-dir", str(tmp_path)]) == 0
    ending.join(10)
    assert caplog.text.count(message) == 1


def test_lines_of_the_launcher_are_filtered_by_rank() -> None:
    anything, ranks = _line_filter(None, None, None), [range(2, 9)]
    lines = {
        "[0,2-3 node-1] a": True,
        "[1] b": False,
        "[ 2] of more than ten ranks": True,
        "2026-11-29 10:00:01 [2] after the time": True,
        "2026-11-29 10:00:01 [1] after the time": False,
        "[0,2,4,... 12 ranks] some are not listed": True,
        "[0,1,3-4,... 12 ranks node-1] two are listed": True,
        "[1,9,11,... 12 ranks] the others follow": False,
        "hvdtrain run: ended": False,
        "hvdtrain: waiting for [1] c": False,
        # Without tags, from --chief-only.
        "[2026-11-29 10:00] epoch 1": False,
        "[-] done": False,
        "[5-2] backwards": False,
    }
    assert {text: _matches(text, ranks, anything) for text in lines} == lines
    assert all(_matches(text, None, anything) for text in lines)
    assert [text for text in lines if _matches(text, None, _line_filter(None, "b", "^b$"))] == [
        "[1] b"
    ]
