"""Initialization of ``torch.distributed`` with Gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import distributed

__all__ = ["join"]


def join(job: dict[str, Any]) -> tuple[int, int]:
    """Join the process group and return rank and size; 0 and 1 in one process."""
    if "RANK" in os.environ:
        # Started by torchrun.
        distributed.init_process_group("gloo")
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Started by mpirun: ranks find each other through a shared file.
        distributed.init_process_group(
            "gloo",
            init_method=Path(job["result"]).with_suffix(".meeting").as_uri(),
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
    else:
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
