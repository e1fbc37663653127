from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys

import pytest

from hvdtrain.jobs.process_identity import ProcessIdentity, is_alive, own_identity, send_signal

SLEEPS = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"]


def _identity(pid: int) -> ProcessIdentity:
    from hvdtrain.agent.process_tree import start_ticks

    return dataclasses.replace(own_identity(), pid=pid, started_ticks=start_ticks(pid))


def test_this_process_lives_and_no_other_under_its_number() -> None:
    own = own_identity()
    assert own.pid == os.getpid()
    assert is_alive(own) is True
    assert is_alive(dataclasses.replace(own, started_ticks=own.started_ticks - 1)) is False
    assert is_alive(dataclasses.replace(own, boot_id="another start of the host")) is None
    assert is_alive(dataclasses.replace(own, pid_namespace=1)) is None
    # Written by an earlier version.
    assert is_alive(dataclasses.replace(own, pid_namespace=0)) is True
    assert is_alive(dataclasses.replace(own, host="another-host")) is None
    assert is_alive(dataclasses.replace(own, pid=2**22 + 1)) is False


def test_who_has_ended_is_gone_before_the_parent_asks() -> None:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        identity = _identity(process.pid)
        assert is_alive(identity) is True
        assert send_signal(identity, signal.SIGKILL) is True
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_alive(identity) is False
        assert send_signal(identity, signal.SIGKILL) is False


@pytest.mark.parametrize(
    "change",
    [{"started_ticks": 1}, {"boot_id": "other"}, {"host": "other"}, {"pid_namespace": 1}],
)
def test_nobody_else_gets_a_signal(change) -> None:
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stranger = dataclasses.replace(_identity(process.pid), **change)
        assert send_signal(stranger, signal.SIGKILL) is False
        assert process.poll() is None
        process.kill()
