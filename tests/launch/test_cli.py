"""Options of hvdtrain run, and programs that read their code from standard input."""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest

from hvdtrain.cli import main
from hvdtrain.config import Settings
from hvdtrain.launch.cli import reads_code_from_stdin
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import TimeLimits


@pytest.fixture
def job(started) -> Callable[..., Job]:
    """Return a function from options to the job that the command would run."""

    def of(*options: str) -> Job:
        assert main(["run", *options, "--", "python", "train.py"]) == 0
        return started.pop()[0]

    return of


def test_defaults(job) -> None:
    default = job()
    assert (default.max_restarts, default.settings) == (0, Settings())
    assert default.time_limits == TimeLimits(start_s=120, grace_s=5, preempt_grace_s=60, hang_s=540)


def test_options_override_defaults(job) -> None:
    given = job("--max-restarts", "3", "--min-np", "2", "--elastic", "--preempt-grace-s", "7")
    assert given.max_restarts == 3
    assert given.settings == Settings(min_np=2, elastic=True)
    assert given.time_limits.preempt_grace_s == 7
    assert (job().collapse, job("--no-collapse").collapse) == (True, False)


def test_options_override_variables(job, monkeypatch) -> None:
    monkeypatch.setenv("HVDTRAIN_NON_FINITE", "ignore")
    assert job().settings.non_finite == "ignore"
    assert job("--non-finite", "error").settings.non_finite == "error"


def test_hangs_are_detected_before_ranks_time_out(job) -> None:
    assert job("--timeout-s", "100").time_limits.hang_s == 90
    assert job("--timeout-s", "100", "--hang-timeout-s", "20").time_limits.hang_s == 20
    assert job("--hang-timeout-s", "0").time_limits.hang_s == 0


def test_fewer_ranks_than_the_minimum_are_an_error(capsys) -> None:
    assert main(["run", "-np", "2", "--min-np", "3", "--", "true"]) == 2
    assert "--min-np 3 is more than the number of ranks, 2" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_max_restarts_is_an_integer(value: str, capsys) -> None:
    assert main(["run", f"--max-restarts={value}", "--", "true"]) == 2
    assert f"got {value!r}: expected a whole number, 0 or more" in capsys.readouterr().err


READING = [
    "python",
    "python -",
    "python - --epochs 3",
    "/usr/bin/python3.11 -u -",
    "python -i",
    "python --",
    "python /dev/stdin",
    "pypy3 -",
    "python -W error",
    "python -uX dev -Wonce",
    "python --check-hash-based-pycs always",
    "sh -",
    "bash",
    "bash -s",
    "/bin/bash -xs -- --epochs 3",
    "bash -s train",
    "bash --login",
    "bash -o pipefail",
    "bash -euo pipefail +O extglob --rcfile rc",
    "dash /proc/self/fd/0",
]
NOT_READING = [
    "python train.py",
    "python -u train.py -",
    "python -X dev -W ignore train.py",
    "python -O train.py",
    "python -W error -c 'print(1)'",
    "python -c 'print(1)'",
    "python -uc 'print(1)' -",
    "python -m train -",
    "python -mtrain",
    "python -- train.py",
    "python -V",
    "python --version",
    "./train.py -",
    "python-train -",
    "train -s",
    "bash train.sh -s",
    "bash - train.sh",
    "bash -sc 'python train.py'",
    "bash -lc 'python train.py'",
    "bash -euo pipefail train.sh",
    "bash -o pipefail -c 'python train.py'",
    "bash --version",
]


@pytest.mark.parametrize(
    ("command", "reads"),
    [*((command, True) for command in READING), *((command, False) for command in NOT_READING)],
)
def test_reads_code_from_stdin(command: str, reads: bool) -> None:
    assert reads_code_from_stdin(shlex.split(command)) is reads
