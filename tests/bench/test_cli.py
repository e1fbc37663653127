"""The whole command, on tiny sizes: what it prints and writes, never how fast it was."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main

BENCH = [sys.executable, "-m", "hvdtrain", "bench"]
# One rank of a job that is there; starting one is the same for all benchmarks but startup.
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
    "ranks": (["allreduce", "-np", "0"], "got '0', expected a whole number above 0"),
    "models": (["training", "--models", "lenet,vgg"], "got 'vgg', expected names out of"),
    "model": (["recovery", "--model", "vgg"], "vgg"),
    "link": (["predict", "--link", "25"], "got '25', expected a speed like 25gbit"),
    "compute": (["predict", "--compute-ms", "0"], "got '0', expected a number above 0"),
    "nobody left": (["recovery", "-np", "1"], "kills all ranks but one"),
    "directory": (["checkpoint", "--directory", "/nonexistent"], "there is no such folder"),
    "folder": (["allreduce", "--json", "/nonexistent/x.json"], "there is no folder /nonexistent"),
}


@pytest.mark.parametrize(("argv", "told"), USAGE_ERRORS.values(), ids=USAGE_ERRORS)
def test_usage_errors_exit_2(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert told in capsys.readouterr().err


def test_help_names_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    names = ("allreduce", "training", "checkpoint", "recovery", "startup", "predict")
    assert all(name in shown for name in names)


def test_predict_needs_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "predicted.json"
    argv = ["predict", "--hosts", "6", "--ranks-per-host", "2", "--link", "1gbit"]
    assert main(["bench", *argv, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["predicted"]
    assert [row["ranks"] for row in rows] == [2, 4, 8, 12]
    assert rows[-1]["limit"] == "the link"
    shown = capsys.readouterr().out
    assert f"{rows[-1]['efficiency']:.0%}" in shown
    assert "between checkpoints" in shown


def test_startup_refuses_to_run_inside_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=2)
    assert main(["bench", "startup"]) == 2
    assert "can't run inside one" in capsys.readouterr().err


def test_another_number_of_ranks_than_the_job_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=2)
    assert main(["bench", "allreduce", "-np", "3"]) == 2
    assert "-np 3 was asked for inside a job of 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "here", "told"),
    [(1, 1, "received one with 1 rank."), (4, 2, "received one with 2 of 4 ranks on this host")],
)
def test_recovery_refuses_jobs_in_which_it_measures_nothing(
    ranks: int,
    here: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _pretend_to_be_a_rank(monkeypatch, ranks=ranks, here=here)
    assert main(["bench", "recovery"]) == 2
    assert told in capsys.readouterr().err


def _pretend_to_be_a_rank(
    monkeypatch: pytest.MonkeyPatch, *, ranks: int, here: int | None = None
) -> None:
    sizes = {"SIZE": ranks, "LOCAL_SIZE": ranks if here is None else here}
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, **sizes}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))


@pytest.mark.mpi
def test_allreduce_measures_each_size(run_command, mpirun, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = mpirun(2, [*BENCH, *TINY_ALLREDUCE, "--json", str(path)])
    done = run_command(argv, timeout_s=110)
    assert done.returncode == 0, done
    assert done.stdout.count("hvdtrain bench allreduce: 2 ranks") == 1, "the chief alone prints"
    found = json.loads(path.read_text())
    assert found["ranks"] == 2
    assert [row["bytes"] for row in found["sizes"]] == [4, 16, 64, 256, 1024, 4096]
    for row in found["sizes"]:
        assert row["engine"] == "shared_memory"
        assert 0 < row["best_s"] <= row["median_s"]
        # On two ranks the factor is 1.
        assert row["bus_bandwidth"] == pytest.approx(row["bytes"] / row["best_s"])
    assert len(found["limits"]) == 2


@pytest.mark.mpi
def test_servers_measures_two_workers_and_all(launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ["--runs", "2", "--updates", "3", "--json", str(path)]
    done = launch(4, IN_A_JOB, "servers", *options)
    assert done.returncode == 0, done
    found = json.loads(path.read_text())
    assert [row["workers"] for row in found["rows"]] == [2, 3]
    for row in found["rows"]:
        assert len(row["update_s"]) == len(row["copy_s"]) == 2
        assert 0 < row["server_bytes"] < row["server_resident_bytes"] < 1 << 32
    speed, memory = found["limits"]
    two = found["rows"][0]
    assert speed["measured"] == pytest.approx(350 * min(two["copy_s"]) / min(two["update_s"]))
    assert memory["held"]


@pytest.mark.mpi
def test_training_measures_one_rank_and_two(launch, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = launch(2, IN_A_JOB, *TINY_TRAINING, "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done
    found = json.loads(path.read_text())
    (row,) = found["models"]
    assert row["model"] == "lenet"
    assert [len(speeds) for speeds in row["alone_samples_per_s"]] == [2, 2], "each rank, each run"
    assert len(row["joint_samples_per_s"]) == 2
    one_rank = sum(max(speeds) for speeds in row["alone_samples_per_s"]) / 2
    best = max(row["joint_samples_per_s"]) / one_rank
    assert row["speedup"] == pytest.approx(best)
    assert row["efficiency_percent"] == pytest.approx(50 * best)
    by_calls = row["joint_call_samples_per_s"]
    assert all(call < 3 * step for call, step in zip(by_calls, row["joint_samples_per_s"]))
    assert [row["input"] for row in found["calls"]] == ["arrays", "tf.data", "PyDataset"]
    assert all(row["together_s"] > 0 < row["alone_s"] for row in found["calls"])


@pytest.mark.mpi
def test_checkpoint_tells_waiting_from_writing(launch, tmp_path: Path) -> None:
    path, folder = tmp_path / "out.json", tmp_path / "disk"
    folder.mkdir()
    options = ["--checkpoints", "2", "--between-steps", "2", "--directory", str(folder)]
    done = launch(2, IN_A_JOB, "checkpoint", *options, "--json", str(path), timeout_s=100)
    assert done.returncode == 0, done
    found = json.loads(path.read_text())
    assert found["bytes"] > 3 * 4 * 20_000_000, "weights and Adam's two moments"
    assert len(found["paused_s"]) == len(found["written_s"]) >= 1
    assert min(found["paused_s"] + found["written_s"]) > 0
    assert list(folder.iterdir()) == [], "it tidies up"


@pytest.mark.mpi
def test_recovery_kills_all_ranks_but_one(run_command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = [*BENCH, *TINY_RECOVERY, "-np", "3", "--json", str(path)]
    done = run_command(argv, timeout_s=150)
    assert done.returncode == 0, done
    assert done.stdout.count("hvdtrain bench recovery: 3 ranks") == 1
    # Printed by another rank than began, which died.
    assert "[1]" not in done.stdout
    assert "rank 0, the chief" in done.stdout
    found = json.loads(path.read_text())
    assert found["ranks"] == 3
    assert [(loss["rank"], loss["ranks"]) for loss in found["losses"]] == [(0, 3), (2, 2)]
    for loss in found["losses"]:
        assert min(loss["normal_step_s"], loss["next_step_s"], loss["step_after_s"]) > 0
    assert len(found["limits"]) == 2


@pytest.mark.mpi
def test_recovery_names_why_a_job_is_not_elastic(launch) -> None:
    done = launch(2, IN_A_JOB, *TINY_RECOVERY)
    assert done.returncode != 0, done
    assert "this one ends: start it with `hvdtrain run --elastic`" in done.stdout + done.stderr


@pytest.mark.mpi
def test_startup_starts_both_ways(run_command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = [*BENCH, "startup", "-np", "2", "--runs", "1", "--json", str(path)]
    done = run_command(argv, timeout_s=100)
    assert done.returncode == 0, done
    found = json.loads(path.read_text())
    for way in ("hvdtrain_run_s", "mpirun_s"):
        assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found[way].values())
    assert len(found["probes"]) == 2
