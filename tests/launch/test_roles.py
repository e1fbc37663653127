"""Who serves and who trains: what the command line, a classic cluster and lost hosts come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.cli import main
from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.cluster.tf_config import TaskHosts, hosts_and_servers
from hvdtrain.config import Settings
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import Plan
from hvdtrain.launch.plan import Job, Resources, make_command, make_plan
from hvdtrain.launch.restart import fitting
from hvdtrain.launch.starters import Mpirun

SPEC = {"worker": ["n1:2222", "n2:2222"], "ps": ["n3:2222"]}
FROM_SPEC = ["n1 chief", "n2 worker", "n3 ps"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Host and role of each rank, as a dry run with these options shows them; or its complaint."""
    for name in ("TF_CONFIG", "SLURM_JOB_NODELIST", "HVDTRAIN_MODE", "HVDTRAIN_PS_RANKS"):
        monkeypatch.delenv(name, raising=False)

    def show(*options: str) -> list[str] | str:
        code = main(["run", *options, "--dry-run", "--", "python", "train.py"])
        shown = capsys.readouterr()
        if code == 2:
            assert shown.out == ""
            return shown.err
        assert code == 0, shown.err
        rows = [line.split() for line in shown.out.partition("\n\n")[0].splitlines()[1:]]
        assert [row[0] for row in rows] == [str(rank) for rank in range(len(rows))]
        return [f"{row[1]} {row[3]}" for row in rows]

    return show


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    (tmp_path / "cluster.json").write_text("\ufeff" + json.dumps(SPEC), encoding="utf-8")
    return str(tmp_path / "cluster.json")


def test_the_table_shows_the_roles(planned) -> None:
    on_two = ["a chief", "a worker", "b worker"]
    assert planned("-H", "a:2,b:2") == [*on_two, "b worker"]
    assert planned("-H", "a:2,b:2", "--mode", "async-ps") == [*on_two, "b ps"]
    named = planned("-H", "a:2,b:2", "--mode", "sync-ps", "--ps-ranks", "1,2")
    assert named == ["a chief", "a ps", "b ps", "b worker"]


def test_ranks_that_do_not_suffice_are_told_before_anything_starts(planned) -> None:
    told = planned("-np", "2", "--mode", "async-ps", "--num-ps", "2")
    assert "2 ranks with 2 parameter servers (--num-ps, HVDTRAIN_NUM_PS) leave no worker" in told
    told = planned("-H", "a:2,b", "--mode", "sync-ps", "--backup-workers", "2")
    assert "must be less than the number of workers, 2, got 2" in told


def test_the_tasks_of_a_file(planned, cluster_file: str) -> None:
    options = ("--cluster", cluster_file, "--mode", "async-ps")
    assert planned(*options) == FROM_SPEC
    assert planned(*options, "-np", "3") == FROM_SPEC
    assert planned(*options, "-np", "2") == (
        f"hvdtrain run: -np 2 is not the number of tasks in --cluster {cluster_file}: 2 workers "
        "and 1 parameter server are 3. Leave -np out.\n"
    )


def test_the_tasks_of_lists(planned) -> None:
    options = ("--worker-hosts", "n1:2222,n2:2222", "--mode", "sync-ps")
    assert planned(*options, "--ps-hosts", "n3:2222") == FROM_SPEC
    assert planned(*options, "--ps-hosts", "n1:2223") == ["n1 chief", "n1 ps", "n2 worker"]
    assert "no parameter server (ps) is named, but --mode sync-ps needs one" in planned(*options)
    assert planned("--worker-hosts", "n2,n1,n2") == ["n2 chief", "n2 worker", "n1 worker"]


def test_the_tasks_of_the_variable(planned, monkeypatch, cluster_file: str) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": SPEC, "task": {"type": "ps"}}))
    servers = ("--mode", "async-ps")
    assert planned(*servers) == FROM_SPEC
    assert "-np 5 is not the number of tasks in the variable TF_CONFIG" in planned(
        *servers, "-np", "5"
    )
    assert planned(*servers, "-H", "a:2") == ["a chief", "a ps"], "what is named wins"
    assert planned("-np", "2") == ["localhost chief", "localhost worker"], "no servers wanted"
    monkeypatch.setenv("TF_CONFIG", "not read")
    assert planned(*servers, "--cluster", cluster_file) == FROM_SPEC
    assert "the variable TF_CONFIG is invalid: it is not valid JSON" in planned(*servers)


@pytest.mark.slow
def test_a_cluster_in_a_slurm_job_is_like_hosts_that_are_named(
    planned, monkeypatch, cluster_file: str
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "m[1-3]")
    servers = ("--mode", "async-ps")
    assert planned(*servers, "-H", "a:2") == ["a chief", "a ps"]
    assert planned(*servers, "--cluster", cluster_file) == FROM_SPEC


def test_servers_are_named_once(planned, cluster_file: str) -> None:
    told = planned("--cluster", cluster_file, "--mode", "async-ps", "--ps-ranks", "1")
    assert "--ps-ranks (HVDTRAIN_PS_RANKS) both say where parameter servers are" in told


MPIRUN = Mpirun(path=Path("/mpi/bin/mpirun"), family="openmpi5")


def job_on(hosts: str, **settings: Any) -> tuple[Job, Resources]:
    job = Job(program=("true",), settings=Settings(**{"mode": "async-ps", **settings}))
    found = tuple(parse_hosts(hosts))
    ps_ranks = job.settings.ps_ranks
    return job, Resources(hosts=found, ps_ranks=ps_ranks, starter=MPIRUN, elastic=False, gpus=0)


def roles(plan: Plan) -> str:
    """Host of each rank; servers with a star."""
    return " ".join(entry.host + "*" * (entry.role == "ps") for entry in plan.places)


def again(job: Job, site: Resources, before: Plan, left: str, asked: int) -> Plan:
    """The plan after losses, as attempts make it."""
    hosts = parse_hosts(left)
    fits = fitting(hosts, asked, oversubscribe=False)
    return make_plan(job, site, hosts, fits, more_before=before if fits < asked else None)


def test_roles_are_assigned_anew_on_fewer_hosts() -> None:
    job, site = job_on("a:2,b:2,c:2", num_ps=2)
    first = make_plan(job, site, site.hosts, None)
    assert roles(first) == "a a b b c* c*"
    assert roles(again(job, site, first, "a:2,b:2", 6)) == "a a b* b*"
    with pytest.raises(ConfigurationError, match=r"2 ranks with 2 parameter servers .* no worker"):
        again(job, site, first, "b:2", 6)


def test_servers_that_are_named_stay_where_they_are() -> None:
    job, site = job_on("a,b,c,s,t", ps_ranks=(3, 4))
    first = make_plan(job, site, site.hosts, None)
    assert roles(first) == "a b c s* t*"
    second = again(job, site, first, "b,c,s,t", 5)
    assert roles(second) == "b c s* t*"
    third = again(job, site, second, "b,c,s,t", 5)
    assert third == second
    assert roles(again(job, site, third, "b,c,t", 5)) == "b c t*"
    assert roles(again(job, site, first, "s,t,c,b", 5)) == "c b s* t*", "the chief trains"
    with pytest.raises(ConfigurationError, match="all servers are lost with s, t"):
        again(job, site, second, "b,c", 5)
    with pytest.raises(ConfigurationError, match="all workers are lost with b, c"):
        again(job, site, second, "s,t", 5)


def test_without_servers_their_numbers_say_nothing() -> None:
    job, site = job_on("a,b,c", mode="allreduce", ps_ranks=(2,))
    first = make_plan(job, site, site.hosts, None)
    assert roles(first) == "a b c"
    assert roles(again(job, site, first, "a,b", 3)) == "a b"


def test_a_host_to_spare_takes_over_by_number() -> None:
    job, site = job_on("a:1,s:1,spare:1", ps_ranks=(1,))
    first = make_plan(job, site, site.hosts, 2)
    assert roles(first) == "a s*"
    assert roles(again(job, site, first, "a:1,spare:1", 2)) == "a spare*"


def test_a_classic_cluster_is_started_again_with_what_is_left() -> None:
    job, site = job_on("a", mode="sync-ps")
    hosts, ps_ranks = hosts_and_servers(TaskHosts(workers=("a", "b", "c"), servers=("a", "s")))
    site = Resources(**{**vars(site), "hosts": tuple(hosts), "ps_ranks": ps_ranks})
    first = make_plan(job, site, site.hosts, None)
    assert roles(first) == "a a* b c s*"
    assert roles(again(job, site, first, "b:1,c:1,s:1", 5)) == "b c s*"


def told(job: Job, site: Resources, plan: Plan, folder: Path, **environ: str) -> str | None:
    command = make_command(job, site, plan, environ, folder / "hosts")
    return command.environ.get("HVDTRAIN_PS_RANKS")


def test_the_ranks_are_told_what_was_decided(tmp_path: Path) -> None:
    job, site = job_on("a,b,c,s", ps_ranks=(3,))
    first = make_plan(job, site, site.hosts, None)
    then = again(job, site, first, "a,c,s", 4)
    assert told(job, site, first, tmp_path, HVDTRAIN_PS_RANKS="3") == "3"
    assert told(job, site, then, tmp_path, HVDTRAIN_PS_RANKS="3") == "2"
    job, site = job_on("a,b,c", num_ps=2)
    assert told(job, site, make_plan(job, site, site.hosts, None), tmp_path) == "1,2"
    job, site = job_on("a,b,c", mode="allreduce", ps_ranks=(2,))
    assert told(job, site, make_plan(job, site, site.hosts, None), tmp_path) is None
