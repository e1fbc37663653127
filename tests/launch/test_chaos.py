"""A training with random faults, which must lose no samples and learn equally well.

``make chaos CHAOS_S=1200`` runs it for twenty minutes. ``CHAOS_SEED=...`` repeats a plan.
"""

from __future__ import annotations

import math
import os
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hvdtrain.checkpoint import Store
from tests.checkpoint.disks import SMALL_BYTES
from tests.checkpoint.samples import saved_steps
from tests.launch.chaos_faults import Chaos
from tests.launch.chaos_job import ChaosJob, Report, Training
from tests.launch.chaos_plan import KINDS, LASTS_S, MAX_CALM_S, make_plan
from tests.testbed.cluster import Cluster
from tests.testbed.faults import disk

IS_LONG = "HVDTRAIN_TEST_CHAOS_S" in os.environ
CHAOS_S = float(os.environ.get("HVDTRAIN_TEST_CHAOS_S") or "25")
SEED = int(os.environ.get("HVDTRAIN_TEST_CHAOS_SEED") or random.SystemRandom().randrange(1 << 30))
ROWS, BATCH_SIZE, STEP_S = 240, 2, 0.1
MIN_NP = 2
OPTIONS = {
    "restarts": ["--max-restarts", "1000", "--min-np", str(MIN_NP)],
    "elastic": ["--max-restarts", "1000", "--min-np", str(MIN_NP), "--elastic"],
}
# The default is the mode that both continues and restarts.
MODES = list(OPTIONS) if IS_LONG else ["elastic"]
# Slow steps are not hangs, and hangs must be detected soon.
PATIENCE = ["--hang-timeout-s", "8", "--grace-s", "1"]
# Ranks without a launcher are killed after some seconds.
GONE_TIMEOUT_S = 60.0

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(int(15 * CHAOS_S) + 900)]


@pytest.fixture
def folder(cluster: Cluster) -> Path:
    """Return a folder that all hosts share."""
    path = cluster.folder / f"chaos-{uuid.uuid4().hex}"
    path.mkdir()
    return path


@pytest.fixture
def tidy(cluster: Cluster) -> Iterator[None]:
    """Repair all links, and check that nothing is left on any host."""
    before = _on_hosts(cluster)
    yield
    for host in cluster.hosts:
        cluster.restore(host)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while left := _on_hosts(cluster) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


@pytest.mark.parametrize("mode", MODES)
def test_faults_lose_no_samples(
    cluster: Cluster,
    folder: Path,
    tidy: None,
    capsys: pytest.CaptureFixture[str],
    forked_python: list[str],
    mode: str,
) -> None:
    hosts = cluster.hosts if IS_LONG else cluster.hosts[: MIN_NP + 1]
    elastic = "--elastic" in OPTIONS[mode]
    plan = make_plan(SEED, CHAOS_S, hosts, min_hosts=MIN_NP, elastic=elastic)
    with capsys.disabled():
        print(f"\nchaos ({mode}) of {CHAOS_S:g} s: CHAOS_SEED={SEED}", flush=True)
    # Enough until the last fault is repaired; the rest is trained quickly.
    most_s = CHAOS_S + MAX_CALM_S + max(last for _, last in LASTS_S.values())
    epochs = math.ceil(most_s / (ROWS / (BATCH_SIZE * len(hosts)) * STEP_S))
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
            report = Report(chaos.done, job.errors(), job.steps())
            with capsys.disabled():
                print(report, flush=True)
        saved = saved_steps(small.path / "runs")
        newest = Store(small.path / "runs").newest()
    errors = report.errors
    assert history["visits"] == [epochs, epochs], errors
    # A fault while the disk is full costs steps, but damages no checkpoint.
    assert "damaged" not in errors, errors
    assert newest is not None
    assert newest.step == saved[-1] == report.steps[-1].number, errors
    if CHAOS_S >= 120:
        assert {fault.kind for _, fault in chaos.done} == set(KINDS)
        assert report.without_room > 0, errors
        assert report.recoveries > 0, errors
    quiet = _quiet_loss(cluster, folder / "quiet", training, len(hosts), forked_python)
    assert quiet[-1] < 0.01 * quiet[0], quiet
    assert history["loss"][-1] < max(2 * quiet[-1], 1e-4 * quiet[0]), (history, quiet)


def _quiet_loss(
    cluster: Cluster, folder: Path, training: Training, ranks: int, python: Sequence[str]
) -> list[float]:
    """Return the losses of one rank with the joint batches, without faults."""
    (folder / "disk").mkdir(parents=True)
    joint = Training(
        rows=training.rows,
        epochs=training.epochs,
        batch_size=training.batch_size * ranks,
        step_s=0.0,
    )
    with ChaosJob(cluster, folder, joint, cluster.hosts[:1], python=python) as job:
        return job.result(CHAOS_S + 300)["loss"]


def _on_hosts(cluster: Cluster) -> set[str]:
    """Return the processes and temporary files of all hosts."""
    leftovers = {
        f"{process.host}: {process.pid} {' '.join(process.argv)}"
        for process in cluster.processes("")
        if process.host in cluster.hosts
    }
    for host in cluster.hosts:
        for place in ("tmp", "dev/shm"):
            leftovers |= {f"{host}: {path}" for path in (cluster.root(host) / place).iterdir()}
    return leftovers
