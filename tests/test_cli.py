"""The command line: help, version, usage errors and imports."""

from __future__ import annotations

import dataclasses
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import COMMANDS, main
from hvdtrain.config import Settings
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


@pytest.mark.parametrize("argv", [[], ["bench"]])
def test_a_missing_subcommand_lists_the_subcommands(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith(shown)
    assert "error: the following arguments are required: " in message


def test_help_of_run_shows_the_common_options_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["run", "--help"]) == 0
    common = capsys.readouterr().out
    assert main(["run", "--help-all"]) == 0
    everything = capsys.readouterr().out
    groups = ("ranks and hosts:", "output:", "failures and", "training modes", "other settings")
    flags = ("-np N, --num-proc N", "-H HOSTS, --hosts HOSTS", "--max-restarts N", "--mode VALUE")
    for part in (*groups, *flags, "examples:", "exit codes:"):
        assert part in common, part
        assert part in everything, part
    for entry in dataclasses.fields(Settings):
        assert f"  --{entry.name.replace('_', '-')}" in everything
    for flag in ("--grace-s", "--worker-hosts", "--jobs-dir", "--chunk-bytes"):
        assert flag in everything
        assert f"  {flag}" not in common
    assert len(common.splitlines()) <= 50, "one screen"
    for line in (*common.splitlines(), *everything.splitlines()):
        assert len(line) <= 100


USAGE_ERRORS = {
    "no-command": ([], "hvdtrain: error: the following arguments are required: COMMAND"),
    "unknown-command": (["rnu"], "'rnu'"),
    "no-np": (["run", "--", "true"], "-np"),
    "np-zero": (["run", "-np", "0", "true"], "got '0': expected a whole number above 0"),
    "np-text": (["run", "-np", "two", "true"], "got 'two'"),
    "no-program": (["run", "-np", "2"], "The program is missing"),
    "no-program-after-dashes": (["run", "-np", "2", "--"], "The program is missing"),
    "unknown-flag": (
        ["run", "-np", "2", "--nq", "3", "--", "true"],
        "hvdtrain run: error: unrecognized arguments: --nq",
    ),
    "setting": (["run", "-np", "2", "--timeout-s", "-1", "true"], "--timeout-s"),
    "choice": (["run", "-np", "2", "--collectives", "x", "true"], "expected one of auto, mpi"),
    "no-such-host": (["run", "-H", "a:x", "true"], "'a:x'"),
    "no-slots": (["run", "-np", "3", "-H", "localhost:2", "true"], "3 ranks don't fit"),
    "hosts-twice": (
        ["run", "-H", "a", "--hostfile", "b", "true"],
        "argument --hostfile: not allowed with argument -H/--hosts",
    ),
    "no-hostfile": (["run", "--hostfile", "/none", "true"], "/none can't be read: No such file"),
    "no-config": (["run", "--config", "/none", "true"], "--config /none can't be read: No such"),
    "config-unnamed": (["run", "--config"], "--config: expected one argument"),
    "variable-name": (
        ["run", "-np", "2", "-x", "A B", "true"],
        "expected NAME or NAME=VALUE, got 'A B'",
    ),
    "no-variable": (["run", "-np", "2", "-x", "HVDTRAIN_NO", "true"], "the variable is not set"),
    "cluster-and-hosts": (
        ["run", "-H", "a", "--cluster", "c", "true"],
        "argument --cluster: not allowed with argument -H/--hosts",
    ),
    "tasks-twice": (["run", "--cluster", "c", "--worker-hosts", "a", "true"], "not allowed with"),
    "no-cluster": (["run", "--cluster", "/none", "true"], "--cluster /none can't be read: No such"),
    "no-workers": (["run", "--ps-hosts", "a", "true"], "--ps-hosts requires --worker-hosts"),
    "no-worker-left": (["run", "-np", "1", "--mode", "async-ps", "true"], "leaves no worker"),
    "servers-of-no-mode": (
        ["run", "--worker-hosts", "a", "--ps-hosts", "b", "true"],
        "--worker-hosts, --ps-hosts names parameter servers, but --mode allreduce uses none",
    ),
    "code-on-stdin": (["run", "-np", "2", "--", "python", "-"], "got python -; save the code in"),
    "grace": (["run", "-np", "2", "--grace-s", "nan", "true"], "expected a number"),
}


@pytest.mark.parametrize(("argv", "message"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_an_invalid_variable_is_reported_once_before_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDTRAIN_CHUNK_BYTES", "many")
    assert main(["run", "-np", "4", "--", "python", "-c", "print('started')"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("HVDTRAIN_CHUNK_BYTES='many'") == 1
    assert captured.out == ""


def test_a_failed_start_exits_125(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "-np", "2", "--", "true"]) == 125
    assert "mpirun was not found" in capsys.readouterr().err


def test_settings_from_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["run", "-np", "2", "--dry-run", "--", "true"]
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
    "options that --help omits": ("hvdtrain run --grace-", ["--grace-s"]),
}


@pytest.mark.parametrize(("line", "words"), COMPLETED.values(), ids=COMPLETED)
def test_a_shell_completes_names_and_options(line: str, words: list[str], tmp_path: Path) -> None:
    for name in ("train-1", "train-2", "mnist-1", ".queue"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "words"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "HVDTRAIN_JOBS_DIR": str(tmp_path / "jobs"),
    }
    argv = [sys.executable, "-m", "hvdtrain"]
    subprocess.run(argv, cwd=REPOSITORY, env={**os.environ, **variables}, check=True, timeout=30)
    completions = (tmp_path / "words").read_text().split("\n")
    assert [word.strip() for word in completions] == words


def test_python_m_hvdtrain_is_the_command() -> None:
    argv = [sys.executable, "-m", "hvdtrain", "--version"]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    assert shown == f"hvdtrain {__version__}\n"


def test_the_command_loads_nothing_heavy() -> None:
    code = """if True:
        import sys
        from hvdtrain.cli import main
        assert main(["run", "--help"]) == 0
        import hvdtrain.agent.rank_agent, hvdtrain.launch.plan
        heavy = {"tensorflow", "keras", "numpy", "mpi4py", "importlib.metadata"}
        print("HEAVY", sorted(heavy & set(sys.modules)))
    """
    argv = [sys.executable, "-c", code]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    assert shown.splitlines()[-1] == "HEAVY []"


COMMAND = [sys.executable, "-P", "-m", "hvdtrain"]
DRY_RUN = [*COMMAND, "run", "--dry-run", "-np", "1", "--", "true"]


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_standard_streams_may_be_closed(closed: tuple[int, ...], tmp_path: Path) -> None:
    """A file that is opened later must not become the standard output."""
    code = """if True:
        import os, sys
        from hvdtrain.cli import main
        code = main(["run", "--dry-run", "-np", "1", "--", "true"])
        print("more", flush=True)
        assert min(os.open(os.devnull, os.O_RDONLY), *map(os.dup, range(3))) > 2
        os._exit(code)
    """
    words = " ".join(f"{number}>&-" for number in closed)
    argv = ["sh", "-c", f'exec "$@" {words}', "sh", sys.executable, "-c", code]
    assert subprocess.run(argv, cwd=REPOSITORY, timeout=60).returncode == 0


@pytest.mark.parametrize("home", [None, ""])
def test_home_defaults_to_the_user_database(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert main(["--version"]) == 0
    assert os.environ["HOME"] == pwd.getpwuid(os.getuid()).pw_dir


def test_an_unknown_user_gets_the_root_as_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 987_654)
    assert main(["--version"]) == 0
    assert os.environ["HOME"] == "/"


def test_a_removed_working_folder_is_an_error(tmp_path: Path) -> None:
    argv = ["sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "sh", *DRY_RUN]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "hvdtrain run: error: The working folder has been removed; change to one that exists "
        "(cd).\n"
    )


def test_a_full_disk_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(DRY_RUN, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        1,
        "hvdtrain run: error: the output can't be written: No space left on device\n",
    )


def test_a_closed_pipe_exits_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(DRY_RUN, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# Sends SIGINT to itself when a module is about to be imported.
AT_IMPORT = """
import os, runpy, signal, sys
_, name, *sys.argv = sys.argv
class Interrupting:
    def find_spec(self, module, path, target=None):
        if module == name:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("hvdtrain", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("hvdtrain.cli", ["jobs"]),
        ("argparse", ["jobs"]),
        ("hvdtrain.launch.cli", ["run", "--help"]),
        ("hvdtrain.jobs.job_view", ["jobs"]),
        ("hvdtrain.job_commands.logs", ["logs", "x"]),
        ("hvdtrain.launch.agent_server", DRY_RUN[4:]),
    ],
)
def test_ctrl_c_is_code_130_without_a_traceback(module: str, arguments: list[str]) -> None:
    argv = [sys.executable, "-c", AT_IMPORT, module, "hvdtrain", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
