"""The jobs of a comparison and their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from peers.ways import MEASURES, ON_CLUSTER, Way

__all__ = ["MODELS_OF_TORCH", "Sizes", "Task", "full_sizes", "make_plan", "quick_sizes"]

Where = Literal["host", "cluster"]
RANKS = 2
MODELS_OF_TORCH = ("lenet", "mlp")
# Steps before and after a rank dies.
DIES_AFTER = 20
STEPS_AFTER = 10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The amount of work of each measurement.

    Attributes:
        cases: Bytes and number of arrays of each allreduce, by name.
        runs: Runs of each case per job.
        models: Samples per rank and step, and number of timed steps, by model.
        cluster_models: The same on the cluster.
        warmup_steps: Steps before timing starts.
    """

    cases: Mapping[str, tuple[int, int]]
    runs: int
    models: Mapping[str, tuple[int, int]]
    cluster_models: Mapping[str, tuple[int, int]]
    warmup_steps: int


def full_sizes() -> Sizes:
    """Return the sizes for real measurements."""
    return Sizes(
        cases={
            "4 B": (4, 1),
            "64 KiB": (64 << 10, 1),
            "1 MiB": (1 << 20, 1),
            "16 MiB": (16 << 20, 1),
            "16 MiB in 40 arrays": (16 << 20, 40),
        },
        runs=7,
        models={"lenet": (64, 60), "mlp": (64, 20), "resnet50": (4, 10)},
        cluster_models={"lenet": (64, 30)},
        warmup_steps=3,
    )


def quick_sizes() -> Sizes:
    """Return small sizes, to test that each candidate works."""
    return Sizes(
        cases={"4 B": (4, 1), "1 MiB": (1 << 20, 1), "4 MiB in 40 arrays": (4 << 20, 40)},
        runs=2,
        models={"lenet": (64, 5), "mlp": (64, 3), "resnet50": (2, 2)},
        cluster_models={"lenet": (64, 3)},
        warmup_steps=2,
    )


@dataclass(frozen=True, kw_only=True)
class Task:
    """One job.

    Attributes:
        what: ``allreduce``, ``training``, ``startup`` or ``recovery``.
        where: This host, or the test cluster with one rank per host.
        way: The candidate.
        repetition: Number of the repetition, from 1.
        ranks: Number of ranks on this host.
        job: Parameters of the ranks.
    """

    what: str
    where: Where
    way: Way
    repetition: int
    ranks: int
    job: Mapping[str, Any]

    @property
    def title(self) -> str:
        """A description for progress messages."""
        place = "four hosts" if self.where == "cluster" else "this host"
        return f"{self.what} on {place}, {self.way.label}, repetition {self.repetition}"


def make_plan(
    whats: Sequence[str],
    wheres: Sequence[str],
    ways: Mapping[str, Way],
    repetitions: int,
    sizes: Sizes,
) -> list[Task]:
    """Return all jobs; candidates take turns, so that other load affects all of them equally.

    Memory is measured by the training jobs. The cluster compares allreduce and training of
    candidates that run on several hosts.

    Args:
        whats: Names of ``MEASURES``.
        wheres: ``host``, ``cluster`` or both.
        ways: Available candidates by name.
        repetitions: Jobs of each candidate.
        sizes: Sizes of the measurements.
    """
    plan: list[Task] = []
    for what in dict.fromkeys("training" if what == "memory" else what for what in whats):
        for where in _places(what, whats, wheres):
            jobs = [
                (ways[name], _job(what, where, ways[name], whats, sizes))
                for name in MEASURES[what]
                if name in ways and (where == "host" or ways[name].launcher != "alone")
            ]
            plan += [
                Task(
                    what=what,
                    where=where,
                    way=way,
                    repetition=repetition,
                    ranks=1 if way.launcher == "alone" else RANKS,
                    job=job,
                )
                for repetition in range(1, repetitions + 1)
                for way, job in jobs
            ]
    return plan


def _places(what: str, whats: Sequence[str], wheres: Sequence[str]) -> Iterable[Where]:
    if "host" in wheres:
        yield "host"
    # Training jobs may run only to measure memory.
    if "cluster" in wheres and what in ON_CLUSTER and what in whats:
        yield "cluster"


def _job(what: str, where: Where, way: Way, whats: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """Return the parameters of a candidate's ranks, without ``environ`` and ``result``."""
    job: dict[str, Any] = {"program": "allreduce", "library": way.library}
    if what == "allreduce":
        return {**job, "cases": dict(sizes.cases), "runs": sizes.runs}
    job["program"] = {
        "horovod": "tensorflow_loop",
        "tensorflow": "tensorflow_loop",
        "torch": "torch_loop",
        "hvdtrain.torch": "torch_loop",
    }.get(way.library, "keras_fit")
    if what == "training":
        models = dict(sizes.models if where == "host" else sizes.cluster_models)
        if "training" not in whats:
            models = {"lenet": models["lenet"]}
        if job["program"] == "torch_loop":
            models = {name: models[name] for name in models if name in MODELS_OF_TORCH}
        # Two threads allow overlap of reduction and computation between hosts.
        threads = 1 if where == "host" else 2
        return {
            **job,
            "models": models,
            "warmup_steps": sizes.warmup_steps,
            "inter_op_threads": threads,
        }
    if what == "startup":
        return {**job, "models": {"small": (64, 1)}, "warmup_steps": 1}
    if what == "recovery" and way.library == "bench":
        return {"steps": DIES_AFTER}
    steps = DIES_AFTER + STEPS_AFTER
    die = {"rank": 1, "after_step": DIES_AFTER}
    return {**job, "models": {"lenet": (64, steps)}, "warmup_steps": steps, "die": die}
