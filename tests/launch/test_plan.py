"""Plans, which determine each rank's host, role and environment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import main
from hvdtrain.cluster.hosts import Host, parse_hosts
from hvdtrain.cluster.tf_config import TaskHosts, hosts_and_servers
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import Mpirun, Plan, Srun
from hvdtrain.launch.plan import (
    Job,
    Resources,
    forwarded_names,
    make_command,
    make_plan,
    rank_environment,
)

SPEC = {"worker": ["n1:2222", "n2:2222"], "ps": ["n3:2222"]}
FROM_SPEC = ["n1 chief", "n2 worker", "n3 ps"]


@pytest.fixture
def plan_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """Return a function that makes a dry run and returns columns of the plan, or the error."""
    for name in [name for name in os.environ if name.startswith("HVDTRAIN_")]:
        monkeypatch.delenv(name)
    for name in ("TF_CONFIG", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)

    def plan(*options: str, columns: tuple[int, ...] = (1, 3)) -> list[str] | str:
        code = main(["run", *options, "--dry-run", "--", "python", "train.py"])
        output = capsys.readouterr()
        if code == 2:
            assert output.out == ""
            return output.err
        assert code == 0, output.err
        rows = [line.split() for line in output.out.partition("\n\n")[0].splitlines()[1:]]
        assert [row[0] for row in rows] == [str(rank) for rank in range(len(rows))]
        return [" ".join(row[column] for column in columns) for row in rows]

    return plan


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    (tmp_path / "cluster.json").write_text("\ufeff" + json.dumps(SPEC), encoding="utf-8")
    return str(tmp_path / "cluster.json")


def test_roles_in_the_plan(plan_of) -> None:
    first = ["a chief", "a worker", "b worker"]
    assert plan_of("-H", "a:2,b:2") == [*first, "b worker"]
    assert plan_of("-H", "a:2,b:2", "--mode", "async-ps") == [*first, "b ps"]
    roles = plan_of("-H", "a:2,b:2", "--mode", "sync-ps", "--ps-ranks", "1,2")
    assert roles == ["a chief", "a ps", "b ps", "b worker"]


def test_too_few_ranks_for_the_roles_are_an_error(plan_of) -> None:
    message = plan_of("-np", "2", "--mode", "async-ps", "--num-ps", "2")
    assert "2 ranks with 2 parameter servers (--num-ps, HVDTRAIN_NUM_PS) leave no worker" in message
    message = plan_of("-H", "a:2,b", "--mode", "sync-ps", "--backup-workers", "2")
    assert "must be less than the number of workers, 2, got 2" in message


def test_tasks_from_a_file(plan_of, cluster_file: str) -> None:
    options = ("--cluster", cluster_file, "--mode", "async-ps")
    assert plan_of(*options) == FROM_SPEC
    assert plan_of(*options, "-np", "3") == FROM_SPEC
    assert plan_of(*options, "-np", "2") == (
        f"hvdtrain run: error: -np 2 is not the number of tasks in --cluster {cluster_file}, 3 (2 "
        "workers and 1 parameter server); omit -np.\n"
    )


def test_tasks_from_lists(plan_of) -> None:
    options = ("--worker-hosts", "n1:2222,n2:2222", "--mode", "sync-ps")
    assert plan_of(*options, "--ps-hosts", "n3:2222") == FROM_SPEC
    assert plan_of(*options, "--ps-hosts", "n1:2223") == ["n1 chief", "n1 ps", "n2 worker"]
    assert "names no parameter server (ps), but --mode sync-ps needs at least one" in plan_of(
        *options
    )
    assert plan_of("--worker-hosts", "n2,n1,n2") == ["n2 chief", "n2 worker", "n1 worker"]


def test_tasks_from_the_variable(plan_of, monkeypatch, cluster_file: str) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": SPEC, "task": {"type": "ps"}}))
    servers = ("--mode", "async-ps")
    assert plan_of(*servers) == FROM_SPEC
    assert "-np 5 is not the number of tasks in the variable TF_CONFIG" in plan_of(
        *servers, "-np", "5"
    )
    assert plan_of(*servers, "-H", "a:2") == ["a chief", "a ps"], "-H overrides the variable"
    assert plan_of("-np", "2") == ["localhost chief", "localhost worker"], "no servers requested"
    monkeypatch.setenv("TF_CONFIG", "not read")
    assert plan_of(*servers, "--cluster", cluster_file) == FROM_SPEC
    assert "the variable TF_CONFIG is invalid: it is not valid JSON" in plan_of(*servers)


@pytest.mark.slow
def test_named_hosts_override_those_of_the_slurm_job(
    plan_of, monkeypatch, cluster_file: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "m[1-3]")
    servers = ("--mode", "async-ps")
    assert plan_of(*servers, "-H", "a:2") == ["a chief", "a ps"]
    assert plan_of(*servers, "--cluster", cluster_file) == FROM_SPEC


def test_servers_named_twice_are_an_error(plan_of, cluster_file: str) -> None:
    message = plan_of("--cluster", cluster_file, "--mode", "async-ps", "--ps-ranks", "1")
    assert "--ps-ranks (HVDTRAIN_PS_RANKS) both place parameter servers" in message


MPIRUN = Mpirun(path=Path("/mpi/bin/mpirun"), family="openmpi5")


def job_on(hosts: str, **settings: Any) -> tuple[Job, Resources]:
    job = Job(program=("true",), settings=Settings(**{"mode": "async-ps", **settings}))
    return job, Resources(
        hosts=tuple(parse_hosts(hosts)),
        ps_ranks=job.settings.ps_ranks,
        starter=MPIRUN,
        elastic=False,
        gpus=0,
    )


def roles(plan: Plan) -> str:
    """Return the host of each rank, with a star for servers."""
    return " ".join(entry.host + "*" * (entry.role == "ps") for entry in plan.places)


def replan(job: Job, resources: Resources, before: Plan, left: str, ranks: int) -> Plan:
    """Return the plan of the next attempt after losses."""
    hosts = parse_hosts(left)
    room = min(ranks, sum(host.slots for host in hosts))
    return make_plan(job, resources, hosts, room, larger=before if room < ranks else None)


def test_roles_are_reassigned_on_fewer_hosts() -> None:
    job, resources = job_on("a:2,b:2,c:2", num_ps=2)
    first = make_plan(job, resources, resources.hosts, None)
    assert roles(first) == "a a b b c* c*"
    assert roles(replan(job, resources, first, "a:2,b:2", 6)) == "a a b* b*"
    with pytest.raises(ConfigurationError, match=r"2 ranks with 2 parameter servers .* no worker"):
        replan(job, resources, first, "b:2", 6)


def test_named_servers_stay_on_their_hosts() -> None:
    job, resources = job_on("a,b,c,s,t", ps_ranks=(3, 4))
    first = make_plan(job, resources, resources.hosts, None)
    assert roles(first) == "a b c s* t*"
    second = replan(job, resources, first, "b,c,s,t", 5)
    assert roles(second) == "b c s* t*"
    third = replan(job, resources, second, "b,c,s,t", 5)
    assert third == second
    assert roles(replan(job, resources, third, "b,c,t", 5)) == "b c t*"
    assert roles(replan(job, resources, first, "s,t,c,b", 5)) == "c b s* t*", "the chief trains"
    with pytest.raises(ConfigurationError, match="all servers are lost with s, t"):
        replan(job, resources, second, "b,c", 5)
    with pytest.raises(ConfigurationError, match="all workers are lost with b, c"):
        replan(job, resources, second, "s,t", 5)


def test_server_ranks_are_ignored_without_servers() -> None:
    job, resources = job_on("a,b,c", mode="allreduce", ps_ranks=(2,))
    first = make_plan(job, resources, resources.hosts, None)
    assert roles(first) == "a b c"
    assert roles(replan(job, resources, first, "a,b", 3)) == "a b"


def test_a_spare_host_takes_over_a_server() -> None:
    job, resources = job_on("a:1,s:1,spare:1", ps_ranks=(1,))
    first = make_plan(job, resources, resources.hosts, 2)
    assert roles(first) == "a s*"
    assert roles(replan(job, resources, first, "a:1,spare:1", 2)) == "a spare*"


def test_a_cluster_restarts_with_the_remaining_tasks() -> None:
    job, resources = job_on("a", mode="sync-ps")
    hosts, ps_ranks = hosts_and_servers(TaskHosts(workers=("a", "b", "c"), servers=("a", "s")))
    resources = Resources(**{**vars(resources), "hosts": tuple(hosts), "ps_ranks": ps_ranks})
    first = make_plan(job, resources, resources.hosts, None)
    assert roles(first) == "a a* b c s*"
    assert roles(replan(job, resources, first, "b:1,c:1,s:1", 5)) == "b c s*"


def server_variable(
    job: Job, resources: Resources, plan: Plan, folder: Path, **environ: str
) -> str | None:
    command = make_command(job, resources, plan, environ, folder / "hosts")
    return command.environ.get("HVDTRAIN_PS_RANKS")


def test_ranks_get_the_planned_servers(tmp_path: Path) -> None:
    job, resources = job_on("a,b,c,s", ps_ranks=(3,))
    first = make_plan(job, resources, resources.hosts, None)
    second = replan(job, resources, first, "a,c,s", 4)
    assert server_variable(job, resources, first, tmp_path, HVDTRAIN_PS_RANKS="3") == "3"
    assert server_variable(job, resources, second, tmp_path, HVDTRAIN_PS_RANKS="3") == "2"
    job, resources = job_on("a,b,c", num_ps=2)
    assert (
        server_variable(job, resources, make_plan(job, resources, resources.hosts, None), tmp_path)
        == "1,2"
    )
    job, resources = job_on("a,b,c", mode="allreduce", ps_ranks=(2,))
    assert (
        server_variable(job, resources, make_plan(job, resources, resources.hosts, None), tmp_path)
        is None
    )


TOWERS = ("--mode", "towers", "--devices-per-rank", "2")


@pytest.mark.parametrize(
    ("gpus", "options", "rows"),
    [
        ("0,1,2,3", ("-np", "2", *TOWERS), ["0,1", "2,3"]),
        ("0,1,2", ("-np", "2", *TOWERS, "--share-gpus"), ["0,1", "0,2"]),
        ("-1", ("-np", "2", *TOWERS), ["-", "-"]),
        ("0,1,2,3", ("-np", "2", "--mode", "towers"), ["0", "1"]),
    ],
)
def test_devices_in_the_plan(
    plan_of, monkeypatch, gpus: str, options: tuple[str, ...], rows: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert plan_of(*options, columns=(4,)) == rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("-np", "2", *TOWERS),
            "too few GPUs for 2 per rank (--devices-per-rank): localhost has 3 GPUs for 2",
        ),
        (
            ("-np", "1", "--devices-per-rank", "2"),
            "--devices-per-rank 2 (HVDTRAIN_DEVICES_PER_RANK) needs --mode towers",
        ),
    ],
)
def test_too_few_devices_are_an_error(
    plan_of, monkeypatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert message in plan_of(*options)


FOLDERS = [Path("/venv/bin"), Path("/mpi/bin")]


def test_rank_environment() -> None:
    assert rank_environment({"PATH": "/usr/bin:/bin", "HOME": "/home/me"}, FOLDERS) == {
        "HOME": "/home/me",
        "I_MPI_PIN": "0",
        "PATH": "/venv/bin:/mpi/bin:/usr/bin:/bin",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    variables = {
        "PYTHONUNBUFFERED": "",
        "PYTHONFAULTHANDLER": "0",
        "I_MPI_PIN": "1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    assert rank_environment(variables, []) == {**variables, "PATH": os.defpath}


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/usr/bin::/venv/bin:/usr/bin:", "/venv/bin:/mpi/bin:/usr/bin"),
        ("", "/venv/bin:/mpi/bin"),
        (None, f"/venv/bin:/mpi/bin:{os.defpath}"),
    ],
)
def test_path_contains_no_folder_twice(given: str | None, path: str) -> None:
    environ = {} if given is None else {"PATH": given}
    assert rank_environment(environ, FOLDERS)["PATH"] == path


def test_forwarded_names() -> None:
    names = [
        *("CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "HVDTRAIN_LAUNCHER", "JAX_PLATFORMS"),
        *("KERAS_BACKEND", "LD_LIBRARY_PATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "PYTHON"),
        *(
            "PYTHONPATH",
            "PYTORCH_CUDA_ALLOC_CONF",
            "TF_CPP_MIN_LOG_LEVEL",
            "TORCHINDUCTOR_CACHE_DIR",
        ),
        *("VIRTUAL_ENV", "XLA_FLAGS"),
    ]
    local = ["HOME", "HOSTNAME", "MANPATH", "MYPATH", "SLURM_JOB_ID", "PATHS", "AWS_SECRET_KEY"]
    environ = dict.fromkeys([*reversed(names), *local], "x")
    assert forwarded_names(environ) == tuple(names)
    assert forwarded_names({"PATH": "x", "HOME": "x"}, ["HOME", "PATH", "HOME"]) == ("PATH", "HOME")


def test_srun_refuses_arguments_for_mpirun(tmp_path: Path) -> None:
    job = Job(program=("python",), mpi_args=("--mca", "a", "b"))
    resources = Resources(
        hosts=(Host(name="a", slots=2),),
        ps_ranks=(),
        starter=Srun(path=Path("/usr/bin/srun")),
        elastic=False,
        gpus=0,
    )
    plan = make_plan(job, resources, resources.hosts, None)
    with pytest.raises(ConfigurationError, match=r"--mpi-args '--mca a b' requires mpirun, .*srun"):
        make_command(job, resources, plan, {}, tmp_path / "hosts")
