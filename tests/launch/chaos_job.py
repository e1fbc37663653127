"""The job of the chaos test, and a report of its faults and steps."""

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

__all__ = ["ChaosJob", "Report", "Step", "Training"]

PROGRAM = REPOSITORY / "tests/launch/chaos_training.py"
# The job is training if its last step was made within this many seconds.
FRESH_S = 1.0
# Ranks time out on a rank that stops between steps, where the launcher detects no hang.
_SETTINGS = {"HVDTRAIN_TIMEOUT_S": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}
_PREFIX = "hvdtrain run: "
_UNSAVED = "hvdtrain: no checkpoint could be saved"


@dataclass(frozen=True, kw_only=True)
class Training:
    """The size of a training."""

    rows: int
    epochs: int
    batch_size: int  # per rank
    step_s: float  # delay of a step while the file ``slow`` exists


@dataclass(frozen=True)
class Step:
    """A completed step."""

    at_s: float
    number: int


class ChaosJob:
    """A job of ``hvdtrain run`` on the cluster with one rank per host.

    A ``with`` statement ends the job.

    All hosts share ``folder``. While it contains a file ``slow``, steps are slow.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        training: Training,
        hosts: Sequence[str],
        *options: str,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        self.folder = folder
        self._cluster = cluster
        self._mark = f"HVDTRAIN_TEST_MARK={uuid.uuid4().hex}"
        self._output, self._errors = folder / "output", folder / "errors"
        program = [*python, str(PROGRAM), str(folder), *map(str, astuple(training))]
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
        """Return all processes of the job, including the launcher and the agents."""
        return self._cluster.processes(self._mark)

    def ranks(self, *hosts: str) -> set[int]:
        """Return the processes of the program on ``hosts``."""
        own = (sys.executable, str(PROGRAM))
        return {p.pid for p in self.processes() if p.host in hosts and p.argv[:2] == own}

    def trains(self) -> bool:
        """Return whether the ranks have just completed a step."""
        try:
            return time.time() - (self.folder / "steps").stat().st_mtime < FRESH_S
        except FileNotFoundError:
            return False

    def steps(self) -> list[Step]:
        """Return all completed steps, including repeated ones."""
        lines = (self.folder / "steps").read_text().splitlines()
        return [Step(float(at_s), int(number)) for at_s, number in map(str.split, lines)]

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def result(self, timeout_s: float) -> dict[str, list[float]]:
        """Wait until the job ends, and return the program's output."""
        code = self._process.wait(timeout_s)
        assert code == 0, f"exit code {code}:\n{self.errors()}"
        line = self._output.read_text().strip().splitlines()[-1]
        result: dict[str, list[float]] = json.loads(line[line.index("{") :])
        return result


@dataclass(frozen=True)
class Report:
    """The faults of a job, and the steps and time that they cost."""

    faults: Sequence[tuple[float, Fault]]  # with seconds since the first step
    errors: str  # the job's stderr
    steps: Sequence[Step]

    @property
    def messages(self) -> list[str]:
        """The launcher's messages, without tracebacks and the ranks' output."""
        lines = [line for line in self.errors.splitlines() if line.startswith(_PREFIX)]
        messages = [line for line in lines if not line.startswith(_PREFIX + " ")]
        titles = ("traceback:", "last lines of stderr:")
        return [line for line in messages if not line.endswith(titles)]

    @property
    def recoveries(self) -> int:
        """The number of restarts."""
        return sum(line.startswith(f"{_PREFIX}attempt ") for line in self.messages)

    @property
    def without_room(self) -> int:
        """The number of attempts that could not save a checkpoint. Each prints one message."""
        return self.errors.count(_UNSAVED)

    @property
    def repeated(self) -> int:
        """The number of repeated steps."""
        return len(self.steps) - len({step.number for step in self.steps})

    @property
    def idle_s(self) -> float:
        """The seconds without steps, after the first step."""
        gaps = [after.at_s - before.at_s for before, after in pairwise(self.steps)]
        return sum(gap for gap in gaps if gap > FRESH_S)

    def __str__(self) -> str:
        counts = Counter(fault.kind for _, fault in self.faults)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(counts.items()))
        return "\n".join(
            [
                *(f"{at_s:7.1f} s  {fault}" for at_s, fault in self.faults),
                *self.messages,
                f"faults: {kinds or 'none'}",
                f"recoveries: {self.recoveries}; {self.without_room} attempts on a full disk",
                f"lost: {self.repeated} of {len(self.steps)} steps were repeated, and no step was "
                f"completed for {self.idle_s:.0f} s",
            ]
        )
