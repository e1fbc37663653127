"""Problems with GPUs that slow down or break training, as text for warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from hvdtrain.cluster.gpus import GpuState
from hvdtrain.text import format_list

__all__ = ["ONE_PART", "GpuProblem", "different_models", "gpu_problems"]

ONE_PART = (
    "CUDA shows a process only one part of a GPU (MIG): list a part for each rank of the host in "
    "CUDA_VISIBLE_DEVICES=MIG-...,MIG-..., as nvidia-smi -L names them"
)
# The driver and a display take some memory of an idle GPU.
IDLE_SHARE = 0.1
# The same model has slightly more or less memory with another driver.
SAME_MEMORY = 0.05
# The service that runs the programs of several processes on a GPU.
_MPS = "nvidia-cuda-mps"


class GpuProblem(NamedTuple):
    """A problem with a GPU, the state that is expected instead, and a remedy."""

    summary: str
    expected: str
    remedy: str


def gpu_problems(state: GpuState, own_pids: Collection[int] = ()) -> Iterator[GpuProblem]:
    """Yield the problems of a GPU. ``own_pids`` are the IDs of processes that may use the GPU."""
    name = f"GPU {state.number}{_details(state.model, state.id)}"
    leave_out = "leave it out with CUDA_VISIBLE_DEVICES"
    if state.faults:
        yield GpuProblem(
            f"{name} is faulty: {', '.join(state.faults)}",
            "a GPU without faults, because they end the job",
            "when no process uses it, reset it with nvidia-smi --gpu-reset -i "
            f"{state.number.partition(':')[0]}, or reboot the host; until then, {leave_out}; if "
            "errors return, replace it",
        )
    others = {
        pid: f"process {pid}{_details(process, f'{_gib(size)} GiB' if size else '')}"
        for pid, process, size in state.processes
        if pid not in own_pids and not process.startswith(_MPS)
    }
    expected = "an idle GPU, because other programs slow down all ranks and take memory"
    if others:
        yield GpuProblem(
            f"{name} is in use by {format_list(others.values(), 'processes')}",
            expected,
            f"see whose they are with ps -fp {','.join(map(str, others))}; then end them, or "
            f"{leave_out}",
        )
    elif not state.processes and state.used_bytes > IDLE_SHARE * state.memory_bytes:
        yield GpuProblem(
            f"{name} is in use: {_gib(state.used_bytes)} of its {_gib(state.memory_bytes)} GiB "
            "are taken, but the driver shows no process",
            expected,
            f"look for its processes with nvidia-smi outside this container, or {leave_out}",
        )


def different_models(gpus: Iterable[tuple[str, str, int]]) -> str:
    """Return the hosts of each kind of GPU.

    The result is empty if all GPUs have the same model and memory.

    Args:
        gpus: Host, model and memory in bytes of each GPU. GPUs whose model is empty, because it is
            unknown, are left out.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for host, model, memory in gpus:
        if not model:
            continue
        same = (
            key for key in groups if key[0] == model and abs(key[1] - memory) < SAME_MEMORY * memory
        )
        hosts = groups.setdefault(next(same, (model, memory)), [])
        if host not in hosts:
            hosts.append(host)
    if len(groups) < 2:
        return ""
    return "; ".join(
        f"{model} ({_gib(memory)} GiB) on {format_list(hosts, 'hosts')}"
        for (model, memory), hosts in groups.items()
    )


def _details(*known: str) -> str:
    """Return known details in parentheses, or "" if nothing is known."""
    text = ", ".join(filter(None, known))
    return f" ({text})" if text else ""


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g}"
