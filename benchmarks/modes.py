"""The modes that the benchmarks compare, and how a program is run in one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import run_job

__all__ = ["LOCAL_MODES", "MODES", "WORKERS", "Mode", "train"]

WORKERS = 3
JOB_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Mode:
    """How ``hvdtrain run`` is told to train with three workers.

    Attributes:
        label: For people.
        ranks: Of the job, servers included.
        flags: Of ``hvdtrain run``.
    """

    label: str
    ranks: int
    flags: tuple[str, ...]


MODES: Mapping[str, Mode] = {
    "allreduce": Mode("allreduce", WORKERS, ()),
    "async-ps": Mode("async-ps", WORKERS + 1, ("--mode", "async-ps")),
    "overlap": Mode("async-ps, overlap", WORKERS + 1, ("--mode", "async-ps", "--overlap")),
    "bounded": Mode(
        "async-ps, bound 4", WORKERS + 1, ("--mode", "async-ps", "--staleness-bound", "4")
    ),
    "sync-ps": Mode("sync-ps", WORKERS + 1, ("--mode", "sync-ps")),
    "backup": Mode(
        "sync-ps, 1 backup worker",
        WORKERS + 1,
        ("--mode", "sync-ps", "--backup-workers", "1"),
    ),
}

_LOCAL = ("--mode", "local-sgd", "--sync-every", "50")

# Ranks that average weights, and are in step.
LOCAL_MODES: Mapping[str, Mode] = {
    "local-sgd": Mode("local-sgd, every 50th step", WORKERS, _LOCAL),
    "diloco": Mode(
        "local-sgd, DiLoCo",
        WORKERS,
        (*_LOCAL, "--outer-learning-rate", "0.7", "--outer-momentum", "0.9"),
    ),
}


def train(mode: Mode, program: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run a program of this folder in a mode; returns what its ranks wrote, by rank.

    The program gets a folder as its first argument, into which ranks write JSON files.
    """
    here = Path(__file__).resolve().parent
    run = [Path(sys.executable).with_name("hvdtrain"), "run", "-np", str(mode.ranks), *mode.flags]
    python = os.pathsep.join([str(here.parent / "examples"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        argv = [*run, "--", sys.executable, here / program, folder, *arguments]
        run_job(argv, mode.label, {"PYTHONPATH": python}, JOB_TIMEOUT_S)
        return [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
