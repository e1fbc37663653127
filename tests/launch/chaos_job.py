"""The training of the chaos test, and the account of what befell it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

from tests.harness.jobs import REPOSITORY
from tests.launch.chaos_plan import Fault
from tests.launch.jobs import HVDTRAIN, ON_CLUSTER
from tests.testbed.cluster import Cluster, Process

__all__ = ["Account", "ChaosJob", "Step", "Training"]

PROGRAM = REPOSITORY / "tests/launch/chaos_training.py"
# With a step this young the job is training; without, it is idle.
FRESH_S = 1.0
# Ranks give up on one that stops outside of a step, where the launcher does not judge.
_SETTINGS = {"HVDTRAIN_TIMEOUT_S": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}
_TOLD = "hvdtrain run: "
_UNSAVED = "hvdtrain: no checkpoint could be saved"


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained.

    Attributes:
        rows: Samples.
        epochs: How often each of them is seen.
        batch_size: Of each rank.
        step_s: By how much a step takes longer while there is a file ``slow``.
    """

    rows: int
    epochs: int
    batch_size: int
    step_s: float


@dataclass(frozen=True)
class Step:
    """When which step was done."""

    at_s: float
    number: int


class ChaosJob:
    """A job of ``hvdtrain run`` on the cluster, one rank a host; a ``with`` statement ends it.

    Args:
        cluster: Where it runs.
        folder: Of this job alone, on all hosts. A file ``slow`` in it makes steps slow.
        training: What it does.
        hosts: Of the ranks.
        options: Of ``hvdtrain run``.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        training: Training,
        hosts: Sequence[str],
        *options: str,
    ) -> None:
        self.folder = folder
        self._cluster = cluster
        self._mark = f"HVDTRAIN_TEST_MARK={uuid.uuid4().hex}"
        self._output, self._errors = folder / "output", folder / "errors"
        program = [sys.executable, str(PROGRAM), str(folder), *map(str, astuple(training))]
        where = ["-H", ",".join(f"{host}:1" for host in hosts)]
        name, value = self._mark.split("=")
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self._process = cluster.start(
                [*HVDTRAIN, *where, *options, "--", *program],
                env={**ON_CLUSTER, **_SETTINGS, name: value},
                stdout=output,
                stderr=errors,
            )

    def __enter__(self) -> ChaosJob:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in [self._process.pid, *(process.pid for process in self.processes())]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def processes(self) -> list[Process]:
        """All of the job, launcher and agents too."""
        return self._cluster.processes(self._mark)

    def ranks(self, *hosts: str) -> set[int]:
        """The processes on ``hosts`` that train, or are about to."""
        own = (sys.executable, str(PROGRAM))
        return {p.pid for p in self.processes() if p.host in hosts and p.argv[:2] == own}

    def trains(self) -> bool:
        """Whether the ranks have just done a step."""
        try:
            return time.time() - (self.folder / "steps").stat().st_mtime < FRESH_S
        except FileNotFoundError:
            return False

    def steps(self) -> list[Step]:
        """All that were done, some of them again."""
        lines = (self.folder / "steps").read_text().splitlines()
        return [Step(float(at_s), int(number)) for at_s, number in map(str.split, lines)]

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def result(self, timeout_s: float) -> dict[str, list[float]]:
        """What ``fit`` returned, after the end."""
        code = self._process.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.errors()}"
        line = self._output.read_text().strip().splitlines()[-1]
        found: dict[str, list[float]] = json.loads(line[line.index("{") :])
        return found


@dataclass(frozen=True)
class Account:
    """What befell a job, and what it cost.

    Attributes:
        faults: When each was carried out, in seconds since the first step.
        errors: What the job wrote to stderr.
        steps: Those that it did.
    """

    faults: Sequence[tuple[float, Fault]]
    errors: str
    steps: Sequence[Step]

    @property
    def told(self) -> list[str]:
        """The launcher's messages, without what ranks printed."""
        lines = [line for line in self.errors.splitlines() if line.startswith(_TOLD)]
        said = [line for line in lines if not line.startswith(_TOLD + " ")]
        return [line for line in said if not line.endswith(("traceback:", "last lines of stderr:"))]

    @property
    def recoveries(self) -> int:
        """How often the job was started again."""
        return sum(line.startswith(f"{_TOLD}attempt ") for line in self.told)

    @property
    def without_room(self) -> int:
        """How many attempts could not save a checkpoint; each says so once."""
        return self.errors.count(_UNSAVED)

    @property
    def repeated(self) -> int:
        """Steps that were done again."""
        return len(self.steps) - len({step.number for step in self.steps})

    @property
    def idle_s(self) -> float:
        """For how long no step was done, after the first one."""
        gaps = [after.at_s - before.at_s for before, after in pairwise(self.steps)]
        return sum(gap for gap in gaps if gap > FRESH_S)

    def __str__(self) -> str:
        counts = Counter(fault.kind for _, fault in self.faults)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
        return "\n".join(
            [
                *(f"{at_s:7.1f} s  {fault}" for at_s, fault in self.faults),
                *self.told,
                f"faults: {kinds or 'none'}",
                f"recoveries: {self.recoveries}; {self.without_room} attempts met a full disk",
                f"lost: {self.repeated} of {len(self.steps)} steps were done again, and for "
                f"{self.idle_s:.0f} s none was done",
            ]
        )
