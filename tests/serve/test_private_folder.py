from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvdtrain.serve.private_folder import PrivateFolder

_HOLDS = """
import signal, sys, tempfile
from hvdtrain.serve.private_folder import PrivateFolder
tempfile.tempdir = sys.argv[1]
folder = PrivateFolder("held-")
(folder.path / "socket").touch()
print(folder.path, flush=True)
signal.pause()
"""


def test_who_is_killed_leaves_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other, young = tmp_path / "other-1", tmp_path / "held-young"
    other.mkdir()
    young.mkdir()
    argv = [sys.executable, "-c", _HOLDS, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            held = Path(process.stdout.readline().strip())
            os.utime(held, (0, 0))
            own = PrivateFolder("held-")
            assert own.path.stat().st_mode & 0o777 == 0o700
            assert {*tmp_path.iterdir()} == {other, young, held, own.path}, "it lives"
        finally:
            process.send_signal(signal.SIGKILL)
    os.utime(held, (0, 0))
    next_one = PrivateFolder("held-")
    assert {*tmp_path.iterdir()} == {other, young, own.path, next_one.path}
    own.remove()
    next_one.remove()
    assert {*tmp_path.iterdir()} == {other, young}
