"""Jobs are submitted, seen and steered from the command line; each is a real one."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import main
from tests.launch.jobs import kill_marked, marked, program, with_mark

pytestmark = [pytest.mark.mpi, pytest.mark.essential]

_NASTY = ["$(touch pwned)", "a'b\"c", "two\nlines", "<script>alert(1)</script>", ""]
_WAITS = """
print("words", sys.argv[1:], flush=True)
print("oops", file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("done", flush=True)
"""


class Commands:
    """The command, with jobs in a folder of their own and one slot."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run ``hvdtrain`` to its end; what it printed."""
        ended = main(list(arguments))
        out, err = self._capsys.readouterr()
        assert ended == code, (out, err)
        return out if code == 0 else err

    def captured(self) -> Any:
        """What was printed since the last command."""
        return self._capsys.readouterr()

    def submit(self, body: str, *words: str) -> str:
        """The name of a job of one rank."""
        return self.run("submit", "-np", "1", "--", *program(body), *words).strip()

    def show(self, name: str) -> Mapping[str, Any]:
        """What is known of a job."""
        return json.loads(self.run("show", name, "--json"))

    def until(self, name: str, status: str) -> Mapping[str, Any]:
        """Wait until a job is so."""
        deadline = time.monotonic() + 60
        while (seen := self.show(name))["status"] != status:
            assert time.monotonic() < deadline, seen
            time.sleep(0.1)
        return seen

    def until_said(self, name: str, text: str) -> None:
        """Wait until a job's log holds a text."""
        deadline = time.monotonic() + 60
        while text not in self.run("logs", name):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def until_gone(self) -> None:
        """Wait until no process is left: a launcher ends just after it wrote how its job did."""
        deadline = time.monotonic() + 60
        while left := marked(self.mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.fixture
def commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Commands]:
    commands = Commands(tmp_path, capsys)
    for name in [name for name in os.environ if name not in with_mark(commands.mark)]:
        monkeypatch.delenv(name)
    for name, value in with_mark(commands.mark).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HVDTRAIN_JOBS_DIR", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield commands
    os.sched_setaffinity(0, cores)
    kill_marked(commands.mark)


def _launcher(commands: Commands, name: str) -> int:
    state = json.loads((commands.folder / "jobs" / name / "state.json").read_text())
    return state["launcher"]["pid"]


def test_a_job_from_its_submission_to_its_end(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(_WAITS, str(go), *_NASTY)
    # There is one slot: the second waits for the first, and is stopped before its turn.
    second = commands.submit("print('never')")
    commands.until(name, "running")
    rows = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert {row["name"]: row["status"] for row in rows} == {name: "running", second: "queued"}
    assert f"{second}: stopped\n" == commands.run("stop", second)
    assert "before its turn" in commands.show(second)["verdict"]
    assert "is running; only what has ended starts again" in commands.run("restart", name, code=1)

    threading.Timer(1.0, go.touch).start()
    words, oops, done = commands.run("logs", name, "-f").splitlines()
    assert {words, oops} == {f"[0] words {[str(go), *_NASTY]!r}", "[0] oops"}
    assert done == "[0] done"
    seen = commands.until(name, "done")
    assert (seen["code"], seen["attempt"], seen["ranks"]) == (0, 1, 1)
    assert seen["program"][-len(_NASTY) :] == _NASTY
    assert [event["kind"] for event in seen["events"]] == ["began", "ended"]
    assert commands.run("logs", name, "--grep", "oop", "--rank", "0") == "[0] oops\n"
    assert commands.run("logs", name, "-n", "1") == "[0] done\n"
    assert commands.run("logs", name, "--rank", "1-3") == ""
    assert name in commands.run("jobs").splitlines()[2]
    assert "done, exit code 0" in commands.run("show", name[:8] + name[8:])
    assert not (commands.folder / "pwned").exists()
    commands.until_gone()


def test_a_job_that_is_lost_starts_again_where_it_was(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(_WAITS, str(go))
    commands.until(name, "running")
    commands.until_said(name, "words")
    os.kill(_launcher(commands, name), signal.SIGKILL)
    # It takes a while to be gone on a busy machine.
    seen = commands.until(name, "lost")
    assert seen["code"] is None
    assert "its hvdtrain run is gone" in seen["verdict"]
    commands.run("restart", name, "--", *program("raise ValueError('no such batch')"))
    seen = commands.until(name, "failed")
    assert (seen["attempt"], seen["code"]) == (2, 1)
    assert "ValueError: no such batch" in seen["verdict"]
    log = commands.run("logs", name)
    assert "[0] words" in log
    assert "hvdtrain run: rank 0 on " in log
    for again in ("restart", "clone"):
        for where in ("local", "slurm"):
            words = ("--on", where, "--", "bash", "-s")
            assert "standard input" in commands.run(again, name, *words, code=2)
    clone = commands.run("clone", name, "--", *program("print(rank + 7)")).strip()
    commands.until(clone, "done")
    assert commands.run("logs", clone) == "[0] 7\n"
    assert commands.show(name)["attempt"] == 2


def test_stop_lets_ranks_save_what_they_have(commands: Commands) -> None:
    body = """
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(75)))
    print("ready", flush=True)
    time.sleep(60)
    """
    name = commands.submit(body)
    commands.until_said(name, "ready")
    assert commands.run("stop", name, "--save") == f"{name}: stopped\n"
    assert "[0] saved\n" in commands.run("logs", name)
    assert commands.show(name)["code"] == 75
    assert commands.run("stop", name) == f"{name} has ended already: stopped\n"
    (commands.folder / "jobs" / name / "state.json").write_bytes(b"")
    said = commands.run("stop", name, code=1)
    assert f"{name} may be running: " in said


def test_jobs_side_by_side_have_gpus_of_their_own(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are none here, but each job is told which are its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    body = "print('GPU', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(60)"
    names = [commands.submit(body) for _ in range(2)]
    for name in names:
        commands.until_said(name, "GPU")
    assert {commands.run("logs", name) for name in names} == {"[0] GPU 4\n", "[0] GPU 7\n"}
    commands.run("stop", *names)


def test_a_secret_reaches_the_ranks_and_no_file(commands: Commands) -> None:
    body = "print('token ends in', os.environ['HF_TOKEN'][-1], flush=True)"
    words = ["-np", "1", "-x", "HF_TOKEN=sesame1", "--", *program(body)]
    name = commands.run("submit", *words).strip()
    commands.until_said(name, "[0] token ends in 1\n")
    commands.until(name, "done")
    other = commands.run("clone", name, "-x", "HF_TOKEN=sesame2").strip()
    commands.until_said(other, "[0] token ends in 2\n")
    assert "there is no such variable" in commands.run("restart", name, code=2)
    commands.run("restart", name, "-x", "HF_TOKEN=sesame3")
    commands.until_said(name, "[0] token ends in 3\n")
    commands.until(name, "done")
    written = [path for path in (commands.folder / "jobs").rglob("*") if path.is_file()]
    assert not [path for path in written if b"sesame" in path.read_bytes()]


def test_what_can_not_start_is_told_at_once(commands: Commands) -> None:
    assert "No program was named" in commands.run("submit", "-np", "2", code=2)
    said = commands.run("submit", "-np", "3", "-H", "localhost:2", "--", "true", code=2)
    assert said.startswith("hvdtrain submit: 3 ranks don't fit")
    assert commands.run("jobs").startswith("no jobs in ")
    assert "there is no job 'nothing'" in commands.run("show", "nothing", code=1)
    assert "is not a valid regular expression" in commands.run(
        "logs", "nothing", "--regex", "(", code=2
    )
    assert "-np 1" in commands.run("submit", "-np", "1", "--dry-run", "--", "true")
    assert "standard input" in commands.run("submit", "-np", "1", "--", "python", "-", code=2)
    assert not (commands.folder / "jobs").exists()


# Two ranks that take as long for a step; rank 0 waits for most of it.
_TRAINS = """
from hvdtrain.monitor import report
print("hello", rank)
done = 0
report.watch(lambda: "", lambda: done * (0.04 if rank == 0 else 0.0))
report.planned(60)
report.phase("training")
while done < 60:
    time.sleep(0.05)
    done += 1
    report.waited_for_input(0.03 if rank == 1 else 0.0)
    report.step(done, done // 30)
    report.learned(done * 32, 1 / done)
"""


def test_a_job_of_hvdtrain_run_is_listed_as_well(commands: Commands) -> None:
    assert main(["run", "-np", "2", "--", *program(_TRAINS)]) == 0
    said = commands.captured().err
    assert "hvdtrain run: 60 steps in " in said
    assert "most for rank 1 on " in said
    assert "times as long as the others, most of it waiting for its input\n" in said
    [row] = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert (row["status"], row["ranks"], row["options"]) == ("done", 2, ["-np", "2"])
    log = commands.run("logs", row["name"], "--grep", "hello").splitlines()
    assert sorted(log) == ["[0] hello 0", "[1] hello 1"]
    seen = commands.show(row["name"])
    assert (seen["step"], seen["epoch"], seen["total_steps"]) == (60, 2, 60)
    assert seen["mpi"].startswith("Open MPI 5.")
    host = socket.gethostname()
    slow = [seen["metrics"][name] for name in ("step", "slow", "slow_host")]
    assert slow == [60, 1, host]
    assert seen["metrics"]["loss"] == pytest.approx(1 / 60, rel=0.01)
    shares = seen["events"][-1]
    assert shares["kind"] == "summary"
    assert min(shares["kept"], shares["waiting"], shares["input"]) > 0.05
    parts = [share for name, share in shares.items() if name not in ("time", "kind")]
    assert sum(parts) == pytest.approx(1, abs=0.001)
    assert f"rank 1 on {host}: a step takes it " in commands.run("show", row["name"])
    told = commands.run("show", row["name"], "--ranks").splitlines()
    assert "waited s  input s" in told[-3]
