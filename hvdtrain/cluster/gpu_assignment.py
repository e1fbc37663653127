"""Assignment of a job's GPUs to its ranks, computed from the GPUs that each rank sees.

Which GPUs a process sees depends on the launcher. Under mpirun, each rank of a host sees all of the
host's GPUs. Under ``srun --gpus-per-task=1``, each rank sees one GPU, which always has number 0,
and ``CUDA_VISIBLE_DEVICES`` may be the same on all ranks. So ranks exchange the IDs of GPUs, not
their numbers. Each rank computes the assignment for all ranks, so that every rank raises the same
error if a GPU is missing.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.cluster.gpu_problems import ONE_PART, different_models, gpu_problems
from hvdtrain.cluster.gpus import Gpu, GpuState, read_states
from hvdtrain.errors import LaunchError
from hvdtrain.text import plural

__all__ = ["RankGpus", "assign_gpus", "describe_sharing", "first_gpus", "gpu_warnings"]


@dataclass(frozen=True, kw_only=True)
class RankGpus:
    """A rank's report on its GPUs to the other ranks."""

    hostname: str  # name of the rank's host
    pid: int  # ID of the rank's process
    # the GPUs that the rank sees, in the framework's order; None if it needs no GPU
    visible: Sequence[Gpu] | None
    suspects: Sequence[GpuState] = ()  # the visible GPUs that have faults or are in use
    # why the rank can't use the GPUs of its host; empty if it can use them, or if the host lacks
    # GPUs
    obstacle: str = ""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankGpus:
        """Decode a report that another rank sent as JSON."""
        visible = values["visible"]
        if visible is not None:
            visible = [Gpu(*fields) for fields in visible]
        return cls(
            hostname=values["hostname"],
            pid=values["pid"],
            visible=visible,
            suspects=read_states(values["suspects"]),
            obstacle=values["obstacle"],
        )


def assign_gpus(
    visible: Sequence[Sequence[Gpu] | None], *, share: bool, each: int = 1
) -> list[tuple[int, ...]]:
    """Assign GPUs to all ranks.

    Args:
        visible: For each rank, the GPUs that it sees, or None if the rank needs no GPU.
        share: Whether ranks may share a GPU if there are too few GPUs.
        each: Number of GPUs per rank.

    Returns:
        For each rank, the indices of its GPUs in its list of visible GPUs. The list is empty for a
        rank that sees no GPU. If all ranks of a host see the same GPUs and get one each, the index
        is the local rank.

    Raises:
        LaunchError: If a rank sees fewer than ``each`` GPUs, or if ``share`` is False and fewer
            than ``each`` of these GPUs are left for it.
    """
    owners: dict[str, list[int]] = collections.defaultdict(list)
    chosen: list[tuple[int, ...]] = []
    for rank, gpus in enumerate(visible):
        if gpus and len(gpus) < each:
            raise LaunchError(_too_few_gpus(rank, len(gpus), each))
        gpus = gpus or []
        indices = sorted(range(len(gpus)), key=lambda i: (len(owners[gpus[i].id]), i))[:each]
        if any(owners[gpus[index].id] for index in indices) and not share:
            raise LaunchError(_no_gpu_left(rank, gpus, owners, each))
        for index in indices:
            owners[gpus[index].id].append(rank)
        chosen.append(tuple(sorted(indices)))
    return chosen


def first_gpus(ranks: Sequence[RankGpus], chosen: Sequence[Sequence[int]]) -> list[Gpu | None]:
    """Return the first GPU of each rank, or None for a rank without GPUs.

    ``chosen`` is the result of ``assign_gpus``.
    """
    return [one.visible[own[0]] if one.visible and own else None for one, own in zip(ranks, chosen)]


def gpu_warnings(ranks: Sequence[RankGpus], chosen: Sequence[Sequence[int]]) -> list[str]:
    """Return warnings about missing GPUs, GPUs of different models, and GPUs with problems.

    ``chosen`` is the result of ``assign_gpus``.
    """
    warnings = []
    without = [
        rank for rank, one in enumerate(ranks) if one.visible is not None and not chosen[rank]
    ]
    if without and any(chosen):
        warnings.append(
            f"{len(without)} of {len(ranks)} ranks run without a GPU and slow down the others: "
            f"{', '.join(map(str, without))}"
        )
    obstacles = {one.obstacle: one.hostname for one in reversed(ranks) if one.obstacle}
    warnings += [f"{host} has GPUs, but {why}" for why, host in obstacles.items()]
    used = list(_used_gpus(ranks, chosen))
    kinds = different_models(
        (ranks[rank].hostname, gpu.model, gpu.memory_bytes) for rank, gpu in used
    )
    if kinds:
        warnings.append(f"GPUs differ, and all ranks wait for the slowest: {kinds}")
    pids: dict[str, set[int]] = {}
    for one in ranks:
        pids.setdefault(one.hostname, set()).add(one.pid)
    suspects = {
        gpu.id: (ranks[rank].hostname, state)
        for rank, gpu in used
        for state in ranks[rank].suspects
        if state.id == gpu.id
    }
    for hostname, state in suspects.values():
        for problem in gpu_problems(state, pids[hostname]):
            warnings.append(f"on {hostname}, {problem.summary}. To fix this, {problem.remedy}.")
    return warnings


def describe_sharing(ranks: Sequence[RankGpus], chosen: Sequence[Sequence[int]]) -> str:
    """Return a text that lists the ranks that share each GPU; empty if no GPU is shared."""
    owners: dict[str, list[int]] = {}
    for rank, gpu in _used_gpus(ranks, chosen):
        owners.setdefault(f"{gpu.id} on {ranks[rank].hostname}", []).append(rank)
    return "; ".join(
        f"ranks {', '.join(map(str, sharing))} use {gpu}"
        for gpu, sharing in owners.items()
        if len(sharing) > 1
    )


def _used_gpus(
    ranks: Sequence[RankGpus], chosen: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Gpu]]:
    """Yield pairs of a rank and a GPU, one for each GPU that a rank uses."""
    for rank, (one, indices) in enumerate(zip(ranks, chosen)):
        for index in indices:
            assert one.visible is not None
            yield rank, one.visible[index]


def _too_few_gpus(rank: int, gpus: int, each: int) -> str:
    return (
        f"Rank {rank} sees {gpus} GPU{'s' * (gpus > 1)}, but --mode towers --devices-per-rank "
        f"{each} needs {each}. Give it {each} GPUs, set HVDTRAIN_DEVICES_PER_RANK={gpus}, or use "
        "the CPU with CUDA_VISIBLE_DEVICES=-1."
    )


def _no_gpu_left(
    rank: int, gpus: Sequence[Gpu], owners: Mapping[str, Sequence[int]], each: int
) -> str:
    taken = "; ".join(
        f"{gpu.id}: rank {', '.join(map(str, owners[gpu.id]))}" for gpu in gpus if owners[gpu.id]
    )
    problem, owned, remedy = "more ranks than GPUs", "all", "one rank per GPU"
    if each > 1:
        problem, owned = f"too few GPUs for --devices-per-rank {each}", "some"
        remedy = "fewer ranks, or reduce --devices-per-rank"
    hint = f" {ONE_PART}." if any(" MIG " in gpu.model for gpu in gpus) else ""
    return (
        f"There are {problem}: rank {rank} sees {plural(len(gpus), 'GPU')}, {owned} in use "
        f"({taken}). Start {remedy}, let ranks share GPUs with HVDTRAIN_SHARE_GPUS=1 "
        "(hvdtrain run --share-gpus), or use the CPU with CUDA_VISIBLE_DEVICES=-1." + hint
    )
