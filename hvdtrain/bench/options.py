"""Options of the benchmarks, with defaults, flags and help. Ranks receive them as JSON."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.config.fields import argument, positive_int, rate

__all__ = [
    "BENCHMARKS",
    "AllreduceOptions",
    "CheckpointBenchOptions",
    "Options",
    "PredictOptions",
    "RecoveryOptions",
    "ServersOptions",
    "StartupOptions",
    "TrainingOptions",
    "add_options",
    "bytes_per_s",
]

_MODELS = ("lenet", "mlp")


def bytes_per_s(text: str) -> float:
    """Convert a speed in bits to bytes per second: ``200mbit`` becomes 25e6."""
    units = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
    number, unit = text[:-4], text[-4:].lower()
    try:
        speed = float(number) * units[unit]
    except (KeyError, ValueError):
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a speed like 25gbit or 200mbit, got {text!r}")
    return speed


def _model_names(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in _MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(_MODELS)}, got {', '.join(map(repr, unknown))}"
        )
    return text


def _option(default: Any, help: str = "", **arguments: Any) -> Any:
    named = not default or "default" in help
    arguments["help"] = help if named else f"{help}; default %(default)s"
    return dataclasses.field(default=default, metadata=arguments)


def _count(default: int, help: str) -> Any:
    return _option(default, help, type=argument(positive_int), metavar="N")


def _number(default: float, help: str) -> Any:
    return _option(default, f"{help}; default %(default)g", type=argument(rate), metavar="X")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every benchmark.

    ``usual_ranks`` is the default number of ranks, or 0 if the benchmark starts no ranks.
    ``needs_tensorflow`` is true if the benchmark only works on Keras' TensorFlow backend.
    """

    summary: ClassVar[str]
    usual_ranks: ClassVar[int] = 2
    needs_tensorflow: ClassVar[bool] = False
    json: str = _option("", "also write all results to FILE", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class AllreduceOptions(Options):
    """Options of ``hvdtrain bench allreduce``."""

    summary = "time and bandwidth of allreduce by array size"
    max_bytes: int = _count(256 << 20, "bytes of the largest array")
    repetitions: int = _count(20, "measurements of each size")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Options of ``hvdtrain bench training``."""

    summary = "samples per second of one rank and of all ranks"
    models: str = _option(",".join(_MODELS), "models to train", type=_model_names, metavar="NAMES")
    batch_size: int = _count(64, "samples per rank and step")
    steps: int = _count(30, "timed steps per run")
    warmup_steps: int = _count(5, "steps before timing starts")
    runs: int = _count(5, "alternating runs of one rank and of all ranks")
    memory_steps: int = _count(100, "steps over which the growth of memory is measured")


@dataclass(frozen=True, kw_only=True)
class CheckpointBenchOptions(Options):
    """Options of ``hvdtrain bench checkpoint``."""

    summary = "how long a checkpoint blocks the training"
    directory: str = _option(
        "", "folder for the checkpoints; default the folder for temporary files", metavar="DIR"
    )
    checkpoints: int = _count(5, "number of checkpoints")
    between_steps: int = _count(20, "steps between checkpoints")
    batch_size: int = _count(16, "samples per rank and step")


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Options):
    """Options of ``hvdtrain bench recovery``."""

    summary = "how long a killed rank delays the others"
    usual_ranks = 3  # kills the chief, then another rank
    model: str = _option("lenet", "model to train", choices=_MODELS)
    between_steps: int = _count(20, "steps between kills")
    batch_size: int = _count(64, "samples per rank and step")


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Options of ``hvdtrain bench servers``."""

    summary = "updates per second and memory of a parameter server"
    usual_ranks = 3  # two workers and a server
    needs_tensorflow = True
    updates: int = _count(50, "updates of each worker per run")
    runs: int = _count(20, "runs per number of workers")


@dataclass(frozen=True, kw_only=True)
class StartupOptions(Options):
    """Options of ``hvdtrain bench startup``."""

    summary = "start time of hvdtrain run compared with mpirun"
    ranks: int = 2  # of each job, set by -np
    runs: int = _count(7, "starts of each command")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Options):
    """Options of ``hvdtrain bench predict``. The defaults describe ResNet-50."""

    summary = "predicted training times on more hosts, from a cost model"
    usual_ranks = 0
    hosts: int = _count(64, "largest number of hosts")
    ranks_per_host: int = _count(8, "ranks per host")
    link: float = _option(
        25 * 125e6, "speed of each host's link; default 25gbit", type=bytes_per_s, metavar="SPEED"
    )
    latency_us: float = _number(30.0, "microseconds for a small message between hosts")
    compute_ms: float = _number(300.0, "milliseconds that a rank computes per step")
    parameters: float = _number(25.6e6, "parameters of the model, with float32 gradients")
    spread: float = _number(0.01, "standard deviation of --compute-ms, divided by --compute-ms")
    call_us: float = _number(800.0, "constant microseconds per allreduce")
    message_us: float = _number(60.0, "microseconds that a core needs per message between hosts")
    core: float = _number(1e9, "bytes per second that a core sends and receives")
    memory: float = _number(3.5e9, "bytes of gradients per second that the ranks of a host add up")
    host_days: float = _number(1000.0, "mean days between failures of a host")
    checkpoint_s: float = _number(2.0, "seconds that a checkpoint blocks the training")
    restart_s: float = _number(60.0, "seconds from a failure to the next step")


# The function ``measure`` of the module measure_NAME runs the benchmark NAME.
BENCHMARKS: dict[str, type[Options]] = {
    "allreduce": AllreduceOptions,
    "training": TrainingOptions,
    "checkpoint": CheckpointBenchOptions,
    "recovery": RecoveryOptions,
    "servers": ServersOptions,
    "startup": StartupOptions,
    "predict": PredictOptions,
}


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add a flag for each option of a benchmark."""
    for field in dataclasses.fields(kind):
        if field.metadata:
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, default=field.default, **field.metadata)
