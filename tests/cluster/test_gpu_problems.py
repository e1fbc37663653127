from __future__ import annotations

from hvdtrain.cluster.gpu_problems import gpu_problems
from hvdtrain.cluster.gpus import GpuState

IDLE = GpuState(
    number="1:0", id="MIG-1", model="NVIDIA A100", memory_bytes=80 << 30, used_bytes=600 << 20
)


def summaries(own_pids=(), **changes) -> list[str]:
    state = GpuState(**{**vars(IDLE), **changes})
    return [problem.summary for problem in gpu_problems(state, own_pids)]


def test_an_idle_gpu() -> None:
    assert summaries() == []


def test_a_faulty_gpu() -> None:
    (problem,) = gpu_problems(GpuState(**{**vars(IDLE), "faults": ["one", "two"]}))
    assert problem.summary == "GPU 1:0 (NVIDIA A100, MIG-1) is faulty: one, two"
    # The parts of a GPU can't be reset separately.
    assert "nvidia-smi --gpu-reset -i 1," in problem.remedy


def test_a_gpu_in_use() -> None:
    use = "GPU 1:0 (NVIDIA A100, MIG-1) is in use"
    processes = [(4, "python", 3 << 30), (5, "", 1 << 29), (6, "nvidia-cuda-mps-server", 9)]
    full = 40 << 30
    both = "process 4 (python, 3 GiB), process 5 (0.5 GiB)"
    assert summaries(processes=processes) == [f"{use} by {both}"]
    hidden = summaries([], processes=[(4, "python", 0), (5, "", 0)])
    assert hidden == [f"{use} by process 4 (python), process 5"], "the driver hides their memory"
    assert summaries([4], processes=processes, used_bytes=full) == [f"{use} by process 5 (0.5 GiB)"]
    assert summaries([4, 5], processes=processes, used_bytes=full) == []
    assert summaries(used_bytes=full) == [
        f"{use}: 40 of its 80 GiB are taken, but the driver shows no process"
    ]
