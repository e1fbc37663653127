"""The prober itself, as a process."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.harness.jobs import REPOSITORY

HANGS = """
import time
from hvdtrain.remote import host_probe
def hang(question):
    print("hangs", flush=True)
    time.sleep(60)
host_probe._PARTS = {"hangs": hang}
host_probe.main([])
"""


def test_an_interrupt_ends_it_at_once_though_a_part_hangs() -> None:
    argv = [sys.executable, "-c", HANGS]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as prober:
        try:
            assert prober.stdout is not None
            assert prober.stdout.readline() == "hangs\n"
            prober.send_signal(signal.SIGINT)
            assert prober.wait(20) == -signal.SIGINT
        finally:
            prober.kill()
