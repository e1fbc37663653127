from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.remote.run_capture import run_capture


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_exit_code_and_output() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = run_capture(python(code), timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")


def test_environment_and_input() -> None:
    code = "import os, sys; print(sys.stdin.read(), os.environ.get('HOME'), os.environ['MINE'])"
    done = run_capture(python(code), environ={"MINE": "1"}, timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, " None 1\n", "")


def test_invalid_utf_8() -> None:
    code = r"import sys; sys.stdout.buffer.write(b'a\xff')"
    assert run_capture(python(code), timeout_s=30).stdout == "a\ufffd"


def test_a_program_that_hangs() -> None:
    started = time.monotonic()
    # The child keeps the pipe open.
    argv = ["/bin/sh", "-c", "sleep 25 & wait"]
    with pytest.raises(LaunchError) as caught:
        run_capture(argv, timeout_s=0.5, remedy="Try it.")
    assert str(caught.value) == ("/bin/sh -c sleep 25 & wait did not answer within 0.5 s. Try it.")
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(("mode", "why"), [(0o644, "Permission denied"), (None, "No such file")])
def test_a_program_that_can_not_be_started(tmp_path: Path, mode: int | None, why: str) -> None:
    path = tmp_path / "mpirun"
    if mode is not None:
        path.touch(mode)
    with pytest.raises(LaunchError, match=f"^{path} can't be started: {why}"):
        run_capture([str(path), "--version"], timeout_s=30)
