"""What each benchmark can be told; values travel to the ranks as JSON."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "MODELS",
    "AllreduceOptions",
    "CheckpointOptions",
    "RecoveryOptions",
    "ServersOptions",
    "StartupOptions",
    "TrainingOptions",
]

MODELS = ("lenet", "mlp")


@dataclass(frozen=True, kw_only=True)
class AllreduceOptions:
    """``hvdtrain bench allreduce``.

    Attributes:
        engine: ``auto``, ``mpi`` or ``shared_memory``.
        max_bytes: No array is larger.
        repetitions: Measurements of each size.
        json: Path for the results, empty for none.
        plot: Path for a picture, empty for none.
    """

    engine: str = "auto"
    max_bytes: int = 256 << 20
    repetitions: int = 20
    json: str = ""
    plot: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """``hvdtrain bench training``.

    Attributes:
        models: Names out of ``MODELS``, comma-separated.
        batch_size: Samples a rank and step.
        steps: Steps of a run that are timed.
        warmup_steps: Steps before them, at the start of each run.
        runs: Runs of one rank and of all ranks, in turn.
        memory_steps: The resident set is compared after so many steps and twice as many.
        intra_op_threads: TensorFlow's threads within an operation, on each rank.
        inter_op_threads: TensorFlow's threads for operations side by side, on each rank.
        json: Path for the results, empty for none.
    """

    models: str = "lenet,mlp"
    batch_size: int = 64
    steps: int = 30
    warmup_steps: int = 5
    runs: int = 5
    memory_steps: int = 100
    intra_op_threads: int = 1
    inter_op_threads: int = 1
    json: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """``hvdtrain bench checkpoint``.

    Attributes:
        directory: Where checkpoints are written and removed; empty for a temporary folder.
        checkpoints: How many.
        between_steps: Steps from one to the next.
        batch_size: Samples a rank and step.
        json: Path for the results, empty for none.
    """

    directory: str = ""
    checkpoints: int = 5
    between_steps: int = 20
    batch_size: int = 16
    json: str = ""


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """``hvdtrain bench recovery``.

    Attributes:
        model: A name out of ``MODELS``.
        between_steps: Steps from one loss to the next.
        batch_size: Samples a rank and step.
        json: Path for the results, empty for none.
    """

    model: str = "lenet"
    between_steps: int = 20
    batch_size: int = 64
    json: str = ""


@dataclass(frozen=True, kw_only=True)
class ServersOptions:
    """``hvdtrain bench servers``.

    Attributes:
        updates: How many each worker asks for in a run.
        runs: With the same workers; copies take turns with them.
        json: Path for the results, empty for none.
    """

    updates: int = 50
    runs: int = 20
    json: str = ""


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """``hvdtrain bench startup``.

    Attributes:
        ranks: To start each time.
        runs: Starts of each kind, in turn.
        json: Path for the results, empty for none.
    """

    ranks: int = 2
    runs: int = 7
    json: str = ""
