"""Commands that would read their code from the ranks' empty standard input."""

from __future__ import annotations

import shlex

import pytest

from hvdtrain.launch.standard_input import reads_code_from_stdin

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
