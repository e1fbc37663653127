"""A rank that stops within a call of MPI, which MPI itself waits out for ever."""

from __future__ import annotations

import pytest

SCRIPT = """
import os, signal
import numpy as np
import hvdtrain
from hvdtrain import world

hvdtrain.init()
engine = world.collectives()
engine.allreduce(np.ones(3))
if hvdtrain.rank() == 1:
    # All have met for the operation by then.
    engine.transport.messages = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
engine.messages()
print("went on")
"""


WITHIN = """
import os, signal
import numpy as np
import hvdtrain
from hvdtrain import world

hvdtrain.init()
engine = world.collectives()
if hvdtrain.rank() == 1:
    # All have met for the operation by then.
    engine.transport._direct._scatter = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
engine.allreduce(np.ones(100_000), name="gradients")
print("went on")
"""


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_who_waits_for_data_gives_up_by_itself(launch) -> None:
    done = launch(
        2, WITHIN, env={"HVDTRAIN_TIMEOUT_S": "2", "HVDTRAIN_COLLECTIVES": "mpi"}, timeout_s=90
    )
    assert done.returncode != 0
    assert "CollectiveTimeoutError: rank 0 waited 2 s in allreduce(gradients)" in done.stderr
    assert "rank 1 waits in no collective" in done.stderr
    assert "went on" not in done.stdout


@pytest.mark.mpi
@pytest.mark.timeout(120)
def test_the_others_do_not_wait_for_ever(launch) -> None:
    done = launch(
        2, SCRIPT, env={"HVDTRAIN_TIMEOUT_S": "2", "HVDTRAIN_COLLECTIVES": "mpi"}, timeout_s=90
    )
    assert done.returncode != 0
    told = "hvdtrain: rank 0 of 2 failed: CollectiveTimeoutError: it was 12 s inside MPI in"
    assert f"{told} messages" in done.stderr
    assert "went on" not in done.stdout
