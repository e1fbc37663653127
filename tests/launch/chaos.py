"""A training on four hosts among random faults: nothing of it is lost, and it learns as well.

``make chaos CHAOS_S=1200`` lets it go on for twenty minutes; ``HVDTRAIN_TEST_CHAOS_SEED`` repeats
the faults of another run, as far as time lets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.checkpoint import Store
from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import HVDTRAIN, ON_CLUSTER
from tests.testbed.cluster import Cluster, Process

CHAOS_S = float(os.environ.get("HVDTRAIN_TEST_CHAOS_S", "120"))
SEED = int(os.environ.get("HVDTRAIN_TEST_CHAOS_SEED", "0")) or random.SystemRandom().randrange(
    1 << 30
)
PROGRAM = REPOSITORY / "tests/launch/chaos_training.py"
STEP_S = 0.05
# Three ranks take 40 steps an epoch of 240 samples, two of them 60.
EPOCHS = max(10, int(CHAOS_S / (40 * STEP_S)))
CALM_S = 4.0

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(int(10 * CHAOS_S) + 400)]


class Training:
    """The job, and what is done to it."""

    def __init__(self, cluster: Cluster, chance: random.Random, step_s: float) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / f"chaos-{uuid.uuid4().hex}"
        self.folder.mkdir()
        self.faults: Counter[str] = Counter()
        self._chance = chance
        self._mark = uuid.uuid4().hex
        self._errors = (self.folder / "errors").open("w+b")
        options = ["--max-restarts", "1000", "--min-np", "2", "--hang-timeout-s", "5"]
        program = [
            sys.executable,
            str(PROGRAM),
            str(self.folder / "runs"),
            str(EPOCHS),
            str(STEP_S),
        ]
        hosts = ["-H", "node1:1,node2:1,node3:1"]
        self.job = cluster.start(
            [*HVDTRAIN, *hosts, *options, "--grace-s", "1", "--", *program],
            env={**ON_CLUSTER, "HVDTRAIN_TEST_MARK": self._mark, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stderr=self._errors,
        )

    def ranks(self) -> list[Process]:
        """Processes that train."""
        marker = f"HVDTRAIN_TEST_MARK={self._mark}"
        return [
            process
            for process in self.cluster.processes(marker)
            if str(PROGRAM) in process.argv
            and "hvdtrain.agent.rank_agent" not in process.argv
            and "hvdtrain" not in process.argv
        ]

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        return max(Store(self.folder / "runs").steps(), default=0)

    def wait_for_progress(self) -> bool:
        """Whether a later checkpoint comes; otherwise the training has ended."""
        before = self.saved()
        deadline = time.monotonic() + 120
        while self.saved() <= before:
            if self.job.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"no progress:\n{self.errors()}"
            time.sleep(0.2)
        return True

    def hurt(self) -> None:
        """Do one thing to it."""
        kinds = ["kill", "stop", "disk"] if self.faults["cut"] else ["kill", "stop", "disk", "cut"]
        kind = self._chance.choice(kinds)
        ranks = self.ranks()
        if not ranks:
            return
        self.faults[kind] += 1
        one = self._chance.choice(ranks)
        if kind == "cut":
            self.cluster.cut("node2")
        elif kind == "disk":
            for rank in ranks:
                self._limit(rank, 1000)
            time.sleep(CALM_S)
            for rank in ranks:
                self._limit(rank, resource.RLIM_INFINITY)
        else:
            os.kill(one.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def result(self) -> dict[str, list[float]]:
        """What ``fit`` returned, after the end."""
        output, _ = self.job.communicate(timeout=10 * CHAOS_S + 120)
        self._errors.close()
        assert self.job.returncode == 0, self.errors()
        line = output.strip().splitlines()[-1]
        found: dict[str, list[float]] = json.loads(line.removeprefix("[0] ").split("] ")[-1])
        return found

    @staticmethod
    def _limit(rank: Process, most_bytes: int) -> None:
        """What it writes to a file beyond that fails, as on a full disk."""
        limits = (most_bytes, resource.RLIM_INFINITY)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def mended(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.mend("node2")


def test_nothing_is_lost_among_faults(cluster: Cluster, mended: None, capsys: Any) -> None:
    chance = random.Random(SEED)
    training = Training(cluster, chance, STEP_S)
    started = time.monotonic()
    while training.wait_for_progress() and time.monotonic() - started < CHAOS_S:
        time.sleep(chance.uniform(0, CALM_S))
        training.hurt()
    history = training.result()
    errors = training.errors()
    told = [line for line in errors.splitlines() if line.startswith("hvdtrain run: ")]
    with capsys.disabled():
        print(
            f"\nchaos, seed {SEED}: {dict(training.faults)} in {time.monotonic() - started:.0f} s"
        )
        print("\n".join(told))
    assert history["least"] == [1.0] * EPOCHS, errors
    assert history["most"] == [1.0] * EPOCHS, errors
    cluster.mend("node2")
    quiet = Training(cluster, chance, 0.0).result()
    assert quiet["loss"][-1] < 0.1 * quiet["loss"][0]
    assert history["loss"][-1] < 1.5 * quiet["loss"][-1]
    assert sum(training.faults.values()) > 0
