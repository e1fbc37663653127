"""The ranks of a job as ``torch.distributed`` knows them, over Gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import distributed

__all__ = ["join"]


def join(job: dict[str, Any]) -> tuple[int, int]:
    """This rank and how many there are; 0 and 1 in a process that trains alone, without a group."""
    if "RANK" in os.environ:
        # torchrun says how they meet.
        distributed.init_process_group("gloo")
    elif "OMPI_COMM_WORLD_SIZE" in os.environ:
        # Started by mpirun; the ranks meet in a file that they share.
        distributed.init_process_group(
            "gloo",
            init_method=Path(job["result"]).with_suffix(".meeting").as_uri(),
            rank=int(os.environ["OMPI_COMM_WORLD_RANK"]),
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )
    else:
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()
