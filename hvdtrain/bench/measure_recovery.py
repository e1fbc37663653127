"""``hvdtrain bench recovery`` on one rank: for how long the others wait when one is killed.

All ranks but one kill themselves in turn, the chief first, each at a random moment of a step of
``fit``. The one that is left has seen every step, and tells.
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

MOST_BEYOND_S = 0.5
# That a rank may be late with its own death, and that are looked at after the last one's.
SPARE_STEPS = 10
STEPS_AFTER = 3


class StepEnd(NamedTuple):
    """The end of a step, in seconds of the host's clock, and the ranks that there were then."""

    end_s: float
    members: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One killed rank, and the time that its death cost the others.

    Attributes:
        rank: Its first number.
        ranks: How many ranks there were before.
        chief: Whether it was the chief.
        normal_step_s: Median of the steps before, from end to end.
        into_step_s: From the end of the last step to the kill.
        next_step_s: From the kill to the end of the first step without the rank.
        step_after_s: Seconds that the step after that took.
    """

    rank: int
    ranks: int
    chief: bool
    normal_step_s: float
    into_step_s: float
    next_step_s: float
    step_after_s: float

    @property
    def beyond_s(self) -> float:
        """The time by which the next step came later than it would have at the latest."""
        return self.next_step_s - self.normal_step_s

    @property
    def after_beyond_s(self) -> float:
        """The time by which the step after that was longer, which begins with new data."""
        return self.step_after_s - self.normal_step_s


class _RankKiller(keras.callbacks.Callback):
    """Notes the steps, and kills this rank when it is its turn; ``killed_s`` tells the others."""

    def __init__(self, collectives: Engine, killed_s: np.ndarray, between_steps: int) -> None:
        super().__init__()
        self._collectives = collectives
        self._killed_s = killed_s
        self._between_steps = between_steps
        self._me = collectives.rank
        # Of its own: the model's seed sets Python's.
        self._chance = random.Random()
        self._dying = False
        self.steps: list[StepEnd] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        now = self._collectives.members
        if self._dying or len(now) == 1:
            return
        if self._me != _next_to_die(now, len(self._killed_s)):
            return
        ends_s = [step.end_s for step in self.steps if step.members == now]
        if len(ends_s) > self._between_steps:
            self._dying = True
            delay_s = self._chance.uniform(0, _median_step_s(ends_s))
            threading.Timer(delay_s, self._die).start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        now = self._collectives.members
        self.steps.append(StepEnd(time.monotonic(), now))
        # Nobody is left with whom to agree on it.
        if len(now) == 1 and len(self.steps) > STEPS_AFTER:
            self.model.stop_training = self.steps[-1 - STEPS_AFTER].members == now

    def _die(self) -> None:
        self._killed_s[self._me] = time.monotonic()
        os.kill(os.getpid(), signal.SIGKILL)


def measure(options: RecoveryOptions) -> None:
    """Measure on the ranks that are there; the one that is left prints and writes."""
    _check_elastic()
    os.environ[variable_name("elastic")] = "1"
    hvdtrain.init()
    collectives = world.collectives()
    # Who is the chief changes as ranks are killed.
    report = BenchReport("recovery", options, collectives.size, world.is_chief)
    report.print(
        f"{options.model}, batch {options.batch_size} a rank; a rank is killed every "
        f"{options.between_steps} steps, at a random moment of a step\n"
    )
    killed_s = _shared_times(collectives)
    steps = _train(options, collectives, killed_s)
    if world.is_chief():
        losses = find_losses(steps, dict(enumerate(killed_s.tolist())))
        if not losses:
            raise LaunchError(
                f"No step was completed after a rank was killed; {len(steps)} steps were before. "
                "Something else must have ended ranks; start the benchmark again."
            )
        _show(report, losses)
        report.finish(options.json)


def find_losses(steps: Sequence[StepEnd], killed_s: Mapping[int, float]) -> list[Loss]:
    """Return what each killed rank cost, in the order of their deaths, as far as steps tell.

    Args:
        steps: All of them, as a rank saw them that was left.
        killed_s: By first number when each was killed; 0 for never.
    """
    found = []
    for rank, killed in sorted(killed_s.items(), key=lambda item: item[1]):
        before = [step for step in steps if step.end_s < killed]
        after = [step for step in steps if step.end_s > killed and rank not in step.members]
        if not before or len(after) < 2:
            continue
        last = before[-1]
        found.append(
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
    return found


def rows_needed(ranks: int, batch_size: int, between_steps: int) -> int:
    """Samples of an epoch in which all ranks but one can die."""
    # With n ranks left a step takes n batches.
    return batch_size * (between_steps + SPARE_STEPS) * ranks * (ranks + 1) // 2


def _check_elastic() -> None:
    """Check that ranks may be lost here, before anything is set up.

    Raises:
        ConfigurationError: They may not.
    """
    topology = read_topology(os.environ)
    wanted = (
        "recovery kills all ranks but one in turn, and needs a job of two or more on one host that "
        "goes on without them"
    )
    if topology.size < 2:
        raise ConfigurationError(f"{wanted}; received one with 1 rank. Start more.")
    if topology.local_size != topology.size:
        raise ConfigurationError(
            f"{wanted}; received one with {topology.local_size} of {topology.size} ranks on this "
            "host. Start it on one: hosts have clocks of their own."
        )
    reason = why_not_elastic(start_mpi(topology), os.environ)
    if reason:
        raise ConfigurationError(f"{wanted}; this one ends: {reason}.")


def _shared_times(collectives: Engine) -> np.ndarray:
    """A number for each rank that all ranks of the host see.

    In a file that has no name any more once all have opened it: who is killed tidies nothing up.
    """
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


def _next_to_die(members: Sequence[int], ranks: int) -> int:
    """The chief first, so that another rank takes over; then the last ones, which are none."""
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
    head = ["loss", "who died", "ranks", "normal step", "kill to next step", "beyond normal"]
    report.print_table([*head, "step after", "beyond normal"], cells, left=(0, 1))
    report.print(
        "normal step: median before the loss; kill to next step: to the end of the first step that"
        "\nthe others completed without the rank; step after: the whole of the one that followed."
    )
    report.add(losses=[dataclasses.asdict(loss) for loss in losses])
    for what, worst_s in (
        ("from the kill to the next step", max(loss.beyond_s for loss in losses)),
        ("the step after", max(loss.after_beyond_s for loss in losses)),
    ):
        what += ", beyond a normal step, worst"
        report.hold_against(what, worst_s, "at most", MOST_BEYOND_S, "s")
