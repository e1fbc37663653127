"""Options in hvdtrain's and horovodrun's option files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import ConfigurationError
from hvdtrain.jobs.kubernetes.manifests import make_keys
from hvdtrain.launch.option_files import read_horovod_file, read_job_file, with_files


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes text into a file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "options"
        path.write_text(text, encoding="utf-8")
        return path

    return write


FILES = {
    "nothing": ("# np = 2", []),
    "number": ("np = 4", ["--num-proc=4"]),
    "long-name": ("num-proc = 4", ["--num-proc=4"]),
    "underscores": ("grace_s = 2.5", ["--grace-s=2.5"]),
    "text": ('hosts = "a:4,b:4"', ["--hosts=a:4,b:4"]),
    "short-name": ('H = "node[01-04]:2"', ["--hosts=node[01-04]:2"]),
    "hosts-one-by-one": ('hosts = ["a:4", "b:4"]', ["--hosts=a:4,b:4"]),
    "tasks-one-by-one": ('ps-hosts = ["a:1", "b:1"]', ["--ps-hosts=a:1,b:1"]),
    "true": ("oversubscribe = true", ["--oversubscribe"]),
    "false": ("oversubscribe = false", []),
    "off": ("soft-placement = false\nshare-gpus = false", ["--no-soft-placement"]),
    "on": ("soft-placement = true", ["--soft-placement"]),
    "list": ('env = ["A=1", "B"]', ["--env=A=1", "--env=B"]),
    "list-of-sbatch": (
        'sbatch = ["--partition=gpu", "--qos=low"]',
        ["--sbatch=--partition=gpu", "--sbatch=--qos=low"],
    ),
    "short-list": ('x = ["A"]', ["--env=A"]),
    "table": ('[env]\nA = 1\nB = "x y"\nC = ""', ["--env=A=1", "--env=B=x y", "--env=C="]),
    "dash": ('hostfile = "-"', ["--hostfile=-"]),
    "order": ('np = 2\nH = "a"\nno-bind = true', ["--num-proc=2", "--hosts=a", "--no-bind"]),
}


@pytest.mark.parametrize(("text", "arguments"), FILES.values(), ids=FILES)
def test_options_become_arguments(text: str, arguments: list[str], write) -> None:
    assert read_job_file(write(text)) == arguments


ERRORS = {
    "not-toml": ("np: 4", r"is not valid TOML: .*line 1"),
    "twice": ("np = 4\nnp = 5", "is not valid TOML"),
    "date": ("np = 2026-01-01", r"np has an invalid value, got datetime.date.*; expected a string"),
    "list-of-numbers": ("hosts = [1, 2]", r"hosts has an invalid value, got \[1, 2\]"),
    "list-for-one-value": ('hostfile = ["a", "b"]', "hostfile has an invalid value"),
    "table-for-one-value": ("[hosts]\na = 4", "hosts has an invalid value"),
    "table-in-table": ("[env.more]\nA = 1", "env has an invalid value"),
    "true-in-table": ("[env]\nA = true", "env has an invalid value"),
    "section": ("[run]\nnp = 2", "run has an invalid value"),
    "another-file": ('config = "other.toml"', "'config' is not allowed in this file"),
    "help": ("help = true", "'help' is not allowed in this file"),
    "empty-name": ('"" = true', "'' is not allowed in this file; use the options in hvdtrain run"),
    "dashes": ('"--np" = 2', "'--np' is not allowed in this file"),
}


@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS)
def test_an_invalid_file_is_an_error(text: str, message: str, write) -> None:
    path = write(text)
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_job_file(path)
    assert str(raised.value).startswith(f"--config {path}")


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    for read in (read_job_file, read_horovod_file):
        with pytest.raises(ConfigurationError, match=r"none can't be read: No such file"):
            read(tmp_path / "none")
        with pytest.raises(ConfigurationError, match=r"can't be read: Is a directory"):
            read(tmp_path)
    (tmp_path / "latin").write_bytes(b'hosts = "\xe9"')
    with pytest.raises(ConfigurationError, match=r"latin is not valid TOML: .*utf-8"):
        read_job_file(tmp_path / "latin")


FULL = """
np = 4
hosts = "localhost:8"
oversubscribe = true
grace-s = 1
timeout-s = 30
[env]
DATA = "/file"
TOKEN = "file"
"""


def test_flags_override_the_file_and_the_file_the_environment(
    write, started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDTRAIN_TIMEOUT_S", "60")
    monkeypatch.setenv("HVDTRAIN_LOG_LEVEL", "debug")
    monkeypatch.setenv("DATA", "/environment")
    flags = ["--grace-s", "2", "-np", "3", "--config", str(write(FULL)), "-x", "TOKEN=flag"]
    assert main(["run", *flags, "--", "python", "train.py", "--config", "own.toml"]) == 0
    (job, environ), *more = started
    assert not more
    assert job.program == ("python", "train.py", "--config", "own.toml")
    assert (job.ranks, job.hosts, job.oversubscribe) == (3, "localhost:8", True)
    assert job.time_limits.grace_s == 2
    assert set(job.extra) == {"DATA", "TOKEN"}
    names = ("DATA", "TOKEN", "HVDTRAIN_TIMEOUT_S", "HVDTRAIN_LOG_LEVEL")
    assert [environ[name] for name in names] == ["/file", "flag", "30", "debug"]
    assert os.environ["DATA"] == "/environment"


def test_options_of_a_file_go_before_the_command_line(write) -> None:
    path = write("np = 8\non = 'slurm'")
    words = ["-x", "A=b c", "--config", str(path), "-np", "3", "--", "python", "--config", "own"]
    expected = ["--num-proc=8", "--on=slurm", "-x", "A=b c", "-np", "3", "--"]
    assert with_files(words) == [*expected, "python", "--config", "own"]
    assert with_files([f"--config={path}"]) == ["--num-proc=8", "--on=slurm"]


PLANS = {
    "local": ("local", " -np 2 "),
    "slurm": ("slurm", " --ntasks=2 "),
    "kubernetes": ("kubernetes", "replicas: 2"),
}


@pytest.mark.parametrize(("kind", "text"), PLANS.values(), ids=PLANS)
def test_submit_passes_the_options_of_the_file(
    kind: str,
    text: str,
    write,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write("np = 2\ngrace-s = 20\noversubscribe = true\n[env]\nMY_TOKEN = 'hunter2'")
    typed = ["--num-proc=2", "--grace-s=20", "--oversubscribe", "--env=MY_TOKEN=hunter2"]
    keys = make_keys()
    monkeypatch.setattr("hvdtrain.jobs.kubernetes.pod_backend.make_keys", lambda: keys)
    backend = ["--on", kind, *(["--image=i"] if kind == "kubernetes" else [])]
    shown = []
    for options in (["--config", str(path)], typed):
        argv = ["submit", *options, *backend, "--jobs-dir", str(tmp_path), "--dry-run", "true"]
        assert main(argv) == 0
        shown.append(capsys.readouterr().out)
    assert text in shown[0]
    assert shown[0] == shown[1]


WRONG = {
    "unknown-option": ("foo = 1", "unrecognized arguments: --foo=1"),
    "program": ('program = "python"', "unrecognized arguments: --program=python"),
    "value-too-many": ("oversubscribe = 3", "--oversubscribe: ignored explicit argument '3'"),
    "value-missing": ("hosts = true", "-H/--hosts: expected one argument"),
    "value": ("np = -3", "-np/--num-proc: got '-3': expected a whole number above 0"),
    "setting": ("timeout-s = 0", "--timeout-s: got '0': expected a number above 0"),
    "variable": ("[env]\n'A B' = 1", "-x/--env: expected NAME or NAME=VALUE, got 'A B=1'"),
    "not-toml": ("np", "--config"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_an_invalid_option_is_a_usage_error(
    text: str, message: str, write, started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--config", str(write(text)), "-np", "2", "--", "true"]) == 2
    assert message in capsys.readouterr().err
    assert not started


HOROVOD = """
controller: MPI
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: true
  log_file: autotune.csv
timeline:
  filename: timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
logging:
  level: INFO
  with_timestamp: false
"""
HOROVOD_ARGUMENTS = [
    "--mpi",
    "--fusion-threshold-mb=32",
    "--cycle-time-ms=2.5",
    "--hierarchical-allreduce",
    "--no-hierarchical-allgather",
    "--autotune",
    "--autotune-log-file=autotune.csv",
    "--timeline-filename=timeline.json",
    "--timeline-mark-cycles",
    "--no-stall-check",
    "--stall-check-warning-time-seconds=120",
    "--mpi-threads-disable",
    "--num-nccl-streams=2",
    "--log-level=INFO",
    "--log-without-timestamp",
]


def test_read_horovod_file(write) -> None:
    assert read_horovod_file(write(HOROVOD)) == HOROVOD_ARGUMENTS
    assert read_horovod_file(write("params:\nlogging: {level: null}\n")) == []


def test_the_command_line_overrides_horovods_file(
    write, started, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "-np", "2", "--hang-timeout-s=7", "--config-file", write(HOROVOD)]
    assert main([*map(str, argv), "true"]) == 0
    (job, _) = started[0]
    assert job.settings.log_level == "info"
    assert job.time_limits.hang_s == 7
    names = "--fusion-threshold-mb, --cycle-time-ms, --autotune, "
    assert capsys.readouterr().err.count(names) == 1


HOROVOD_ERRORS = {
    "text": ("np=2", "invalid entry, got 'np=2'; expected horovodrun's sections"),
    "list": ("- params", "invalid entry"),
    "broken": ("params: [", "is not valid YAML"),
    "section": ("params: {}\nhosts: a", "got hosts: 'a'; .* TOML file of --config"),
    "no-entries": ("params: 3", "got params: 3;"),
    "value": ("params: {cycle_time_ms: [1]}", r"got params: cycle_time_ms: \[1\];"),
}


@pytest.mark.parametrize(("text", "message"), HOROVOD_ERRORS.values(), ids=HOROVOD_ERRORS)
def test_an_invalid_horovod_file_is_an_error(text: str, message: str, write) -> None:
    path = write(text)
    with pytest.raises(ConfigurationError, match=message) as raised:
        read_horovod_file(path)
    assert str(raised.value).startswith(f"--config-file {path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("controller: gloo", "argument --gloo: ranks communicate through MPI"),
        ("controller: tcp:", "is not valid YAML"),
        ("params: {speed: 3}", "unrecognized arguments: --speed=3"),
    ],
)
def test_unsupported_options_in_horovods_file_are_refused(
    text: str, message: str, write, started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-np", "2", "--config-file", str(write(text)), "true"]) == 2
    assert message in capsys.readouterr().err
    assert not started
