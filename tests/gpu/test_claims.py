"""When claims hold, and when they don't."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import claims
from tests.gpu.claims import Judgement
from tests.gpu.jobs import Completed, JobError, Line
from tests.gpu.programs import KILL, STARTED, STEP

RANK = {
    "rank": 0,
    "gpus": ["GPU-0"],
    "memory_growth": [True],
    "computed_on": "/job:worker/replica:0/task:0/device:GPU:0",
    "correct": True,
}
OTHER = {**RANK, "rank": 1, "gpus": ["GPU-1"]}


def holds(judgement: Judgement, text: str = "") -> bool | None:
    assert text in judgement.measured
    return judgement.holds


def test_binding() -> None:
    judge = claims._judge_binding
    assert holds(judge([RANK, OTHER], "NCCL"), "2 GPUs for 2 ranks, NCCL")
    assert holds(judge([RANK], ""), "1 GPUs for 1 ranks")
    assert not holds(judge([RANK, {**OTHER, "gpus": ["GPU-0"]}], "NCCL"), "ranks share a GPU")
    assert not holds(judge([{**RANK, "gpus": []}], ""), "rank 0 uses 0 GPUs")
    assert not holds(judge([{**RANK, "memory_growth": [False]}], ""), "no memory growth")
    assert not holds(judge([{**RANK, "computed_on": "/device:CPU:0"}], ""), "computed on")
    assert not holds(judge([RANK, OTHER], "MPI"), "MPI combines gradients, not NCCL")


def test_sharing() -> None:
    judge = claims._judge_sharing
    refusal = "exit code 1\nLaunchError: There are more ranks than GPUs: ..."
    assert holds(judge(refusal, [RANK, RANK], "MPI"), "refused; accepted")
    assert not holds(judge(None, [RANK, RANK], "MPI"), "were accepted without --share-gpus")
    assert not holds(judge("exit code 1\nImportError", [RANK, RANK], "MPI"), "ImportError")
    assert not holds(judge(refusal, [RANK, OTHER], "MPI"), "did not share")
    assert not holds(judge(refusal, [RANK, RANK], "NCCL"), "NCCL combines")


def test_pace() -> None:
    result = {"step_s": 0.0102, "plain_step_s": 0.01, "ratio": 1.02}
    assert holds(claims._judge_pace(result), "1.020 times (10.2, 10 ms)")
    assert not holds(claims._judge_pace({**result, "ratio": 1.021}))


def test_equal() -> None:
    result = {"difference": 1e-6, "moved": 0.5, "ranks_equal": True}

    def judge(**changes: Any) -> Judgement:
        return claims._judge_equal({**result, **changes}, "NCCL", 1e-5)

    assert holds(judge(), "1.0e-06, NCCL")
    assert not holds(judge(difference=2e-5))
    assert not holds(judge(difference=float("nan")))
    assert not holds(judge(ranks_equal=False), "ranks differ")
    assert not holds(judge(moved=0.0), "did not change")


def test_nccl_alone() -> None:
    device = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert holds(claims._judge_nccl_alone({"correct": True, "device": device}), "device:GPU:0")
    assert not holds(claims._judge_nccl_alone({"correct": False, "device": device}), "wrong")
    assert not holds(claims._judge_nccl_alone({"correct": True, "device": "/device:CPU:0"}))


def test_placement() -> None:
    line = "[0] x/{0}: ({0}): /job:worker/replica:0/task:0/device:{1}:0\n"
    log = line.format("CollectiveReduceV2", "GPU") + line.format("Conv2D", "GPU")
    log += line.format("IsFinite", "GPU") + line.format("EagerPyFunc", "CPU")
    assert holds(claims._judge_placement(log), "1 CollectiveReduceV2, 1 IsFinite, 1 Conv2D")
    assert not holds(claims._judge_placement(log + line.format("IsFinite", "CPU")), "on CPU")
    assert not holds(claims._judge_placement(line.format("Conv2D", "GPU")))


def test_fallback() -> None:
    log = "[0] hvdtrain: MPI combines gradients, because NCCL failed: rank 1 (b): no network"
    done = Completed(code=0, lines=[Line(at_s=0, text=log, is_error=True)])
    assert claims._reducer(done) == "MPI"
    assert holds(claims._judge_fallback("MPI", log), "MPI combines gradients: rank 1 (b): no")
    assert not holds(claims._judge_fallback("NCCL", log))
    assert not holds(claims._judge_fallback("MPI", "[0] MPI combines gradients: no rank has"))


def test_bench() -> None:
    row = {"bytes": 1 << 30, "best_s": 0.01, "engine": "nccl"}
    report = {"sizes": [{**row, "engine": "mpi"}], "tensors": [row]}

    def judge(report: dict[str, Any], reference: float | None, uses_nccl: bool = True) -> Judgement:
        return claims._judge_bench(report, 4, reference, uses_nccl=uses_nccl)

    judged = judge(report, 150e9)
    assert judged.values["bus_bandwidth"] == 2 * 3 / 4 * (1 << 30) / 0.01
    assert holds(judged, "161.06 GB/s bus, 1.07e+03 MB, nccl; all_reduce_perf: 150.00 GB/s")
    assert not holds(judge(report, 250e9))
    assert holds(judge(report, None), "no all_reduce_perf") is None
    assert holds(judge({"sizes": report["sizes"]}, None, uses_nccl=False), "mpi") is None
    assert holds(judge({"sizes": report["sizes"]}, None), "mpi, not NCCL") is False


def test_the_output_of_nccl_tests() -> None:
    output = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
   268435456      67108864     float     sum      -1   1234.5  217.44  380.52      0   1230.1
# Avg bus bandwidth    : 381.2
"""
    assert claims.read_nccl_tests(output, 268435456) == 380.52e9
    assert claims.read_nccl_tests(output, 1024) is None


def test_compiled() -> None:
    result = {"difference": 1e-6, "modules": 3, "kind": "gpu", "ranks_equal": True}
    assert holds(claims._judge_compiled(result, kind="gpu"), "3 XLA programs (gpu)")
    assert not holds(claims._judge_compiled({**result, "modules": 0}, kind="gpu"))
    assert not holds(claims._judge_compiled({**result, "kind": "cpu"}, kind="gpu"))
    assert not holds(claims._judge_compiled({**result, "difference": 1e-3}, kind="gpu"))
    assert not holds(claims._judge_compiled({**result, "ranks_equal": False}, kind="gpu"))


def test_mixed() -> None:
    result: dict[str, Any] = {
        "first_loss": 0.7,
        "last_loss": 0.6,
        "scales": [32768.0, 16384.0],
        "changed_by_overflow": 0.0,
        "ranks_equal": True,
        "compute_dtype": "float16",
    }
    assert holds(claims._judge_mixed(result), "loss 0.700 to 0.600")
    for name, value in {
        "last_loss": float("nan"),
        "scales": [32768.0, 32768.0],
        "changed_by_overflow": 0.1,
        "ranks_equal": False,
        "compute_dtype": "float32",
    }.items():
        assert not holds(claims._judge_mixed({**result, name: value})), name


def test_overlap() -> None:
    result = {"ratio": 1.2, "step_s": 0.012, "compute_s": 0.01, "reduce_s": 0.005, "nbytes": 1e6}
    assert holds(claims._judge_overlap(result), "1.20 times (12 ms; 10 computing, 5 reducing 1 MB)")
    assert not holds(claims._judge_overlap({**result, "ratio": 1.21}))


def killed_job(notice_s: float) -> Completed:
    events = [(1, STARTED), (8, STEP), (10, KILL), (10 + notice_s, "rank 1 failed first: killed")]
    events += [(22, STARTED), (30, STEP)]
    return Completed(
        code=0, lines=[Line(at_s=at_s, text=f"[1] {text}", is_error=False) for at_s, text in events]
    )


def test_killed() -> None:
    result = {"steps": 10, "first_step": 3, "was_killed": True}
    text = "noticed after 2.0 s, training after 20.0 s (start: 8.0)"
    assert holds(claims._judge_killed(result, killed_job(2)), text)
    assert not holds(claims._judge_killed(result, killed_job(11)))
    assert not holds(claims._judge_killed({**result, "first_step": 1}, killed_job(2)), "beginning")
    assert not holds(claims._judge_killed({**result, "steps": 9}, killed_job(2)), "9 steps")
    assert not holds(claims._judge_killed({**result, "was_killed": False}, killed_job(2)))


def test_elastic() -> None:
    result = {"steps": 14, "first_step": 1, "was_killed": True, "size": 1}
    lost = "hvdtrain run: rank 1 on a was lost (SIGKILL) after step 5; 1 rank continues"

    def job(notice_s: float, *more: tuple[float, str]) -> Completed:
        events = [(1, STARTED), (1, STARTED), (10, KILL), (10 + notice_s, lost), *more]
        lines = [Line(at_s=at_s, text=text, is_error=False) for at_s, text in events]
        return Completed(code=0, lines=lines)

    text = "noticed after 2.0 s; 14 steps with 1 rank at the end"
    assert holds(claims._judge_elastic(result, job(2)), text)
    assert not holds(claims._judge_elastic(result, job(11)))
    assert not holds(claims._judge_elastic(result, job(2, (20, STARTED))), "did not continue")
    assert not holds(claims._judge_elastic({**result, "size": 2}, job(2)))
    assert not holds(claims._judge_elastic({**result, "steps": 10}, job(2)))


def test_example() -> None:
    judge = claims._judge_example
    assert holds(judge("[0] test accuracy = 0.9800\n", ""), "accuracy 0.980")
    assert not holds(judge("[0] test accuracy = 0.1000\n", ""))
    assert not holds(judge("", ""), "no accuracy")
    log = "[0] hvdtrain: no GPU found; computing on the CPU"
    assert not holds(judge("[0] test accuracy = 0.9800\n", log), "on the CPU")


def test_check() -> None:
    def done(code: int, *lines: str) -> Completed:
        return Completed(code=code, lines=[Line(at_s=0, text=t, is_error=False) for t in lines])

    judge = claims._judge_check
    assert holds(judge(done(0, "ready to train (1 warning)"), has_report=True), "1 warning")
    assert not holds(judge(done(0, "ready to train"), has_report=False))
    failed = done(1, "problem on a: nvidia-smi fails", "not ready to train: 1 problem on a")
    assert not holds(judge(failed, has_report=True), "nvidia-smi fails")
    with pytest.raises(JobError, match="exit code 2\nno such host"):
        judge(done(2, "no such host"), has_report=False)
