"""The check for hosts that can't be reached any more, before a job is started again on them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.cluster.hosts import is_this_host
from hvdtrain.remote.remote_probe import ssh_probe

__all__ = ["unreachable"]

ANSWER_TIMEOUT_S = 20.0
STEP_S = 0.05
ASKED_TIMES = 2


def unreachable(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    *,
    ssh: Sequence[str] = (),
    give_up: Callable[[], bool],
) -> list[str]:
    """The hosts that ssh gets no answer from, asked twice: a busy one may miss one connection.

    All are asked at the same time. Once ``give_up`` says so, nothing is held against who has not
    answered.
    """
    silent = [host for host in hosts if not is_this_host(host)]
    for _ in range(ASKED_TIMES):
        silent = _without_answer(silent, environ, ssh, give_up)
    return [] if give_up() else silent


def _without_answer(
    hosts: Sequence[str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
    give_up: Callable[[], bool],
) -> list[str]:
    asked = {
        host: subprocess.Popen(
            ssh_probe(host, ("true",), environ, options=ssh),
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    }
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while any(probe.poll() is None for probe in asked.values()):
        if give_up() or time.monotonic() > deadline:
            break
        time.sleep(STEP_S)
    silent = [host for host, probe in asked.items() if probe.poll() != 0]
    for probe in asked.values():
        probe.kill()
        probe.wait(timeout=ANSWER_TIMEOUT_S)
    return silent
