"""The file of ``horovodrun --config-file`` says the same to ``hvdtrain run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.job import Job
from hvdtrain.launch.option_files import read_horovod_file

FULL = """
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
MEANT = [
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


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that the command would run."""
    jobs: list[Job] = []
    monkeypatch.setattr(
        "hvdtrain.launch.attempts.run_job", lambda job, environ: jobs.append(job) or 0
    )
    return jobs


def written(folder: Path, text: str) -> Path:
    path = folder / "horovod.yaml"
    path.write_text(text)
    return path


def test_it_is_read_as_flags(tmp_path: Path) -> None:
    assert read_horovod_file(written(tmp_path, FULL)) == MEANT
    assert read_horovod_file(written(tmp_path, "params:\nlogging: {level: null}\n")) == []


def test_all_of_them_are_known_and_the_command_line_wins(
    tmp_path: Path, started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", "-np", "2", "--hang-timeout-s=7", "--config-file", written(tmp_path, FULL)]
    assert main([*map(str, argv), "python"]) == 0
    assert started[0].settings.log_level == "info"
    assert started[0].time_limits.hang_s == 7
    told = capsys.readouterr().err
    assert told.count("--fusion-threshold-mb, --cycle-time-ms, --autotune, ") == 1


ERRORS = {
    "text": ("np=2", "'np=2' can't be used; expected horovodrun's sections"),
    "list": ("- params", "can't be used"),
    "broken": ("params: [", "is no YAML"),
    "section": ("params: {}\nhosts: a", "hosts: 'a' can't be used; .* TOML file of --config"),
    "no-entries": ("params: 3", "params: 3 can't be used"),
    "value": ("params: {cycle_time_ms: [1]}", r"params: cycle_time_ms: \[1\] can't be used"),
}


@pytest.mark.parametrize(("text", "told"), ERRORS.values(), ids=ERRORS)
def test_what_is_no_such_file_is_told(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told) as raised:
        read_horovod_file(written(tmp_path, text))
    assert str(raised.value).startswith(f"--config-file {tmp_path / 'horovod.yaml'}")


def test_a_file_that_can_not_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.yaml can't be read: No such file"):
        read_horovod_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("controller: gloo", "argument --gloo: ranks find each other through MPI"),
        ("controller: tcp:", "is no YAML"),
        ("params: {speed: 3}", "unrecognized arguments: --speed=3"),
    ],
)
def test_what_can_not_be_had_is_refused_from_there_too(
    text: str, told: str, tmp_path: Path, started: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert main(["run", "-np", "2", "--config-file", str(path), "python"]) == 2
    assert told in capsys.readouterr().err
    assert not started
