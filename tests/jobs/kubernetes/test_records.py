"""What a pod prints of its job's folder, and the folder that is made of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.jobs.files import append_json_line, read_json_lines
from hvdtrain.jobs.folder import JobFolder, create_job
from hvdtrain.jobs.kubernetes import mirror, records
from hvdtrain.jobs.kubernetes.mirror import opened
from hvdtrain.jobs.kubernetes.records import Records
from hvdtrain.jobs.log import LogLine, LogWriter, read_log
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.jobs.state import JobState

AT = "2026-11-27T11:07:23.921681141Z"


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "FRESH_S", 0.0)


class Pod:
    """A pod with a job's folder, and what it prints of it."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.job = JobFolder(path)
        self.records = Records(self.job)
        self.printed: list[str] = []
        self.now = 0.0

    def says(self, *texts: str, rank: int = 0) -> None:
        """A rank writes lines."""
        log = LogWriter(self.job.log)
        log.append([LogLine(time_s=1.5, rank=rank, stream="stdout", text=text) for text in texts])
        log.close()

    def print(self) -> str:
        """All that it has printed so far, as the cluster tells it."""
        self.now += 1.0
        self.printed += [f"{AT} {json.dumps(one)}\n" for one in self.records.news(self.now)]
        return "".join(self.printed)


def _texts(job: JobFolder) -> list[str]:
    return [found.line.text for found in read_log(job.log) if found.line is not None]


def _write(job: JobFolder, pod: str, text: str) -> None:
    with opened(job) as found:
        assert found is not None
        found.write(pod, text)


@pytest.fixture
def here(tmp_path: Path) -> JobFolder:
    return create_job(tmp_path / "jobs", JobSpec(options=(), program=("a",), folder="/"))


def test_the_folder_here_is_as_the_one_there(tmp_path: Path, here: JobFolder) -> None:
    pod = Pod(tmp_path / "pod")
    pod.says("one", "zwei\tü", "{}")
    append_json_line(pod.job.events, {"kind": "began"})
    append_json_line(pod.job.metrics, {"step": 1})
    pod.job.write_state(JobState(phase="running", step=1))
    pod.job.touch_state(1000.0)
    _write(here, "pod", pod.print())
    assert _texts(here) == ["one", "zwei\tü", "{}"]
    assert here.state() == JobState(phase="running", step=1)
    assert here.heard_s() == 1000.0
    pod.says("four", rank=3)
    append_json_line(pod.job.metrics, {"step": 2})
    pod.job.write_state(JobState(phase="ended", code=0))
    # Of what comes again nothing is written again.
    for _ in range(2):
        _write(here, "pod", pod.print())
    assert _texts(here) == ["one", "zwei\tü", "{}", "four"]
    assert [row["step"] for row in read_json_lines(here.metrics)] == [1, 2]
    assert [row["kind"] for row in read_json_lines(here.events)] == ["began"]
    assert here.state() == JobState(phase="ended", code=0)


def test_another_launcher_goes_on_behind_the_first(tmp_path: Path, here: JobFolder) -> None:
    for name in ("first", "second"):
        pod = Pod(tmp_path / name)
        pod.says(name)
        _write(here, name, pod.print())
    assert _texts(here) == ["first", "second"]


def test_a_reader_that_was_killed_leaves_nothing_twice(tmp_path: Path, here: JobFolder) -> None:
    pod = Pod(tmp_path / "pod")
    pod.says("one")
    append_json_line(pod.job.events, {"kind": "began"})
    _write(here, "pod", pod.print())
    noted = (here.path / "mirror.json").read_bytes()
    pod.says("two")
    append_json_line(pod.job.events, {"kind": "ended"})
    _write(here, "pod", pod.print())
    # As where it was killed before it noted that.
    (here.path / "mirror.json").write_bytes(noted)
    _write(here, "pod", pod.print())
    assert _texts(here) == ["one", "two"]
    assert [row["kind"] for row in read_json_lines(here.events)] == ["began", "ended"]


def test_what_the_node_has_not_kept_is_told(tmp_path: Path, here: JobFolder) -> None:
    pod = Pod(tmp_path / "pod")
    pod.says("one", "two", "three")
    _write(here, "pod", "no record\n" + "".join(pod.print().splitlines(keepends=True)[2:]))
    told, last = _texts(here)
    assert "some of what this job said is not here" in told
    assert last == "three"


def test_one_reader_writes_at_a_time(here: JobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(here) as first, opened(here) as second:
        assert first is not None
        assert second is None
    monkeypatch.setattr(mirror, "FRESH_S", 60.0)
    with opened(here) as again:
        assert again is None, "it was read just now"


def test_rows_of_ranks_are_thinned(tmp_path: Path) -> None:
    pod = Pod(tmp_path / "pod")
    for step in range(30):
        append_json_line(pod.job.ranks, {"step": [step]})
        pod.print()
    assert len(_to(pod.printed, "ranks.jsonl")) == 3


def _to(printed: Iterable[str], name: str) -> list[Any]:
    records = [json.loads(line.partition(" ")[2]) for line in printed]
    return [record for record in records if record.get("to") == name]


def test_a_launcher_that_never_comes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "START_S", 0.1)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="no launcher came within"):
        records.main([str(tmp_path)])


def test_it_is_printed_until_the_launcher_is_gone_however_that_ends(tmp_path: Path) -> None:
    """The launcher is killed: nothing of it says that it is over."""
    folder = tmp_path / "records"
    folder.mkdir()
    argv = [sys.executable, "-m", "hvdtrain.jobs.kubernetes.records", str(folder)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as printing:
        program = (
            "import sys, time; from pathlib import Path; "
            "from hvdtrain.jobs.kubernetes import records; "
            "held = records._hold(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
        )
        words = [sys.executable, "-c", program, str(folder)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
            assert launcher.stdout is not None
            assert launcher.stdout.readline() == "held\n"
            time.sleep(1.0)
            printing.terminate()
            time.sleep(1.0)
            assert printing.poll() is None, "the launcher has yet to say something"
            append_json_line(folder / "events.jsonl", {"kind": "last"})
            launcher.kill()
        said, _ = printing.communicate(timeout=30)
    assert [json.loads(line)["row"] for line in said.splitlines()] == [{"kind": "last"}]
    assert printing.returncode == 0
