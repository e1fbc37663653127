"""The commands on jobs, with real jobs."""

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

_SPECIAL = ["$(touch pwned)", "a'b\"c", "two\nlines", "<script>alert(1)</script>", ""]
_WAIT_FOR_FILE = """
print("arguments", sys.argv[1:], flush=True)
print("oops", file=sys.stderr, flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
print("done", flush=True)
"""


class Commands:
    """Runs ``hvdtrain`` with jobs in their own folder and one slot."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run ``hvdtrain`` to its end, and return its output, or its errors if it fails."""
        exit_code = main(list(arguments))
        out, err = self._capsys.readouterr()
        assert exit_code == code, (out, err)
        return out if code == 0 else err

    def submit(self, body: str, *words: str) -> str:
        """Submit a job of one rank and return its name."""
        return self.run("submit", "-np", "1", "--", *program(body), *words).strip()

    def show(self, name: str) -> Mapping[str, Any]:
        return json.loads(self.run("show", name, "--json"))

    def wait_for(self, name: str, status: str) -> Mapping[str, Any]:
        """Wait until a job has a status."""
        deadline = time.monotonic() + 60
        while (shown := self.show(name))["status"] != status:
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)
        return shown

    def wait_for_output(self, name: str, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.run("logs", name):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def wait_for_processes(self) -> None:
        """Wait until no process is left. Launchers end shortly after they record the end."""
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


def test_a_job_from_submission_to_end(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(_WAIT_FOR_FILE, str(go), *_SPECIAL)
    # With one slot the second job waits for the first.
    second = commands.submit("print('never')")
    commands.wait_for(name, "running")
    rows = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert {row["name"]: row["status"] for row in rows} == {name: "running", second: "queued"}
    assert f"{second}: stopped\n" == commands.run("stop", second)
    assert "SIGTERM" in commands.show(second)["verdict"]
    assert "is running; only a job that has ended can be restarted" in commands.run(
        "restart", name, code=1
    )

    threading.Timer(1.0, go.touch).start()
    arguments, oops, done = commands.run("logs", name, "-f").splitlines()
    assert {arguments, oops} == {f"[0] arguments {[str(go), *_SPECIAL]!r}", "[0] oops"}
    assert done == "[0] done"
    shown = commands.wait_for(name, "done")
    assert (shown["code"], shown["attempt"], shown["ranks"]) == (0, 1, 1)
    assert shown["program"][-len(_SPECIAL) :] == _SPECIAL
    assert [event["kind"] for event in shown["events"]] == ["began", "ended"]
    assert commands.run("logs", name, "--grep", "oop", "--rank", "0") == "[0] oops\n"
    assert commands.run("logs", name, "-n", "1") == "[0] done\n"
    assert commands.run("logs", name, "--rank", "1-3") == ""
    assert name in commands.run("jobs").splitlines()[2]
    assert "done, exit code 0" in commands.run("show", name[:8] + name[8:])
    assert not (commands.folder / "pwned").exists()
    commands.wait_for_processes()


def test_a_lost_job_is_restarted_and_cloned(commands: Commands) -> None:
    go = commands.folder / "go"
    name = commands.submit(_WAIT_FOR_FILE, str(go))
    commands.wait_for(name, "running")
    commands.wait_for_output(name, "arguments")
    os.kill(_launcher(commands, name), signal.SIGKILL)
    shown = commands.wait_for(name, "lost")
    assert shown["code"] is None
    assert "hvdtrain run ended without a report" in shown["verdict"]
    commands.run("restart", name, "--", *program("raise ValueError('no such batch')"))
    shown = commands.wait_for(name, "failed")
    assert (shown["attempt"], shown["code"]) == (2, 1)
    assert "ValueError: no such batch" in shown["verdict"]
    log = commands.run("logs", name)
    assert "[0] arguments" in log
    assert "hvdtrain run: rank 0 on " in log
    for again in ("restart", "clone"):
        for where in ("local", "slurm"):
            words = ("--on", where, "--", "bash", "-s")
            assert "standard input" in commands.run(again, name, *words, code=2)
    clone = commands.run("clone", name, "--", *program("print(rank + 7)")).strip()
    commands.wait_for(clone, "done")
    assert commands.run("logs", clone) == "[0] 7\n"
    assert commands.show(name)["attempt"] == 2


def test_stop_saves_a_checkpoint_on_request(commands: Commands) -> None:
    body = """
    import signal
    signal.signal(signal.SIGUSR1, lambda *_: (print("saved", flush=True), sys.exit(75)))
    print("ready", flush=True)
    time.sleep(60)
    """
    name = commands.submit(body)
    commands.wait_for_output(name, "ready")
    assert commands.run("stop", name, "--save") == f"{name}: stopped\n"
    assert "[0] saved\n" in commands.run("logs", name)
    assert commands.show(name)["code"] == 75
    assert commands.run("stop", name) == f"{name} has already ended: stopped\n"
    (commands.folder / "jobs" / name / "state.json").write_bytes(b"")
    assert f"{name} may be running: " in commands.run("stop", name, code=1)


def test_concurrent_jobs_have_different_gpus(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Works without GPUs, as each job only gets a variable.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    body = "print('GPU', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(60)"
    names = [commands.submit(body) for _ in range(2)]
    for name in names:
        commands.wait_for_output(name, "GPU")
    assert {commands.run("logs", name) for name in names} == {"[0] GPU 4\n", "[0] GPU 7\n"}
    commands.run("stop", *names)


def test_a_secret_reaches_the_ranks_but_no_file(commands: Commands) -> None:
    body = "print('token ends in', os.environ['HF_TOKEN'][-1], flush=True)"
    words = ["-np", "1", "-x", "HF_TOKEN=sesame1", "--", *program(body)]
    name = commands.run("submit", *words).strip()
    commands.wait_for_output(name, "[0] token ends in 1\n")
    commands.wait_for(name, "done")
    other = commands.run("clone", name, "-x", "HF_TOKEN=sesame2").strip()
    commands.wait_for_output(other, "[0] token ends in 2\n")
    assert "the variable is not set" in commands.run("restart", name, code=2)
    commands.run("restart", name, "-x", "HF_TOKEN=sesame3")
    commands.wait_for_output(name, "[0] token ends in 3\n")
    commands.wait_for(name, "done")
    written = [path for path in (commands.folder / "jobs").rglob("*") if path.is_file()]
    assert not [path for path in written if b"sesame" in path.read_bytes()]


def test_invalid_commands_are_refused_at_once(commands: Commands) -> None:
    assert "The program is missing" in commands.run("submit", "-np", "2", code=2)
    error = commands.run("submit", "-np", "3", "-H", "localhost:2", "--", "true", code=2)
    assert error.startswith("hvdtrain submit: error: 3 ranks don't fit")
    assert commands.run("jobs").startswith("no jobs in ")
    assert "there is no job 'nothing'" in commands.run("show", "nothing", code=1)
    assert "is not a valid regular expression" in commands.run(
        "logs", "nothing", "--regex", "(", code=2
    )
    assert "-np 1" in commands.run("submit", "-np", "1", "--dry-run", "--", "true")
    assert "standard input" in commands.run("submit", "-np", "1", "--", "python", "-", code=2)
    assert commands.run("jobs").startswith("no jobs in ")


# The steps of two ranks take the same time, but rank 0 waits for rank 1 most of that time.
_TRAIN = """
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


def test_a_job_of_hvdtrain_run_is_recorded(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-np", "2", "--", *program(_TRAIN)]) == 0
    error = capsys.readouterr().err
    assert "hvdtrain run: 60 steps in " in error
    assert "mostly for rank 1 on " in error
    assert "times the median, mostly waiting for input\n" in error
    [row] = [json.loads(row) for row in commands.run("jobs", "--json").splitlines()]
    assert (row["status"], row["ranks"], row["options"]) == ("done", 2, ["-np", "2"])
    log = commands.run("logs", row["name"], "--grep", "hello").splitlines()
    assert sorted(log) == ["[0] hello 0", "[1] hello 1"]
    shown = commands.show(row["name"])
    assert (shown["step"], shown["epoch"], shown["total_steps"]) == (60, 2, 60)
    assert shown["mpi"].startswith("Open MPI 5.")
    host = socket.gethostname()
    slow = [shown["metrics"][name] for name in ("step", "slow", "slow_host")]
    assert slow == [60, 1, host]
    assert shown["metrics"]["loss"] == pytest.approx(1 / 60, rel=0.01)
    shares = shown["events"][-1]
    assert shares["kind"] == "summary"
    assert min(shares["kept"], shares["waiting"], shares["input"]) > 0.05
    parts = [share for name, share in shares.items() if name not in ("time", "kind")]
    assert sum(parts) == pytest.approx(1, abs=0.001)
    assert f"slowest     rank 1 on {host}: " in commands.run("show", row["name"])
    lines = commands.run("show", row["name"], "--ranks").splitlines()
    assert "waited s  input s" in lines[-3]
