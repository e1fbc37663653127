"""``hvdtrain bench recovery``: how long a killed rank delays the other ranks.

All ranks but one kill themselves one after another, the chief first, each at a random moment of a
step of ``fit``. The rank that remains reports the results.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

import hvdtrain
from hvdtrain import world
from hvdtrain.bench.models import build_model, synthetic_data
from hvdtrain.bench.options import RecoveryOptions
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives.engine import Engine
from hvdtrain.collectives.mpi_start import start_mpi, why_not_elastic
from hvdtrain.config import variable_name
from hvdtrain.errors import ConfigurationError, LaunchError

__all__ = ["Loss", "StepEnd", "find_losses", "measure", "rows_needed"]

MAX_BEYOND_S = 0.5
# Steps for delayed kills, and steps after the last kill.
SPARE_STEPS = 10
STEPS_AFTER = 3


class StepEnd(NamedTuple):
    """The end time of a step, in seconds of the host's clock, and the ranks that completed it."""

    end_s: float
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One killed rank, and the delay for the other ranks."""

    rank: int  # initial rank of the killed process
    ranks: int  # number of ranks before the kill
    chief: bool  # whether the killed rank was the chief
    normal_step_s: float  # median duration of the steps before the kill
    into_step_s: float  # time from the end of the last step to the kill
    next_step_s: float  # time from the kill to the end of the first step without the killed rank
    step_after_s: float  # duration of the second step without the killed rank

    @property
    def beyond_s(self) -> float:
        """How much longer the next step (see ``next_step_s``) took than a normal step."""
        return self.next_step_s - self.normal_step_s

    @property
    def after_beyond_s(self) -> float:
        """How much longer the second step after the kill took than a normal step.

        The ranks begin to read new data in this step.
        """
        return self.step_after_s - self.normal_step_s


class _RankKiller(keras.callbacks.Callback):
    """Records the time of each step, and kills this rank when ``_next_victim`` returns it."""

    def __init__(self, collectives: Engine, killed_s: np.ndarray, between_steps: int) -> None:
        super().__init__()
        self._collectives = collectives
        self._killed_s = killed_s
        self._between_steps = between_steps
        self._rank = collectives.rank
        # Independent of the model's seed, which seeds Python's generator.
        self._random = random.Random()
        self._dying = False
        self.steps: list[StepEnd] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        members = self._collectives.members
        if self._dying or len(members) == 1:
            return
        if self._rank != _next_victim(members, len(self._killed_s)):
            return
        ends_s = [step.end_s for step in self.steps if step.members == members]
        if len(ends_s) > self._between_steps:
            self._dying = True
            delay_s = self._random.uniform(0, _median_step_s(ends_s))
            threading.Timer(delay_s, self._die).start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        members = self._collectives.members
        self.steps.append(StepEnd(time.monotonic(), members))
        # The only rank that is left decides when to stop.
        if len(members) == 1 and len(self.steps) > STEPS_AFTER:
            self.model.stop_training = self.steps[-1 - STEPS_AFTER].members == members

    def _die(self) -> None:
        self._killed_s[self._rank] = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)


def measure(options: RecoveryOptions) -> None:
    """Run the benchmark on all ranks. The rank that survives prints and writes the results."""
    _check_elastic()
    os.environ[variable_name("elastic")] = "1"
    hvdtrain.init()
    collectives = world.collectives()
    # The chief changes when ranks are killed.
    report = BenchReport("recovery", options, collectives.size, world.is_chief)
    report.print(
        f"{options.model}, batch {options.batch_size} per rank; a rank is killed every "
        f"{options.between_steps} steps, at a random moment of a step\n"
    )
    killed_s = _shared_times(collectives)
    steps = _train(options, collectives, killed_s)
    if world.is_chief():
        losses = find_losses(steps, dict(enumerate(killed_s.tolist())))
        if not losses:
            raise LaunchError(
                f"recovery measured no step after a kill, only {len(steps)} before; start it again."
            )
        _show(report, losses)
        report.finish(options.json)


def find_losses(steps: Sequence[StepEnd], killed_s: Mapping[int, float]) -> list[Loss]:
    """Return the delay that each kill caused, in the order of the kills.

    Kills with too few steps before or after them are left out.

    Args:
        steps: All steps, as recorded by the one rank that was never killed.
        killed_s: Maps each initial rank to the time of its kill, or to 0 if it was not killed.
    """
    losses = []
    for rank, killed in sorted(killed_s.items(), key=lambda item: item[1]):
        before = [step for step in steps if step.end_s < killed]
        after = [step for step in steps if step.end_s > killed and rank not in step.members]
        if not before or len(after) < 2:
            continue
        last = before[-1]
        losses.append(
            Loss(
                rank=rank,
                ranks=len(last.members),
                chief=rank == last.members[0],
                normal_step_s=_median_step_s(
                    [step.end_s for step in before if step.members == last.members]
                ),
                into_step_s=killed - last.end_s,
                next_step_s=after[0].end_s - killed,
                step_after_s=after[1].end_s - after[0].end_s,
            )
        )
    return losses


def rows_needed(ranks: int, batch_size: int, between_steps: int) -> int:
    """Return the number of samples in an epoch that is long enough to kill all ranks but one."""
    # With n remaining ranks a step uses n batches.
    return batch_size * (between_steps + SPARE_STEPS) * ranks * (ranks + 1) // 2


def _check_elastic() -> None:
    """Check that the job is elastic and runs on one host."""
    topology = read_topology(os.environ)
    requirement = "recovery needs an elastic job on one host"
    if topology.local_size != topology.size:
        raise ConfigurationError(
            f"{requirement}, because clocks of hosts differ, got {topology.local_size} of "
            f"{topology.size} ranks on this host; start all ranks on one host."
        )
    reason = why_not_elastic(start_mpi(topology), os.environ)
    if reason:
        raise ConfigurationError(f"{requirement}; this job is not elastic: {reason}.")


def _shared_times(collectives: Engine) -> np.ndarray:
    """Return a number per rank, in a shared file that is unlinked once all ranks have opened it."""
    name, size = "hvdtrain bench: times", collectives.size
    path = ""
    if collectives.rank == 0:
        file, path = tempfile.mkstemp(prefix="hvdtrain-bench-")
        os.ftruncate(file, np.dtype(np.float64).itemsize * size)
        os.close(file)
    path = collectives.broadcast_object(path, name=name)
    times = np.memmap(path, np.float64, "r+", shape=(size,))
    collectives.barrier(name=name)
    if collectives.rank == 0:
        os.unlink(path)
    return times


def _train(options: RecoveryOptions, collectives: Engine, killed_s: np.ndarray) -> list[StepEnd]:
    model = hvdtrain.distribute(build_model(options.model))
    watch = _RankKiller(collectives, killed_s, options.between_steps)
    rows = rows_needed(collectives.size, options.batch_size, options.between_steps)
    x, y = synthetic_data(model, rows)
    model.fit(x, y, batch_size=options.batch_size, verbose=0, callbacks=[watch])
    return watch.steps


def _next_victim(members: Sequence[int], ranks: int) -> int:
    """Return the next rank to kill: first the chief, then always the highest remaining rank."""
    return members[0] if len(members) == ranks else members[-1]


def _median_step_s(ends_s: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(ends_s))


def _show(report: BenchReport, losses: Sequence[Loss]) -> None:
    cells = [
        [
            str(number),
            f"rank {loss.rank}{', the chief' * loss.chief}",
            f"{loss.ranks} to {loss.ranks - 1}",
            format_seconds(loss.normal_step_s),
            format_seconds(loss.next_step_s),
            f"{1e3 * loss.beyond_s:+.0f} ms",
            format_seconds(loss.step_after_s),
            f"{1e3 * loss.after_beyond_s:+.0f} ms",
        ]
        for number, loss in enumerate(losses, start=1)
    ]
    head = ["loss", "killed", "ranks", "normal step", "kill to next step", "beyond normal"]
    report.print_table([*head, "step after", "beyond normal"], cells, left=(0, 1))
    report.print(
        "normal step: median duration of a step before the kill\n"
        "kill to next step: until the other ranks have completed the first step without the rank\n"
        "step after: duration of the following step"
    )
    report.add(losses=[dataclasses.asdict(loss) for loss in losses])
    for what, worst_s in (
        ("from the kill to the next step", max(loss.beyond_s for loss in losses)),
        ("the step after", max(loss.after_beyond_s for loss in losses)),
    ):
        what += ", beyond a normal step, worst"
        report.compare(what, worst_s, "at most", MAX_BEYOND_S, "s")
