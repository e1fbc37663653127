from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.remote.host_probe import installed_versions
from tests.harness.jobs import REPOSITORY

HANGS = """
import time
from hvdtrain.remote import host_probe
def hang(request):
    print("hangs", flush=True)
    time.sleep(60)
host_probe._PARTS = {"hangs": hang}
host_probe.main([])
"""


def test_an_interrupt_ends_a_probe_that_hangs() -> None:
    argv = [sys.executable, "-c", HANGS]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as probe:
        try:
            assert probe.stdout is not None
            assert probe.stdout.readline() == "hangs\n"
            probe.send_signal(signal.SIGINT)
            assert probe.wait(20) == -signal.SIGINT
        finally:
            probe.kill()


def test_a_half_removed_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keras-3.15.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "keras" not in installed_versions()
