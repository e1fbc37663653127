"""Each option of a benchmark once: its default, its flag and its help; values travel as JSON."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.launch.hosts import whole_number

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
    """A speed as tc writes it, in bytes a second: 25gbit, 200mbit."""
    units = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}
    number, unit = text[:-4], text[-4:].lower()
    try:
        speed = float(number) * units[unit]
    except (KeyError, ValueError):
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a speed like 25gbit or 200mbit")
    return speed


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number above 0")
    return value


def _model_names(text: str) -> str:
    unknown = [name for name in text.split(",") if name not in _MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"got {', '.join(map(repr, unknown))}, expected names out of {', '.join(_MODELS)}"
        )
    return text


def _count(default: int, text: str) -> Any:
    how = {"type": whole_number, "metavar": "N", "help": f"{text}; default %(default)s"}
    return dataclasses.field(default=default, metadata=how)


def _number(default: float, text: str) -> Any:
    how = {"type": _positive, "metavar": "X", "help": f"{text}; default %(default)g"}
    return dataclasses.field(default=default, metadata=how)


def _option(default: Any, **how: Any) -> Any:
    return dataclasses.field(default=default, metadata=how)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of every benchmark.

    Attributes:
        summary: What it measures.
        usual_ranks: How many ranks are started where none are there; 0 where none are needed.
    """

    summary: ClassVar[str]
    usual_ranks: ClassVar[int] = 2
    json: str = _option("", metavar="FILE", help="write the results there, too")


@dataclass(frozen=True, kw_only=True)
class AllreduceOptions(Options):
    """Options of ``hvdtrain bench allreduce``."""

    summary = "time and bandwidth of allreduce, by size"
    max_bytes: int = _count(256 << 20, "no array is larger")
    repetitions: int = _count(20, "measurements of each")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """Options of ``hvdtrain bench training``."""

    summary = "samples a second of one rank and of all"
    models: str = _option(
        ",".join(_MODELS),
        type=_model_names,
        metavar="NAMES",
        help=f"out of {','.join(_MODELS)}; default %(default)s",
    )
    batch_size: int = _count(64, "samples a rank and step")
    steps: int = _count(30, "timed steps of a run")
    warmup_steps: int = _count(5, "steps at the start of each run that don't count")
    runs: int = _count(5, "runs of one rank and of all, in turn")
    memory_steps: int = _count(100, "steps over which the resident set is compared")


@dataclass(frozen=True, kw_only=True)
class CheckpointBenchOptions(Options):
    """Options of ``hvdtrain bench checkpoint``."""

    summary = "how long a checkpoint keeps training waiting"
    directory: str = _option(
        "",
        metavar="DIR",
        help="where to write and remove them; default the folder for temporary files",
    )
    checkpoints: int = _count(5, "how many are written")
    between_steps: int = _count(20, "steps from one to the next")
    batch_size: int = _count(16, "samples a rank and step")


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Options):
    """Options of ``hvdtrain bench recovery``."""

    summary = "how long ranks that die keep the others"
    usual_ranks = 3  # two losses: the chief's, and that of another rank
    model: str = _option("lenet", choices=_MODELS, help="default %(default)s")
    between_steps: int = _count(20, "from loss to loss")
    batch_size: int = _count(64, "samples a rank and step")


@dataclass(frozen=True, kw_only=True)
class ServersOptions(Options):
    """Options of ``hvdtrain bench servers``."""

    summary = "updates a second of a parameter server, and its memory"
    usual_ranks = 3  # two workers and a server
    updates: int = _count(50, "updates of each worker in a run")
    runs: int = _count(20, "runs with the same workers")


@dataclass(frozen=True, kw_only=True)
class StartupOptions(Options):
    """Options of ``hvdtrain bench startup``.

    Attributes:
        ranks: How many to start each time; ``-np`` says it.
    """

    summary = "what hvdtrain run costs over a bare mpirun"
    ranks: int = 2
    runs: int = _count(7, "starts of each kind")


@dataclass(frozen=True, kw_only=True)
class PredictOptions(Options):
    """Options of ``hvdtrain bench predict``: by default, ResNet-50 on a usual cluster."""

    summary = "how a training would scale to more hosts than there are, by a model of its costs"
    usual_ranks = 0
    hosts: int = _count(64, "most hosts")
    ranks_per_host: int = _count(8, "ranks on each")
    link: float = _option(
        25 * 125e6, type=bytes_per_s, metavar="SPEED", help="of each host's link; default 25gbit"
    )
    latency_us: float = _number(30.0, "from host to host, for a message of some bytes")
    compute_ms: float = _number(300.0, "for which a rank computes in a step")
    parameters: float = _number(25.6e6, "of the model; their gradients are float32")
    spread: float = _number(0.01, "standard deviation of that time as a share of it")
    call_us: float = _number(800.0, "an allreduce by itself")
    message_us: float = _number(60.0, "a message between hosts, of a rank's core")
    core: float = _number(1e9, "bytes a second that a core sends while it receives as much")
    memory: float = _number(3.5e9, "bytes a second of gradients that ranks of a host add up")
    host_days: float = _number(1000.0, "from one failure of a host to its next, in the mean")
    checkpoint_s: float = _number(2.0, "for which a checkpoint keeps training waiting")
    restart_s: float = _number(60.0, "from a failure to the next step")


# ``measure`` of the module measure_NAME runs each.
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
    """Declare a flag for each option of a benchmark."""
    for field in dataclasses.fields(kind):
        if field.metadata:
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, default=field.default, **field.metadata)
