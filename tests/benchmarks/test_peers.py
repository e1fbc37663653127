"""Candidates, commands, plans and tables of the comparison with peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers.candidates import (
    ALONE,
    ENVIRONMENTS,
    MEASURES,
    WAYS,
    command_on_cluster,
    command_on_host,
    find_ways,
)
from peers.jobs import FULL, QUICK, make_plan, parse_results, python_of
from peers.tables import Column, collect, report, show_values, table, with_efficiency

from hvdtrain.launch.commands import Mpirun

MPIRUN = Mpirun(path=Path("/own/bin/mpirun"), family="openmpi5")
PYTHON = Path("/own/bin/python")


def test_measures_name_existing_candidates() -> None:
    named = {name for names in MEASURES.values() for name in names}
    assert named == set(WAYS)
    assert set(ALONE.values()) <= set(WAYS)
    assert {"", *ENVIRONMENTS.values()} == set(ALONE)


def test_unavailable_candidates_are_listed_with_the_remedy() -> None:
    available, unavailable = find_ways(
        ["mpi", "torch"], lambda name: f"/x/{name} does not exist; run: a long command"
    )
    assert list(available) == ["mpi"]
    assert unavailable["torch"].endswith(
        "/x/torch does not exist; install it: make environments NAMES=torch"
    )


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("hvdtrain", "/own/bin/hvdtrain run -np 2 --chief-only -- /own/bin/python"),
        ("restart", "/own/bin/hvdtrain run -np 2 --chief-only --max-restarts 1 -- /own/bin/python"),
        ("mpi", "/own/bin/mpirun -np 2 /own/bin/python"),
        (
            "horovod-gloo",
            "/envs/horovod-optimised/bin/horovodrun --gloo -np 2 -H localhost:2 "
            "/envs/horovod-optimised/bin/python",
        ),
        (
            "torch-restart",
            "/envs/torch/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 "
            "--max-restarts 1",
        ),
        ("keras", "/own/bin/python"),
    ],
)
def test_commands_on_this_host(name: str, begin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS[name]
    monkeypatch.setattr("sys.executable", str(PYTHON))
    monkeypatch.setattr("peers.jobs.folder_of", lambda environment: Path("/envs", environment))
    argv, _ = command_on_host(way, 2, ["rank.py", "{}"], python_of(way), MPIRUN)
    assert argv == [*begin.split(), "rank.py", "{}"]


@pytest.mark.parametrize(
    ("name", "program", "end"),
    [
        ("torch", "mpirun", "-H a:2,b:2 /x/python rank.py"),
        ("horovod-mpi", "mpirun", "-H a:2,b:2 -x TF_CPP_MIN_LOG_LEVEL /x/python rank.py"),
        ("horovod-gloo", "horovodrun", "--gloo -np 4 -H a:2,b:2 /x/python rank.py"),
    ],
)
def test_commands_on_the_cluster(name: str, program: str, end: str) -> None:
    argv, environ = command_on_cluster(WAYS[name], ["a", "b"], 2, ["rank.py"], Path("/x/python"))
    assert Path(argv[0]).name == program
    assert argv[-len(end.split()) :] == end.split()
    assert environ["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_candidates_take_turns() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "mpi")}
    plan = make_plan(["allreduce"], ["host", "cluster"], ways, 2, QUICK)
    order = [(task.where, task.repetition, task.name) for task in plan]
    assert order == [
        (where, repetition, name)
        for where in ("host", "cluster")
        for repetition in (1, 2)
        for name in ways
    ]


def test_training_jobs_measure_memory() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "torch")}
    both = make_plan(["training", "memory"], ["host"], ways, 1, FULL)
    assert [list(task.job["models"]) for task in both] == [
        ["lenet", "mlp", "resnet50"],
        ["lenet", "mlp"],
    ]
    memory = make_plan(["memory"], ["host", "cluster"], ways, 1, FULL)
    assert [(task.what, list(task.job["models"])) for task in memory] == [
        ("training", ["lenet"]),
        ("training", ["lenet"]),
    ]


def test_single_processes_do_not_run_on_the_cluster() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "keras")}
    plan = make_plan(["training", "startup"], ["cluster"], ways, 1, FULL)
    assert [(task.what, task.name, list(task.job["models"])) for task in plan] == [
        ("training", "hvdtrain", ["lenet"])
    ]


def test_a_single_process_has_one_rank() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "keras")}
    assert [task.ranks for task in make_plan(["training"], ["host"], ways, 1, QUICK)] == [
        2,
        1,
    ]


def test_times_become_durations_since_the_command() -> None:
    results = {"first_step_at_s": 12.5, "x": 1.0, "ranks": 2}
    assert parse_results(results, 10.0, 2) == {"first_step_s": 2.5, "x": 1.0}
    losses = {"benchmark": "recovery", "losses": [{"next_step_s": 0.5}, {"next_step_s": 9.0}]}
    assert parse_results(losses, 10.0, 2) == {"kill_to_next_step_s": 0.5}


def test_ranks_that_did_not_find_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected 4 ranks, got 1"):
        parse_results({"x": 1.0, "ranks": 1}, 10.0, 4)


def entry(way: str, **figures: float) -> dict[str, object]:
    return {"what": "training", "where": "host", "way": way, "found": figures}


def test_medians_and_ranges() -> None:
    assert show_values([3.0, 1.0, 2.5], "{:.1f} s".format) == "2.5 s (1.0 s to 3.0 s)"
    assert show_values([2.0], "{:.0f}".format) == "2"
    assert show_values([], "{:.0f}".format) == ""


def test_a_table_has_a_row_for_each_candidate() -> None:
    entries = [
        entry("a", x=1.0),
        {"what": "training", "where": "host", "way": "b", "error": "exit code 1"},
        entry("a", x=3.0),
        entry("c", y=5.0),
        {**entry("d", x=7.0), "where": "cluster"},
    ]
    columns = [
        Column("x", "of x", "{:.0f}".format),
        Column("y", "of y", "{:.0f}".format),
    ]
    labels = {"a": "A", "b": "B", "c": "C"}
    assert table(labels, collect(entries, "training", "host"), columns).splitlines() == [
        "| candidate | of x | of y |",
        "|---|---|---|",
        "| A | 2 (1 to 3) |  |",
        "| B | failed |  |",
        "| C |  | 5 |",
    ]


def test_efficiency_is_relative_to_a_process_of_the_same_framework() -> None:
    speed = "lenet samples_per_s"
    values = {
        "hvdtrain": {speed: [150.0, 180.0]},
        "torch": {speed: [90.0]},
        "keras": {speed: [80.0, 100.0, 120.0]},
    }
    result = with_efficiency(values, WAYS, 2)
    assert result["hvdtrain"]["lenet percent"] == [75.0, 90.0]
    # No single process of torch was measured.
    assert "lenet percent" not in result["torch"]
    assert "lenet percent" not in result["keras"]


def test_the_report_lists_missing_candidates() -> None:
    ways, unavailable = find_ways(["elastic", "torch-restart"], lambda name: "not installed")
    entries = [
        {
            "what": "recovery",
            "where": "host",
            "way": "elastic",
            "versions": {"keras": "3"},
            "found": {"kill_to_next_step_s": 0.5},
        }
    ]
    text = report(["recovery"], ways, unavailable, entries, QUICK, {"host": "2 ranks on one host"})
    assert "LeNet: 2 ranks on one host" in text.splitlines()[0]
    assert "| hvdtrain run --elastic: the other rank continues (keras 3) | 0.50 |" in text
    assert "- Not measured: torchrun --max-restarts 1 (another framework): not installed;" in text
    assert "Not measured: Horovod's elastic mode: " in text
