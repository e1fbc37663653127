from __future__ import annotations

import signal
import subprocess
import sys

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
