"""Options of hvdtrain run, and programs that read from standard input."""

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
    """The job that the command with these options would run."""

    def of(*options: str) -> Job:
        assert main(["run", *options, "--", "python", "train.py"]) == 0
        return started.pop()[0]

    return of


def test_by_default_nothing_is_started_again(job) -> None:
    plain = job()
    assert (plain.max_restarts, plain.settings) == (0, Settings())
    assert plain.time_limits == TimeLimits(start_s=120, grace_s=5, preempt_grace_s=60, hang_s=540)


def test_what_is_given_counts(job) -> None:
    given = job("--max-restarts", "3", "--min-np", "2", "--elastic", "--preempt-grace-s", "7")
    assert given.max_restarts == 3
    assert given.settings == Settings(min_np=2, elastic=True)
    assert given.time_limits.preempt_grace_s == 7


def test_ranks_that_say_the_same_speak_once_unless_asked(job) -> None:
    assert (job().collapse, job("--no-collapse").collapse) == (True, False)


def test_gradients_that_are_not_finite_are_refused_on_request(job, monkeypatch) -> None:
    monkeypatch.setenv("HVDTRAIN_NON_FINITE", "ignore")
    assert job().settings.non_finite == "ignore"
    assert job("--non-finite", "error").settings.non_finite == "error"


def test_hangs_are_noticed_before_ranks_give_up(job) -> None:
    assert job("--timeout-s", "100").time_limits.hang_s == 90
    assert job("--timeout-s", "100", "--hang-timeout-s", "20").time_limits.hang_s == 20
    assert job("--hang-timeout-s", "0").time_limits.hang_s == 0


def test_fewer_ranks_than_at_least_are_an_error(capsys) -> None:
    assert main(["run", "-np", "2", "--min-np", "3", "--", "true"]) == 2
    assert "--min-np 3 is more than there are ranks, 2" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["-1", "1.5", "many"])
def test_restarts_are_counted_in_whole_numbers(value: str, capsys) -> None:
    assert main(["run", f"--max-restarts={value}", "--", "true"]) == 2
    assert f"got {value!r}: expected a whole number, 0 or more" in capsys.readouterr().err


READS = [
    "python",
    "python -",
    "python - --epochs 3",
    "/usr/bin/python3.11 -u -",
    "python3.13t -uX dev -W ignore -",
    "python -Xdev -Wignore",
    "python --check-hash-based-pycs never",
    "python -i",
    "python --",
    "python /dev/stdin",
    "pypy3 -",
    "sh -",
    "bash",
    "bash -s",
    "/bin/bash -xs -- --epochs 3",
    "bash -euo pipefail",
    "bash --login --rcfile my.rc",
    "bash +x -O extglob",
    "zsh -o extendedglob -s train",
    "dash /proc/self/fd/0",
]
READS_NOT = [
    "python train.py",
    "python -u train.py -",
    "python -X dev -W ignore train.py",
    "python -c 'print(1)'",
    "python -uc 'print(1)' -",
    "python -m train -",
    "python -mtrain",
    "python -s train.py",
    "python -- train.py",
    "python -V",
    "python --version",
    "python --check-hash-based-pycs never train.py",
    "./train.py -",
    "python-train -",
    "train -s",
    "bash train.sh -s",
    "bash - train.sh",
    "bash -lc 'python train.py'",
    "bash -euo pipefail -c 'python train.py'",
    "bash -euo pipefail train.sh",
    "bash --norc train.sh",
    "bash --version",
    "zsh -o extendedglob train.sh",
]


@pytest.mark.parametrize("command", READS)
def test_code_from_standard_input_is_recognized(command: str) -> None:
    assert reads_code_from_stdin(shlex.split(command))


@pytest.mark.parametrize("command", READS_NOT)
def test_programs_with_code_of_their_own_are_not(command: str) -> None:
    assert not reads_code_from_stdin(shlex.split(command))
