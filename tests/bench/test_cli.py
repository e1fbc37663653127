"""The output of the complete command for tiny sizes. Timings are not tested."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main

BENCH = [sys.executable, "-m", "hvdtrain", "bench"]
# A rank of an existing job. Starting a job is the same for all benchmarks except startup.
IN_A_JOB = """
import sys
from hvdtrain.cli import main
sys.exit(main(["bench", *sys.argv[1:]]))
"""
TINY_ALLREDUCE = ["allreduce", "--max-bytes", "4096", "--repetitions", "2"]
TINY_TRAINING = [
    *("training", "--models", "lenet", "--batch-size", "2", "--steps", "3"),
    *("--warmup-steps", "2", "--runs", "2", "--memory-steps", "4"),
]
TINY_RECOVERY = ["recovery", "--batch-size", "2", "--between-steps", "3"]

USAGE_ERRORS = {
    "nothing": ([], "BENCHMARK"),
    "unknown": (["allreduse"], "allreduse"),
    "ranks": (["allreduce", "-np", "0"], "got '0': expected a whole number above 0"),
    "models": (["training", "--models", "lenet,vgg"], "expected some of lenet, mlp, got 'vgg'"),
    "model": (["recovery", "--model", "vgg"], "vgg"),
    "link": (["predict", "--link", "25"], "expected a speed like 25gbit or 200mbit, got '25'"),
    "compute": (["predict", "--compute-ms", "0"], "got '0': expected a finite number above 0"),
    "one rank": (["recovery", "-np", "1"], "recovery needs at least 2 ranks"),
    "directory": (
        ["checkpoint", "--directory", "/nonexistent"],
        "the folder /nonexistent does not exist",
    ),
    "folder": (
        ["allreduce", "--json", "/nonexistent/x.json"],
        "the folder /nonexistent does not exist",
    ),
}


@pytest.mark.parametrize(("argv", "message"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    output = capsys.readouterr().out
    names = ("allreduce", "training", "checkpoint", "recovery", "startup", "predict")
    assert all(name in output for name in names)


def test_predict_needs_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "predicted.json"
    argv = ["predict", "--hosts", "6", "--ranks-per-host", "2", "--link", "1gbit"]
    assert main(["bench", *argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["predicted"]
    assert [row["ranks"] for row in rows] == [2, 4, 8, 12]
    assert rows[-1]["limit"] == "the link"
    output = capsys.readouterr().out
    assert f" {100 * rows[-1]['efficiency']:.0f} %" in output
    assert "between checkpoints" in output


def test_startup_inside_a_job_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=2)
    assert main(["bench", "startup"]) == 2
    assert "startup can't run inside a job" in capsys.readouterr().err


def test_servers_needs_tensorflow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert main(["bench", "servers"]) == 2
    assert "servers needs Keras' TensorFlow backend, got jax" in capsys.readouterr().err


def test_np_other_than_the_size_of_the_job_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=2)
    assert main(["bench", "allreduce", "-np", "3"]) == 2
    assert "-np must equal the size of the job, 2, got 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "message"),
    [(1, 1, "recovery needs at least 2 ranks"), (4, 2, "got 2 of 4 ranks on this host")],
)
def test_recovery_needs_two_ranks_on_one_host(
    ranks: int,
    local_ranks: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=ranks, local_ranks=local_ranks)
    assert main(["bench", "recovery"]) == 2
    assert message in capsys.readouterr().err


def _pretend_to_be_a_rank(
    monkeypatch: pytest.MonkeyPatch, *, ranks: int, local_ranks: int | None = None
) -> None:
    sizes = {"SIZE": ranks, "LOCAL_SIZE": ranks if local_ranks is None else local_ranks}
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, **sizes}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


@pytest.mark.mpi
def test_allreduce_measures_each_size(launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = launch(2, IN_A_JOB, *TINY_ALLREDUCE, "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done
    assert done.stdout.count("hvdtrain bench allreduce: 2 ranks") == 1, "only the chief prints"
    results = json.loads(path.read_text())
    assert results["ranks"] == 2
    assert results["machine"]["keras_backend"] == "tensorflow"
    assert [row["bytes"] for row in results["sizes"]] == [4, 16, 64, 256, 1024, 4096]
    for row in results["sizes"]:
        assert row["engine"] == "shared_memory"
        assert 0 < row["best_s"] <= row["median_s"]
        # The factor is 1 on two ranks.
        assert row["bus_bandwidth"] == pytest.approx(row["bytes"] / row["best_s"])
    assert len(results["limits"]) == 2


@pytest.mark.mpi
def test_servers_measures_two_workers_and_all(launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--runs", "2", "--updates", "3", "--json", str(path)]
    done = launch(4, IN_A_JOB, "servers", *options)
    assert done.returncode == 0, done
    results = json.loads(path.read_text())
    assert [row["workers"] for row in results["rows"]] == [2, 3]
    for row in results["rows"]:
        assert len(row["update_s"]) == len(row["copy_s"]) == 2
        assert 0 < row["server_bytes"] < row["server_resident_bytes"] < 1 << 32
    speed, memory = results["limits"]
    two = results["rows"][0]
    assert speed["measured"] == pytest.approx(350 * min(two["copy_s"]) / min(two["update_s"]))
    assert memory["held"]


@pytest.mark.mpi
def test_training_measures_one_rank_and_two(launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = launch(2, IN_A_JOB, *TINY_TRAINING, "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done
    results = json.loads(path.read_text())
    (row,) = results["models"]
    assert row["model"] == "lenet"
    assert [len(speeds) for speeds in row["alone_samples_per_s"]] == [2, 2], "each rank, each run"
    assert len(row["joint_samples_per_s"]) == 2
    one_rank = sum(max(speeds) for speeds in row["alone_samples_per_s"]) / 2
    best = max(row["joint_samples_per_s"]) / one_rank
    assert row["speedup"] == pytest.approx(best)
    assert row["efficiency_percent"] == pytest.approx(50 * best)
    by_calls = row["joint_call_samples_per_s"]
    assert all(call < 3 * step for call, step in zip(by_calls, row["joint_samples_per_s"]))
    assert [row["input"] for row in results["calls"]] == ["arrays", "tf.data", "PyDataset"]
    assert all(row["together_s"] > 0 < row["alone_s"] for row in results["calls"])


@pytest.mark.mpi
def test_training_on_another_backend(run_command, mpirun, python_with, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    program = [*python_with("torch"), "-c", IN_A_JOB, *TINY_TRAINING, "--json", str(path)]
    done = run_command(mpirun(2, program), timeout_s=110, env={"KERAS_BACKEND": "torch"})
    assert done.returncode == 0, done
    assert "; Keras on torch\n" in done.stdout
    results = json.loads(path.read_text())
    assert results["machine"]["keras_backend"] == "torch"
    assert results["machine"]["libraries"].keys() >= {"torch", "keras"}
    (row,) = results["models"]
    assert row["speedup"] > 0
    assert [row["input"] for row in results["calls"]] == ["arrays", "PyDataset"]


@pytest.mark.mpi
def test_checkpoint_measures_blocking_and_writing(launch, tmp_path: Path) -> None:
    path, folder = tmp_path / "out.json", tmp_path / "disk"
    folder.mkdir()
    options = ["--checkpoints", "1", "--between-steps", "2", "--directory", str(folder)]
    done = launch(2, IN_A_JOB, "checkpoint", *options, "--json", str(path), timeout_s=100)
    assert done.returncode == 0, done
    results = json.loads(path.read_text())
    assert results["bytes"] > 3 * 4 * 20_000_000, "weights and Adam's two moments"
    assert len(results["paused_s"]) == len(results["written_s"]) >= 1
    assert min(results["paused_s"] + results["written_s"]) > 0
    assert list(folder.iterdir()) == [], "removes its checkpoints"


@pytest.mark.mpi
def test_recovery_kills_all_ranks_but_one(run_command, environment, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = [str(environment("jax")), *BENCH[1:], *TINY_RECOVERY, "-np", "3", "--json", str(path)]
    fast = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run_command(argv, timeout_s=150, env={"KERAS_BACKEND": "jax", **fast})
    assert done.returncode == 0, done
    assert done.stdout.count("hvdtrain bench recovery: 3 ranks") == 1
    # The last rank prints the results.
    assert "[1]" not in done.stdout
    assert "rank 0, the chief" in done.stdout
    results = json.loads(path.read_text())
    assert results["ranks"] == 3
    assert [(loss["rank"], loss["ranks"]) for loss in results["losses"]] == [(0, 3), (2, 2)]
    for loss in results["losses"]:
        assert min(loss["normal_step_s"], loss["next_step_s"], loss["step_after_s"]) > 0
    assert len(results["limits"]) == 2


@pytest.mark.mpi
def test_recovery_explains_why_a_job_is_not_elastic(launch) -> None:
    done = launch(2, IN_A_JOB, *TINY_RECOVERY)
    assert done.returncode != 0, done
    assert (
        "this job is not elastic: start the job with `hvdtrain run --elastic`"
        in done.stdout + done.stderr
    )


@pytest.mark.mpi
def test_startup_measures_both_launchers(run_command, environment, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    # JAX is imported faster than other frameworks.
    argv = [str(environment("jax")), *BENCH[1:], "startup", "-np", "2", "--runs", "1"]
    done = run_command([*argv, "--json", str(path)], timeout_s=100, env={"KERAS_BACKEND": "jax"})
    assert done.returncode == 0, done
    assert "import jax " in done.stdout
    results = json.loads(path.read_text())
    for launcher in ("hvdtrain_run_s", "mpirun_s"):
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in results[launcher].values())
    assert len(results["probes"]) == 2
