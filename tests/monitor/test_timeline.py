import json
from pathlib import Path

import pytest

import hvdtrain.tensorflow as hvd
from hvdtrain.collectives.engine_core import FinishedOperation
from hvdtrain.monitor.timeline import Timeline, timeline_file

GATHER = FinishedOperation("allgather(a)", "allgather(a) with int64, ()", 7.0, 7.25, 0.125, "")


def operations(text):
    return [event for event in json.loads(text) if event.get("ph") == "X"]


def test_each_operation_is_an_event(tmp_path):
    file = tmp_path / "new" / "timeline.json"
    timeline = Timeline(file, 3)
    timeline.note(GATHER)
    timeline.note(GATHER._replace(start_s=8.0, stop_s=8.0, error="MismatchError: other calls"))
    unfinished = file.read_text()
    assert operations(unfinished + "]") == operations(unfinished + "\n]\n")
    timeline.close()
    first, second = operations(file.read_text())
    assert (first["name"], first["pid"], first["dur"]) == ("allgather(a)", 3, 250_000.0)
    assert first["args"] == {"call": GATHER.call, "waited_ms": 125.0}
    assert second["ts"] - first["ts"] == pytest.approx(1e6)
    assert second["args"]["error"] == "MismatchError: other calls"
    (name,) = (e for e in json.loads(file.read_text()) if e["name"] == "process_name")
    assert name["args"]["name"].startswith("rank 3 on ")


def test_files_of_ranks():
    assert timeline_file("a/t.json", 0) == Path("a/t.json")
    assert timeline_file("a/t.json", 1) is None
    assert timeline_file("{rank}/t-{rank}.json", 12) == Path("12/t-12.json")


def test_a_full_disk_is_reported(capsys):
    timeline = Timeline(Path("/dev/full"), 0)
    timeline.note(GATHER)
    timeline.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hvdtrain: can't write the timeline to /dev/full: No space left")


SCRIPT = """
import sys, time
import numpy as np
import hvdtrain
import hvdtrain.tensorflow as hvd
from hvdtrain.errors import ConfigurationError

hvd.init()
try:
    hvd.start_timeline(sys.argv[1])
except ConfigurationError as error:
    assert "is already being written" in str(error)
else:
    assert False
hvd.allreduce(np.ones(5), name="before")
hvd.stop_timeline()
hvd.allreduce(np.ones(5), name="between")
hvd.start_timeline(sys.argv[1])
some = hvd.add_process_set([1])
hvd.allreduce(np.ones((2, 3), "float32"), name="all here")
if hvd.rank() == 1:
    time.sleep(1)
    hvd.allgather(np.ones(4), name="of one", process_set=some)
hvd.broadcast(np.ones(2), 0, name="late")
if sys.argv[2:]:
    import os
    os.kill(os.getpid(), 9)
"""


def run(launch, folder, *more):
    file = folder / "timeline-{rank}.json"
    env = {"HVDTRAIN_TIMELINE_FILENAME": str(file)}
    return launch(2, SCRIPT, str(file), *more, env=env)


def test_each_rank_writes_its_operations_and_waits(launch, tmp_path):
    done = run(launch, tmp_path)
    assert done.returncode == 0, done
    for rank in range(2):
        # Without stop_timeline the end of the array is missing.
        events = operations((tmp_path / f"timeline-{rank}.json").read_text() + "]")
        names = [event["name"] for event in events]
        assert names == [
            "subset",
            "allreduce(all here)",
            *["allgather(of one)"] * rank,
            "broadcast(late)",
        ]
        assert all(event["pid"] == rank for event in events)
        assert events[1]["args"]["call"] == ("allreduce(all here) with average, float32, ((2, 3),)")
        waited_ms = events[-1]["args"]["waited_ms"]
        assert waited_ms > 300 if rank == 0 else waited_ms < 300, events[-1]


def test_a_killed_rank_leaves_its_timeline(launch, tmp_path):
    done = run(launch, tmp_path, "killed")
    assert done.returncode != 0
    events = operations((tmp_path / "timeline-1.json").read_text() + "]")
    assert events[-1]["name"] == "broadcast(late)"
    assert "error" not in events[-1]["args"]


def test_nothing_is_written_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hvd.init()
    hvd.stop_timeline()
    hvd.allreduce([1.0])
    assert list(tmp_path.iterdir()) == []
