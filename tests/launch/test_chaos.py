"""A training on four hosts among random faults: nothing of it is lost, and it learns as well.

``make chaos CHAOS_S=1200`` lets it go on for twenty minutes; ``CHAOS_SEED=...`` repeats the plan of
another run.
"""

from __future__ import annotations

import math
import os
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.checkpoint import Store
from tests.checkpoint.disks import SMALL_BYTES
from tests.launch.chaos_faults import Chaos
from tests.launch.chaos_job import Account, ChaosJob, Training
from tests.launch.chaos_plan import KINDS, make_plan
from tests.testbed.cluster import Cluster
from tests.testbed.faults import disk

CHAOS_S = float(os.environ.get("HVDTRAIN_TEST_CHAOS_S") or "40")
SEED = int(os.environ.get("HVDTRAIN_TEST_CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
ROWS, BATCH_SIZE, STEP_S = 240, 2, 0.1
# The loss is low by then.
LEAST_EPOCHS = 30
MIN_NP = 2
OPTIONS = {
    "restarts": ["--max-restarts", "1000", "--min-np", str(MIN_NP)],
    "elastic": ["--max-restarts", "1000", "--min-np", str(MIN_NP), "--elastic"],
}
# The suite takes the one that has both ways to go on.
MODES = list(OPTIONS) if "HVDTRAIN_TEST_CHAOS_S" in os.environ else ["elastic"]
# What is slow must not be taken for a hang, nor a hang waited for in vain.
PATIENCE = ["--hang-timeout-s", "8", "--grace-s", "1"]
# Ranks that have lost the launcher are killed after some seconds.
GONE_TIMEOUT_S = 60.0

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(int(15 * CHAOS_S) + 900)]


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """A folder that all hosts share."""
    path = cluster.folder / f"chaos-{uuid.uuid4().hex}"
    path.mkdir()
    return path


@pytest.fixture
def tidy(cluster: Cluster) -> Iterator[None]:
    """Links are put back, and nothing is left on any host then."""
    before = _on_hosts(cluster)
    yield
    for host in cluster.hosts:
        cluster.restore(host)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := _on_hosts(cluster) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_among_faults(
    cluster: Cluster, folder: Path, tidy: None, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    hosts = cluster.hosts
    elastic = "--elastic" in OPTIONS[mode]
    plan = make_plan(SEED, CHAOS_S, hosts, min_hosts=MIN_NP, elastic=elastic)
    with capsys.disabled():
        print(f"\nchaos ({mode}) of {CHAOS_S:g} s: CHAOS_SEED={SEED}", flush=True)
    # Enough for the whole time, should nothing happen; what is left of it then is done quickly.
    epochs = max(LEAST_EPOCHS, math.ceil(CHAOS_S / (ROWS / (BATCH_SIZE * len(hosts)) * STEP_S)))
    training = Training(rows=ROWS, epochs=epochs, batch_size=BATCH_SIZE, step_s=STEP_S)
    (folder / "slow").touch()
    with (
        disk(cluster, hosts[0], folder / "disk", SMALL_BYTES) as small,
        ChaosJob(cluster, folder, training, hosts, *OPTIONS[mode], *PATIENCE) as job,
    ):
        chaos = Chaos(cluster, job, small)
        try:
            chaos.carry_out(plan)
            (folder / "slow").unlink()
            history = job.result(10 * CHAOS_S + 300)
        finally:
            account = Account(chaos.done, job.errors(), job.steps())
            with capsys.disabled():
                print(account, flush=True)
        store = Store(small.path / "runs")
        saved = store.steps()
        newest = store.newest()
    errors = account.errors
    assert history["visits"] == [epochs, epochs], errors
    # A full disk and a fault meanwhile cost steps, but no checkpoint is broken by them.
    assert "damaged" not in errors, errors
    assert newest is not None
    assert newest.step == saved[-1] == account.steps[-1].number, errors
    if CHAOS_S >= 120:
        assert {fault.kind for _, fault in chaos.done} == set(KINDS)
        assert account.without_room > 0, errors
        assert account.recoveries > 0, errors
    quiet = _quiet_loss(cluster, folder / "quiet", training)
    assert quiet[-1] < 0.01 * quiet[0], quiet
    assert history["loss"][-1] < max(2 * quiet[-1], 1e-4 * quiet[0]), (history, quiet)


def _quiet_loss(cluster: Cluster, folder: Path, training: Training) -> list[float]:
    """The losses of one rank that learns from what all ranks learn from in a step, undisturbed."""
    (folder / "disk").mkdir(parents=True)
    joint = Training(
        rows=training.rows,
        epochs=training.epochs,
        batch_size=training.batch_size * len(cluster.hosts),
        step_s=0.0,
    )
    with ChaosJob(cluster, folder, joint, cluster.hosts[:1]) as job:
        return job.result(CHAOS_S + 300)["loss"]


def _on_hosts(cluster: Cluster) -> set[str]:
    """Processes of all hosts, and what is in their folders for such things."""
    found = {
        f"{process.host}: {process.pid} {' '.join(process.argv)}"
        for process in cluster.processes("")
        if process.host in cluster.hosts
    }
    for host in cluster.hosts:
        for place in ("tmp", "dev/shm"):
            found |= {f"{host}: {path}" for path in (cluster.root(host) / place).iterdir()}
    return found
