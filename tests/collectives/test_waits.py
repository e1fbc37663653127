"""Waits for stopped ranks, inside MPI calls without a time-out and elsewhere."""

from __future__ import annotations

import pytest

from tests.harness.jobs import Completed

SCRIPT = """
import os, signal
import numpy as np
import hvdtrain
from hvdtrain import world
from hvdtrain.collectives import waits

waits.WATCHDOG_MARGIN_S = 4.0
hvdtrain.init()
engine = world.collectives()
engine.allreduce(np.ones(3))
if hvdtrain.rank() == 1:
    # After all ranks have started the operation.
    {where} = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
{operation}
print("continued")
"""


def _stopped_in(launch, where: str, operation: str) -> Completed:
    """Run two ranks, and stop one of them when ``where`` is called."""
    script = SCRIPT.format(where=where, operation=operation)
    environ = {"HVDTRAIN_TIMEOUT_S": "2", "HVDTRAIN_COLLECTIVES": "mpi"}
    done: Completed = launch(2, script, env=environ, timeout_s=90)
    assert done.returncode != 0
    assert "continued" not in done.stdout
    return done


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_a_wait_for_data_times_out(launch) -> None:
    operation = 'engine.allreduce(np.ones(100_000), name="gradients")'
    done = _stopped_in(launch, "engine.transport._direct._scatter", operation)
    assert "CollectiveTimeoutError: rank 0 waited 2 s in allreduce(gradients)" in done.stderr
    assert "rank 1 is not waiting in any collective" in done.stderr


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_the_watchdog_ends_a_hung_mpi_call(launch) -> None:
    done = _stopped_in(launch, "engine.transport.messages", "engine.messages()")
    error = "hvdtrain: rank 0 of 2 failed: CollectiveTimeoutError: it was 6 s inside MPI in"
    assert f"{error} messages" in done.stderr
