"""Which ways are compared with hvdtrain, how their jobs are started, and what tables show."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers.commands import command_on_cluster, command_on_host, python_of
from peers.plan import full_sizes, make_plan, quick_sizes
from peers.running import read_found
from peers.summary import Column, collect, report, show_values, table, with_efficiency
from peers.ways import MEASURES, WAYS, find_ways

from hvdtrain.launch.starters import Mpirun

MPIRUN = Mpirun(path=Path("/own/bin/mpirun"), family="openmpi5")
PYTHON = Path("/own/bin/python")


def test_every_measure_and_every_single_process_names_a_way() -> None:
    named = {name for names in MEASURES.values() for name in names}
    assert named == set(WAYS)
    assert {way.alone for way in WAYS.values()} - {""} <= set(WAYS)


def test_what_is_not_there_is_named_with_how_to_get_it() -> None:
    found, not_there = find_ways(
        ["mpi", "torch"], lambda name: f"there is no /x/{name}; make it with: something long"
    )
    assert list(found) == ["mpi"]
    assert not_there["torch"].endswith(
        "there is no /x/torch; get it with: make environments NAMES=torch"
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
def test_commands_on_this_host(name: str, begin: str) -> None:
    way = WAYS[name]
    python = python_of(way, PYTHON, lambda environment: Path("/envs", environment))
    argv, _ = command_on_host(way, 2, ["rank.py", "{}"], python, MPIRUN)
    assert argv == [*begin.split(), "rank.py", "{}"]


@pytest.mark.parametrize(
    ("name", "program", "end"),
    [
        ("torch", "mpirun", "-H a:1,b:1 /x/python rank.py"),
        ("horovod-mpi", "mpirun", "-H a:1,b:1 -x TF_CPP_MIN_LOG_LEVEL /x/python rank.py"),
        ("horovod-gloo", "horovodrun", "--gloo -np 2 -H a:1,b:1 /x/python rank.py"),
    ],
)
def test_commands_on_the_cluster(name: str, program: str, end: str) -> None:
    argv, environ = command_on_cluster(WAYS[name], ["a", "b"], ["rank.py"], Path("/x/python"))
    assert Path(argv[0]).name == program
    assert argv[-len(end.split()) :] == end.split()
    assert environ["OMPI_ALLOW_RUN_AS_ROOT"] == "1"


def test_ways_take_turns() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "mpi")}
    plan = make_plan(["allreduce"], ["host", "cluster"], ways, 2, quick_sizes())
    order = [(task.where, task.repetition, task.way.name) for task in plan]
    assert order == [
        (where, repetition, name)
        for where in ("host", "cluster")
        for repetition in (1, 2)
        for name in ways
    ]


def test_memory_is_that_of_the_jobs_that_train() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "torch")}
    both = make_plan(["training", "memory"], ["host"], ways, 1, full_sizes())
    assert [list(task.job["models"]) for task in both] == [
        ["lenet", "mlp", "resnet50"],
        ["lenet", "mlp"],
    ]
    memory = make_plan(["memory"], ["host", "cluster"], ways, 1, full_sizes())
    assert [(task.what, list(task.job["models"])) for task in memory] == [
        ("training", ["lenet"]),
        ("training", ["lenet"]),
    ]


def test_what_trains_alone_is_not_on_the_cluster() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "keras")}
    plan = make_plan(["training", "startup"], ["cluster"], ways, 1, full_sizes())
    assert [(task.what, task.way.name, list(task.job["models"])) for task in plan] == [
        ("training", "hvdtrain", ["lenet"])
    ]


def test_one_process_is_one_rank() -> None:
    ways = {name: WAYS[name] for name in ("hvdtrain", "keras")}
    assert [task.ranks for task in make_plan(["training"], ["host"], ways, 1, quick_sizes())] == [
        2,
        1,
    ]


def test_moments_become_seconds_from_the_command_on() -> None:
    told = {"first_step_at_s": 12.5, "x": 1.0, "ranks": 2}
    assert read_found(told, 10.0, 2) == {"first_step_s": 2.5, "x": 1.0}
    losses = {"benchmark": "recovery", "losses": [{"next_step_s": 0.5}, {"next_step_s": 9.0}]}
    assert read_found(losses, 10.0, 2) == {"kill_to_next_step_s": 0.5}


def test_ranks_that_each_worked_alone_have_no_figures() -> None:
    with pytest.raises(ValueError, match="rank 0 was one of 1, and 4 had been started"):
        read_found({"x": 1.0, "ranks": 1}, 10.0, 4)


def entry(way: str, **found: float) -> dict[str, object]:
    return {"what": "training", "where": "host", "way": way, "found": found}


def test_medians_and_spreads() -> None:
    assert show_values([3.0, 1.0, 2.5], "{:.1f} s".format) == "2.5 s (1.0 s to 3.0 s)"
    assert show_values([2.0], "{:.0f}".format) == "2"
    assert show_values([], "{:.0f}".format) == ""


def test_a_table_has_a_row_for_each_way_and_says_who_failed() -> None:
    entries = [
        entry("a", x=1.0),
        {"what": "training", "where": "host", "way": "b", "error": "exit code 1"},
        entry("a", x=3.0),
        entry("c", y=5.0),
        {**entry("d", x=7.0), "where": "cluster"},
    ]
    columns = [
        Column(figure="x", head="of x", show="{:.0f}".format),
        Column(figure="y", head="of y", show="{:.0f}".format),
    ]
    labels = {"a": "A", "b": "B", "c": "C"}
    assert table(labels, collect(entries, "training", "host"), columns).splitlines() == [
        "| way | of x | of y |",
        "|---|---|---|",
        "| A | 2 (1 to 3) |  |",
        "| B | failed |  |",
        "| C |  | 5 |",
    ]


def test_efficiency_is_held_against_a_process_of_the_same_framework() -> None:
    speed = "lenet samples_per_s"
    values = {
        "hvdtrain": {speed: [150.0, 180.0]},
        "torch": {speed: [90.0]},
        "keras": {speed: [80.0, 100.0, 120.0]},
    }
    found = with_efficiency(values, WAYS, 2)
    assert found["hvdtrain"]["lenet percent"] == [75.0, 90.0]
    # Of torch no single process was measured.
    assert "lenet percent" not in found["torch"]
    assert "lenet percent" not in found["keras"]


def test_the_report_names_what_is_not_in_it() -> None:
    ways, not_there = find_ways(["elastic", "torch-restart"], lambda name: "there is none")
    entries = [
        {
            "what": "recovery",
            "where": "host",
            "way": "elastic",
            "versions": {"keras": "3"},
            "found": {"kill_to_next_step_s": 0.5},
        }
    ]
    text = report(["recovery"], ["host"], ways, not_there, entries, quick_sizes(), 2, "")
    assert "LeNet: 2 ranks on one host" in text.splitlines()[0]
    assert "| hvdtrain run --elastic: the other rank goes on (keras 3) | 0.50 |" in text
    assert "- Not measured: torchrun --max-restarts 1 (another framework): there is none;" in text
    assert "- Not measured: Horovod's elastic mode: " in text
