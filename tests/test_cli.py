"""The command line: help, version, usage errors, and what it costs to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import COMMANDS, main
from hvdtrain.version import __version__
from tests.harness.jobs import REPOSITORY


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hvdtrain {__version__}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert name in shown
        assert summary in shown


def test_help_of_run_is_grouped_and_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    groups = ("where:", "ranks:", "how ranks train together", "other settings of the ranks")
    for part in (*groups, "examples:", "exit codes:"):
        assert part in shown
    for flag in ("-np N, --num-proc N", "-H HOSTS, --hosts HOSTS", "--grace-s", "--share-gpus"):
        assert flag in shown
    lines = shown.splitlines()
    assert len(lines) <= 90, "two screens"
    assert max(map(len, lines)) <= 100


USAGE_ERRORS = {
    "nothing": ([], "COMMAND"),
    "unknown-command": (["rnu"], "'rnu'"),
    "no-np": (["run", "--", "python"], "-np"),
    "np-zero": (["run", "-np", "0", "python"], "got '0', expected a whole number above 0"),
    "np-text": (["run", "-np", "two", "python"], "got 'two'"),
    "no-program": (["run", "-np", "2"], "No program was named"),
    "no-program-after-dashes": (["run", "-np", "2", "--"], "No program was named"),
    "unknown-flag": (["run", "--nq", "2", "-np", "2", "python"], "-"),
    "setting": (["run", "-np", "2", "--timeout-s", "-1", "python"], "--timeout-s"),
    "choice": (["run", "-np", "2", "--collectives", "x", "true"], "expected one of auto, mpi"),
    "no-such-host": (["run", "-H", "a:x", "true"], "'a:x'"),
    "no-slots": (["run", "-np", "3", "-H", "localhost:2", "true"], "3 ranks don't fit"),
    "hosts-twice": (["run", "-H", "a", "--hostfile", "b", "true"], "-H and --hostfile"),
    "no-hostfile": (["run", "--hostfile", "/none", "true"], "/none can't be read: No such file"),
    "no-config": (["run", "--config", "/none", "true"], "--config /none can't be read: No such"),
    "config-unnamed": (["run", "--config"], "--config: expected one argument"),
    "variable-name": (["run", "-np", "2", "-x", "A B", "true"], "got 'A B', expected NAME or"),
    "no-variable": (["run", "-np", "2", "-x", "HVDTRAIN_NO", "true"], "no such variable"),
    "cluster-and-hosts": (["run", "-H", "a", "--cluster", "c", "true"], "--cluster and -H both"),
    "tasks-twice": (["run", "--cluster", "c", "--ps-hosts", "a", "true"], "and --ps-hosts both"),
    "no-cluster": (["run", "--cluster", "/none", "true"], "--cluster /none can't be read: No such"),
    "no-workers": (["run", "--ps-hosts", "a", "true"], "--ps-hosts names no workers"),
    "no-worker-left": (["run", "-np", "1", "--mode", "async-ps", "true"], "leaves no worker"),
    "servers-of-no-mode": (
        ["run", "--worker-hosts", "a", "--ps-hosts", "b", "true"],
        "--worker-hosts and --ps-hosts: parameter servers are named, but --mode allreduce has none",
    ),
    "grace": (["run", "-np", "2", "--grace-s", "nan", "true"], "expected seconds"),
}


@pytest.mark.parametrize(("argv", "told"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_2(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


def test_a_bad_variable_is_told_once_and_before_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDTRAIN_CHUNK_BYTES", "many")
    assert main(["run", "-np", "4", "--", "python", "-c", "print('started')"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("HVDTRAIN_CHUNK_BYTES='many'") == 1
    assert captured.out == ""


def test_what_can_not_start_exits_125(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "-np", "2", "--", "python"]) == 125
    assert "No mpirun was found" in capsys.readouterr().err


def test_options_come_from_a_file_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('np = 4\nhosts = "localhost:4"\nno-bind = true\n')
    assert main(["run", "--config", str(path), "--dry-run", "-np", "3", "--", "python"]) == 0
    shown = capsys.readouterr().out
    assert " -np 3 " in shown
    assert "HVDTRAIN_BIND" in shown


def test_a_setting_counts_as_a_variable_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing GPUs also decides whether the ranks fit."""
    argv = ["run", "-np", "2", "--dry-run", "--", "python"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main(argv) == 2
    assert "more ranks than GPUs" in capsys.readouterr().err
    monkeypatch.setenv("HVDTRAIN_SHARE_GPUS", "1")
    assert main(argv) == 0


COMPLETED = {
    "commands": ("hvdtrain sub", ["submit"]),
    "names": ("hvdtrain show tr", ["train-1", "train-2"]),
    "several": ("hvdtrain stop mnist-1 t", ["train-1", "train-2"]),
    "options": ("hvdtrain logs --fol", ["--follow"]),
}


@pytest.mark.parametrize(("line", "words"), COMPLETED.values(), ids=COMPLETED)
def test_a_shell_completes_names_and_options(line: str, words: list[str], tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "mnist-1", ".queue"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "HVDTRAIN_JOBS_DIR": str(tmp_path / "jobs"),
    }
    argv = [sys.executable, "-m", "hvdtrain"]
    subprocess.run(argv, cwd=REPOSITORY, env={**os.environ, **asked}, check=True, timeout=30)
    found = (tmp_path / "words").read_text().split("\n")
    assert [word.strip() for word in found] == words


def test_python_m_hvdtrain_is_the_command() -> None:
    argv = [sys.executable, "-m", "hvdtrain", "--version"]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    assert shown == f"hvdtrain {__version__}\n"


def test_the_command_loads_nothing_heavy() -> None:
    code = """if True:
        import sys
        from hvdtrain.cli import main
        assert main(["run", "--help"]) == 0
        import hvdtrain.agent.rank_agent, hvdtrain.launch.job
        heavy = {"tensorflow", "keras", "numpy", "mpi4py", "importlib.metadata"}
        print("HEAVY", sorted(heavy & set(sys.modules)))
    """
    argv = [sys.executable, "-c", code]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    assert shown.splitlines()[-1] == "HEAVY []"
