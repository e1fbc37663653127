"""The claims: what each needs, which job shows it, and when it holds.

Functions that start with ``_judge`` are pure. They take the result of a job, and return the
measured value and whether the claim holds. None means that there is a value but no verdict.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.text import plural
from tests.gpu.detect import Layout, Requirements
from tests.gpu.jobs import Completed, JobError, launch, run, run_program, scratch_folder
from tests.gpu.programs import KILL, STARTED, STEP

__all__ = ["CLAIMS", "Claim", "Context", "Judgement"]

MAX_PACE = 1.02
MAX_DIFFERENCE = 1e-5
MAX_XLA_DIFFERENCE = 1e-4
MAX_FP16_DIFFERENCE = 5e-3
MAX_OVERLAP = 1.2
MAX_NOTICE_S = 10.0
MIN_OF_NCCL_TESTS = 0.8
MIN_ACCURACY = 0.9


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The measured value as text, whether the claim holds, and all values for ``--json``."""

    measured: str
    holds: bool | None
    values: Any = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a claim knows of this run of the suite."""

    layout: Layout
    folder: Path
    limit_s: float

    @property
    def on_gpus(self) -> bool:
        return self.layout.gpus > 0

    def run_program(
        self, name: str, arguments: Mapping[str, Any] | None = None, **options: Any
    ) -> tuple[Any, Completed]:
        return run_program(self.layout, name, arguments, limit_s=self.limit_s, **options)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement about hvdtrain, and the job that shows whether it holds."""

    name: str  # name for ``--only``
    text: str  # the statement
    needs: Requirements  # the hardware that it needs
    limit_s: float  # time limit of its job
    is_timing: bool = False  # Whether it compares times. These are too noisy for a verdict on CPUs.
    test: Callable[[Context], Judgement]  # function that runs the job


def _test_binding(context: Context) -> Judgement:
    # The judgement names the ranks without a GPU.
    ranks, done = context.run_program("binding", {"on_gpu": False})
    return _judge_binding(ranks, _reducer(done))


def _judge_binding(ranks: Sequence[Mapping[str, Any]], reducer: str) -> Judgement:
    used = [gpu for rank in ranks for gpu in rank["gpus"]]
    faults = []
    for rank in ranks:
        if len(rank["gpus"]) != 1:
            faults.append(f"rank {rank['rank']} uses {len(rank['gpus'])} GPUs")
        elif not all(rank["memory_growth"]):
            faults.append(f"rank {rank['rank']} has no memory growth")
        elif "GPU:0" not in rank["computed_on"] or not rank["correct"]:
            faults.append(f"rank {rank['rank']} computed on {rank['computed_on']}")
    if len(set(used)) < len(used):
        faults.append(f"ranks share a GPU: {', '.join(used)}")
    if len(ranks) > 1 and reducer != "NCCL":
        faults.append(f"{reducer or 'nothing'} combines gradients, not NCCL")
    text = f"{len(set(used))} GPUs for {len(ranks)} ranks"
    if len(ranks) > 1:
        text += f", {reducer}"
    return Judgement(measured="; ".join(faults) or text, holds=not faults, values=list(ranks))


def _reducer(done: Completed) -> str:
    """Return the library that hvdtrain reported to combine gradients."""
    match = re.search(r"hvdtrain: (.*) combines gradients[:,] (.*)", done.text(errors=True))
    if match is None:
        return ""
    return "TensorFlow's ring" if "ring on CPUs" in match[2] else match[1]


def _test_sharing(context: Context) -> Judgement:
    # All ranks see only the first GPU.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    env = {"CUDA_VISIBLE_DEVICES": first}
    host = context.layout.hosts.rpartition(":")[0]
    layout = Layout(ranks=2, hosts=f"{host}:2" if host else "", gpus=2)
    try:
        run_program(layout, "binding", limit_s=context.limit_s / 2, env=env)
        refusal = None
    except JobError as error:
        refusal = str(error)
    layout = dataclasses.replace(layout, gpus=1)
    ranks, done = run_program(layout, "binding", limit_s=context.limit_s / 2, env=env)
    return _judge_sharing(refusal, ranks, _reducer(done))


def _judge_sharing(
    refusal: str | None, ranks: Sequence[Mapping[str, Any]], reducer: str
) -> Judgement:
    faults = []
    if refusal is None:
        faults.append("two ranks on one GPU were accepted without --share-gpus")
    elif "more ranks than GPUs" not in refusal:
        faults.append(f"another error than expected: {refusal.splitlines()[-1]}")
    if len({gpu for rank in ranks for gpu in rank["gpus"]}) != 1:
        faults.append("with --share-gpus the ranks did not share a GPU")
    if reducer != "MPI":
        faults.append(f"{reducer or 'nothing'} combines gradients, not MPI")
    return Judgement(
        measured="; ".join(faults) or f"refused; accepted with --share-gpus ({reducer})",
        holds=not faults,
        values={"refusal": refusal, "ranks": list(ranks)},
    )


def _pace(*, jit: bool) -> Callable[[Context], Judgement]:
    def test(context: Context) -> Judgement:
        size: dict[str, Any] = {"size": 12, "channels": 8, "batch": 16, "seconds": 0.1, "rounds": 1}
        if context.on_gpus:
            size = {"size": 64, "channels": 128, "batch": 128, "seconds": 3.0, "rounds": 7}
        result, _ = context.run_program("pace", {**size, "jit": jit})
        return _judge_pace(result)

    return test


def _judge_pace(result: Mapping[str, Any]) -> Judgement:
    times = ", ".join(f"{1e3 * result[name]:.3g}" for name in ("step_s", "plain_step_s"))
    measured = f"{result['ratio']:.3f} times ({times} ms)"
    return Judgement(measured=measured, holds=result["ratio"] <= MAX_PACE, values=result)


def _test_equal(context: Context) -> Judgement:
    result, done = context.run_program("equal", {"steps": 4})
    return _judge_equal(result, _reducer(done), MAX_DIFFERENCE)


def _test_compressed(context: Context) -> Judgement:
    options = ["--compression", "fp16"]
    result, done = context.run_program("equal", {"steps": 4}, options=options)
    return _judge_equal(result, _reducer(done), MAX_FP16_DIFFERENCE)


def _judge_equal(result: Mapping[str, Any], reducer: str, limit: float) -> Judgement:
    holds = result["difference"] <= limit and result["ranks_equal"]
    # If training changed nothing, equality means nothing.
    moved = result["moved"] > 10 * limit
    text = f"largest difference {result['difference']:.1e}, {reducer}"
    if not result["ranks_equal"]:
        text += "; ranks differ"
    if not moved:
        text += "; the weights did not change"
    return Judgement(measured=text, holds=holds and moved, values=result)


def _test_nccl_alone(context: Context) -> Judgement:
    result, _ = context.run_program("nccl_alone", {"hint": "nccl"})
    return _judge_nccl_alone(result)


def _judge_nccl_alone(result: Mapping[str, Any]) -> Judgement:
    holds = result["correct"] and "GPU" in result["device"]
    text = f"{'correct' if result['correct'] else 'wrong'} on {result['device'].rpartition('/')[2]}"
    return Judgement(measured=text, holds=holds, values=result)


def _test_placement(context: Context) -> Judgement:
    _, done = context.run_program("equal", {"steps": 1}, options=["--log-device-placement"])
    return _judge_placement(done.text(errors=False) + done.text(errors=True))


def _judge_placement(log: str) -> Judgement:
    """Judge the lines that TensorFlow writes for each operation."""
    placed = dict.fromkeys(("CollectiveReduceV2", "IsFinite", "Conv2D"), 0)
    elsewhere = []
    for kind, device in re.findall(r"\((\w+)\): \S*/device:(\w+):\d+", log):
        if kind in placed:
            placed[kind] += 1
            if device != "GPU":
                elsewhere.append(f"{kind} on {device}")
    holds = not elsewhere and placed["CollectiveReduceV2"] > 0
    counts = ", ".join(f"{count} {kind}" for kind, count in placed.items())
    text = "; ".join(dict.fromkeys(elsewhere)) or f"on GPUs: {counts}"
    return Judgement(measured=text, holds=holds, values=placed)


def _test_fallback(context: Context) -> Judgement:
    # NCCL does not start without its network.
    env = {"NCCL_NET": "hvdtrain-none"}
    _, done = context.run_program("binding", env=env)
    return _judge_fallback(_reducer(done), done.text(errors=True))


def _judge_fallback(reducer: str, log: str) -> Judgement:
    match = re.search(r"combines gradients, because NCCL failed: (.*)", log)
    reason = match[1] if match else "no reason is given"
    holds = reducer == "MPI" and match is not None
    return Judgement(measured=f"{reducer or 'nothing'} combines gradients: {reason}", holds=holds)


def _test_bench(context: Context) -> Judgement:
    path = scratch_folder(context.folder, "bench") / "allreduce.json"
    nbytes, repetitions = (256 << 20, 10) if context.on_gpus else (64 << 10, 2)
    program = [sys.executable, "-m", "hvdtrain", "bench", "allreduce", "--json", str(path)]
    program += ["--max-bytes", str(nbytes), "--repetitions", str(repetitions)]
    done = run(launch(context.layout, program), limit_s=context.limit_s)
    if done.code != 0:
        raise JobError(done.last_lines())
    reference = None
    uses_nccl = context.on_gpus and not context.layout.shares_gpu
    if uses_nccl and not context.layout.hosts:
        reference = _nccl_tests_bandwidth(context.layout.gpus, nbytes)
    report = json.loads(path.read_text())
    return _judge_bench(report, context.layout.ranks, reference, uses_nccl=uses_nccl)


def _judge_bench(
    report: Mapping[str, Any], ranks: int, reference: float | None, *, uses_nccl: bool
) -> Judgement:
    """Judge the bus bandwidth, which nccl-tests defines as 2 (n - 1) / n * bytes / time."""
    row = (report.get("tensors") or report["sizes"])[-1]
    bandwidth = 2 * (ranks - 1) / ranks * row["bytes"] / row["best_s"]
    text = f"{bandwidth / 1e9:.2f} GB/s bus, {row['bytes'] / 1e6:.3g} MB, {row['engine']}"
    values = {"bus_bandwidth": bandwidth, "row": row, "nccl_tests": reference}
    if uses_nccl and row["engine"] != "nccl":
        return Judgement(measured=f"{text}, not NCCL", holds=False, values=values)
    if reference is None:
        return Judgement(measured=f"{text}; no all_reduce_perf", holds=None, values=values)
    text += f"; all_reduce_perf: {reference / 1e9:.2f} GB/s"
    return Judgement(measured=text, holds=bandwidth >= MIN_OF_NCCL_TESTS * reference, values=values)


def _nccl_tests_bandwidth(gpus: int, nbytes: int) -> float | None:
    """Return the bus bandwidth that nccl-tests measures on this host, if it is installed."""
    program = shutil.which("all_reduce_perf")
    if program is None:
        return None
    argv = [program, "-b", str(nbytes), "-e", str(nbytes), "-g", str(gpus)]
    return read_nccl_tests(run(argv, limit_s=60).text(errors=False), nbytes)


def read_nccl_tests(output: str, nbytes: int) -> float | None:
    """Return the out-of-place bus bandwidth in byte/s from the output of all_reduce_perf.

    Columns: size, count, type, redop, root, then time, algbw, busbw and errors, first out of place.
    """
    for line in output.splitlines():
        cells = line.split()
        if len(cells) >= 9 and cells[0] == str(nbytes):
            return float(cells[7]) * 1e9
    return None


def _test_compiled(context: Context) -> Judgement:
    result, _ = context.run_program("compiled")
    return _judge_compiled(result, kind="gpu" if context.on_gpus else "cpu")


def _judge_compiled(result: Mapping[str, Any], *, kind: str) -> Judgement:
    holds = (
        (result["modules"] > 0 and result["kind"] == kind)
        and result["difference"] <= MAX_XLA_DIFFERENCE
        and result["ranks_equal"]
    )
    text = f"{result['modules']} XLA programs ({result['kind']}), difference from uncompiled "
    text += f"{result['difference']:.1e}"
    if not result["ranks_equal"]:
        text += "; ranks differ"
    return Judgement(measured=text, holds=holds, values=result)


def _test_mixed(context: Context) -> Judgement:
    return _judge_mixed(context.run_program("mixed")[0])


def _judge_mixed(result: Mapping[str, Any]) -> Judgement:
    before, after = result["scales"]
    faults = []
    if result["compute_dtype"] != "float16":
        faults.append(f"computed in {result['compute_dtype']}")
    # NaN is not less than anything.
    if not result["last_loss"] < result["first_loss"]:
        faults.append(f"loss went from {result['first_loss']:.3g} to {result['last_loss']:.3g}")
    if result["changed_by_overflow"] != 0.0 or after != before / 2:
        faults.append(f"after an overflow on one rank the scale went from {before:g} to {after:g}")
    if not result["ranks_equal"]:
        faults.append("ranks differ")
    text = f"loss {result['first_loss']:.3f} to {result['last_loss']:.3f}; overflow skipped by all"
    return Judgement(measured="; ".join(faults) or text, holds=not faults, values=result)


def _test_overlap(context: Context) -> Judgement:
    size: dict[str, Any] = {"size": 12, "channels": 8, "batch": 16, "width": 64}
    size |= {"seconds": 0.1, "rounds": 1}
    if context.on_gpus:
        size = {"size": 64, "channels": 128, "batch": 64, "width": 4096}
        size |= {"seconds": 2.0, "rounds": 5}
    return _judge_overlap(context.run_program("overlap", size)[0])


def _test_host_memory(context: Context) -> Judgement:
    layout = dataclasses.replace(context.layout, backend="mpi")
    judgement = _test_overlap(dataclasses.replace(context, layout=layout))
    return dataclasses.replace(judgement, holds=None)


def _judge_overlap(result: Mapping[str, Any]) -> Judgement:
    step, compute, reduce = (1e3 * result[f"{name}_s"] for name in ("step", "compute", "reduce"))
    text = f"{result['ratio']:.2f} times ({step:.3g} ms; {compute:.3g} computing, {reduce:.3g}"
    text += f" reducing {result['nbytes'] / 1e6:.3g} MB)"
    return Judgement(measured=text, holds=result["ratio"] <= MAX_OVERLAP, values=result)


def _test_killed(context: Context) -> Judgement:
    folder = scratch_folder(context.folder, "killed")
    options = ["--max-restarts", "1", "--no-collapse"]
    arguments = {"folder": str(folder), "elastic": False}
    result, done = context.run_program("killed", arguments, options=options)
    shutil.rmtree(folder, ignore_errors=True)
    return _judge_killed(result, done)


def _judge_killed(result: Mapping[str, Any], done: Completed) -> Judgement:
    kill_s = _arrivals(done, KILL)[0]
    noticed = [at_s for at_s in _arrivals(done, "failed first: ") if at_s >= kill_s]
    starts = _arrivals(done, STARTED)
    steps = _arrivals(done, STEP)
    values: dict[str, Any] = dict(result)
    if not noticed or not result["was_killed"] or max(starts) < kill_s:
        return Judgement(measured="the job was not restarted", holds=False, values=values)
    notice_s = noticed[0] - kill_s
    first_s, again_s = min(steps), max(steps) - kill_s
    text = f"noticed after {notice_s:.1f} s, training after {again_s:.1f} s (start: {first_s:.1f})"
    resumed = result["first_step"] > 1
    if not resumed:
        text += "; it started from the beginning"
    if result["steps"] != 10:
        text += f"; {result['steps']} steps instead of 10"
    values |= {"notice_s": notice_s, "again_s": again_s, "start_s": first_s}
    holds = notice_s <= MAX_NOTICE_S and resumed and result["steps"] == 10
    return Judgement(measured=text, holds=holds, values=values)


def _test_elastic(context: Context) -> Judgement:
    folder = scratch_folder(context.folder, "elastic")
    layout = dataclasses.replace(context.layout, backend="mpi")
    result, done = run_program(
        layout,
        "killed",
        {"folder": str(folder), "elastic": True},
        options=["--elastic", "--no-collapse"],
        limit_s=context.limit_s,
    )
    shutil.rmtree(folder, ignore_errors=True)
    return _judge_elastic(result, done)


def _judge_elastic(result: Mapping[str, Any], done: Completed) -> Judgement:
    kill_s = _arrivals(done, KILL)[0]
    lost = [at_s for at_s in _arrivals(done, "was lost (SIGKILL)") if at_s >= kill_s]
    values: dict[str, Any] = dict(result)
    if not lost or not result["was_killed"] or len(_arrivals(done, STARTED)) != 2:
        return Judgement(measured="the job did not continue", holds=False, values=values)
    values["notice_s"] = notice_s = lost[0] - kill_s
    text = f"noticed after {notice_s:.1f} s; {plural(result['steps'], 'step')} with "
    text += f"{plural(result['size'], 'rank')} at the end"
    holds = notice_s <= MAX_NOTICE_S and result["size"] == 1 and result["steps"] > 10
    return Judgement(measured=text, holds=holds, values=values)


def _arrivals(done: Completed, text: str) -> list[float]:
    return [line.at_s for line in done.lines if text in line.text]


def _test_example(context: Context) -> Judgement:
    folder = scratch_folder(context.folder, "example")
    program = [sys.executable, "examples/mnist.py", "--epochs", "10", "--run-dir", str(folder)]
    program += ["--checkpoint-dir", str(folder / "checkpoints")]
    done = run(launch(context.layout, program), limit_s=context.limit_s)
    shutil.rmtree(folder, ignore_errors=True)
    if done.code != 0:
        raise JobError(done.last_lines())
    return _judge_example(done.text(errors=False), done.text(errors=True))


def _judge_example(output: str, log: str) -> Judgement:
    if "without a GPU" in log or "no GPU found" in log:
        return Judgement(measured="it computed on the CPU", holds=False)
    match = re.search(r"test accuracy = ([\d.]+)", output)
    if match is None:
        return Judgement(measured="no accuracy in the output", holds=False)
    accuracy = float(match[1])
    return Judgement(measured=f"accuracy {accuracy:.3f}", holds=accuracy >= MIN_ACCURACY)


def _test_check(context: Context) -> Judgement:
    path = context.folder / "report.txt"
    argv = [sys.executable, "-m", "hvdtrain", "check", "--report", str(path)]
    argv += ["-np", str(context.layout.ranks)]
    if context.layout.hosts:
        argv += ["-H", context.layout.hosts]
    done = run(argv, limit_s=context.limit_s)
    return _judge_check(done, has_report=path.exists())


def _judge_check(done: Completed, *, has_report: bool) -> Judgement:
    if done.code not in (0, 1):
        raise JobError(done.last_lines())
    lines = [line.text for line in done.lines if not line.is_error]
    conclusion = [line for line in lines if "ready to train" in line]
    problems = [line for line in lines if line.startswith("problem")]
    text = "; ".join([*conclusion, *problems]) or "no conclusion"
    holds = done.code == 0 and bool(conclusion) and has_report
    return Judgement(measured=text, holds=holds, values=lines)


CLAIMS = (
    Claim(
        name="check",
        text="hvdtrain check finds no problem",
        needs=Requirements(ranks="all"),
        limit_s=90,
        test=_test_check,
    ),
    Claim(
        name="binding",
        text="each rank computes on its own GPU, with memory growth",
        needs=Requirements(ranks="all", gpus=1),
        limit_s=90,
        test=_test_binding,
    ),
    Claim(
        name="nccl",
        text="TensorFlow's NCCL operation runs on a GPU",
        needs=Requirements(ranks="one", gpus=1),
        limit_s=60,
        test=_test_nccl_alone,
    ),
    Claim(
        name="equal",
        text=f"two ranks equal one process within {MAX_DIFFERENCE:g}",
        needs=Requirements(ranks="two"),
        limit_s=90,
        test=_test_equal,
    ),
    Claim(
        name="compressed",
        text=f"the same with --compression fp16, within {MAX_FP16_DIFFERENCE:g}",
        needs=Requirements(ranks="two", own_gpus=True),
        limit_s=90,
        test=_test_compressed,
    ),
    Claim(
        name="placement",
        text="reductions and NaN checks stay on the GPU",
        needs=Requirements(ranks="two", gpus=2, own_gpus=True),
        limit_s=90,
        test=_test_placement,
    ),
    Claim(
        name="fallback",
        text="if NCCL can't start, all ranks use MPI",
        needs=Requirements(ranks="two", gpus=2, own_gpus=True),
        limit_s=120,
        test=_test_fallback,
    ),
    Claim(
        name="killed",
        text=f"a killed rank is noticed within {MAX_NOTICE_S:g} s, and training resumes",
        needs=Requirements(ranks="two"),
        limit_s=120,
        test=_test_killed,
    ),
    Claim(
        name="elastic",
        text="with --elastic, the other rank continues without a restart",
        needs=Requirements(ranks="two"),
        limit_s=90,
        test=_test_elastic,
    ),
    Claim(
        name="mixed",
        text="mixed_float16: ranks stay equal, and all skip an overflow",
        needs=Requirements(ranks="two"),
        limit_s=90,
        test=_test_mixed,
    ),
    Claim(
        name="compiled",
        text="jit_compile=True compiles the step, with the same weights",
        needs=Requirements(ranks="two"),
        limit_s=120,
        test=_test_compiled,
    ),
    Claim(
        name="pace",
        text="one rank takes at most 1.02 times the time of plain Keras",
        needs=Requirements(ranks="one"),
        limit_s=150,
        is_timing=True,
        test=_pace(jit=False),
    ),
    Claim(
        name="pace-xla",
        text="the same with jit_compile=True",
        needs=Requirements(ranks="one"),
        limit_s=200,
        is_timing=True,
        test=_pace(jit=True),
    ),
    Claim(
        name="overlap",
        text=f"a step takes at most {MAX_OVERLAP:g} times the longer of computing and reducing",
        needs=Requirements(ranks="two", own_gpus=True),
        limit_s=120,
        is_timing=True,
        test=_test_overlap,
    ),
    Claim(
        name="host-memory",
        text="the cost of --backend mpi and --elastic: a step, compared like overlap",
        needs=Requirements(ranks="two", gpus=2, own_gpus=True),
        limit_s=120,
        is_timing=True,
        test=_test_host_memory,
    ),
    Claim(
        name="bench",
        text=f"allreduce reaches {MIN_OF_NCCL_TESTS:g} times the bus bandwidth of all_reduce_perf",
        needs=Requirements(ranks="several"),
        limit_s=120,
        is_timing=True,
        test=_test_bench,
    ),
    Claim(
        name="sharing",
        text="two ranks on one GPU are refused, and accepted with --share-gpus",
        needs=Requirements(ranks="one", gpus=1),
        limit_s=120,
        test=_test_sharing,
    ),
    Claim(
        name="example",
        text=f"examples/mnist.py reaches an accuracy of {MIN_ACCURACY:g}",
        needs=Requirements(ranks="two", gpus=1),
        limit_s=120,
        test=_test_example,
    ),
)
