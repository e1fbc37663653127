"""Commands of mpirun and srun, and the environment of ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from hvdtrain.cluster.hosts import parse_hosts
from hvdtrain.cluster.placement import place
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import (
    Command,
    Plan,
    forwarded,
    hides_information,
    hostfile_text,
    is_information,
    mpirun_command,
    rank_environment,
    srun_command,
)
from hvdtrain.launch.starters import Family, Mpirun, Srun

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
    oversubscribed: bool = False,
    mpirun: str = "/mpi/bin/mpirun",
    **environ: str,
) -> Command:
    return mpirun_command(
        plan(hosts, oversubscribed=oversubscribed),
        Mpirun(path=Path(mpirun), family=family),
        environ,
        names=names,
        as_root=root,
        hostfile=HOSTFILE,
    )


def openmpi_argv(mca: str, *where: str) -> tuple[str, ...]:
    """What is the same on one host and on several."""
    return (
        *(mca, "ras", "^slurm,tm,pbs,lsf,gridengine", mca, "plm", "^slurm,tm,lsf"),
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", *where, *PROGRAM),
    )


MCA = {"openmpi4": "--mca", "openmpi5": "--prtemca"}


@pytest.mark.parametrize("family", MCA)
def test_openmpi_on_this_host(family: Family) -> None:
    assert command(family, "localhost:3", names=("PATH",), HOME="/home/me") == Command(
        argv=("/mpi/bin/mpirun", "-np", "3", *openmpi_argv(MCA[family])),
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
        argv=("/mpi/bin/mpirun", "-np", "3", *openmpi_argv(MCA[family], *where)),
        environ={"DATA": "/d"},
    )


SSH = ("-p", "2222", "-i", "/key")
SSH_WORDS = "-p 2222 -i /key"


def with_more(family: Family, hosts: str, **environ: str) -> Command:
    return mpirun_command(
        plan(hosts),
        Mpirun(path=Path("/mpi/bin/mpirun"), family=family),
        {"HOME": "/home/me", **environ},
        names=(),
        as_root=False,
        hostfile=HOSTFILE,
        ssh=SSH,
        more=("--mca", "a", "b c"),
    )


@pytest.mark.parametrize(
    ("family", "way"),
    [("openmpi4", ("--mca", "plm_rsh_args")), ("openmpi5", ("--prtemca", "plm_ssh_args"))],
)
def test_openmpi_is_told_options_of_ssh_and_more_words(
    family: Family, way: tuple[str, str]
) -> None:
    more = ("--mca", "a", "b c")
    where = ("--prefix", "/mpi", "-H", "node1:2,node2:1", *way, SSH_WORDS, *more)
    argv = ("/mpi/bin/mpirun", "-np", "3", *openmpi_argv(MCA[family], *where))
    assert with_more(family, "node1:2,node2:1") == Command(argv=argv, environ={"HOME": "/home/me"})
    # No ssh is needed for this host.
    argv = ("/mpi/bin/mpirun", "-np", "2", *openmpi_argv(MCA[family], *more))
    assert with_more(family, "localhost:2").argv == argv


def test_hydra_is_told_them_too() -> None:
    told = with_more("hydra", "node1:2,node2:1")
    assert told.argv[-len(PROGRAM) - 3 :] == ("--mca", "a", "b c", *PROGRAM)
    assert told.environ == {
        "HOME": "/home/me",
        "HYDRA_LAUNCHER_EXTRA_ARGS": SSH_WORDS,
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": SSH_WORDS,
    }
    # The user's own stay. Of two users or ports ssh takes the first.
    told = with_more("hydra", "node1:2,node2:1", HYDRA_LAUNCHER_EXTRA_ARGS="-q -p 22")
    assert told.environ["HYDRA_LAUNCHER_EXTRA_ARGS"] == f"{SSH_WORDS} -q -p 22"


def test_openmpi_5_lets_ranks_go_on_without_one() -> None:
    argv = mpirun_command(
        plan(elastic=True),
        Mpirun(path=Path("/mpi/bin/mpirun"), family="openmpi5"),
        {},
        names=(),
        as_root=False,
        hostfile=HOSTFILE,
    ).argv
    elastic = ("--with-ft", "ulfm")
    assert argv == ("/mpi/bin/mpirun", "-np", "2", *elastic, *openmpi_argv("--prtemca"))


def test_hydra_on_this_host() -> None:
    where = ("-rmk", "user", "-launcher", "fork", "-hosts", "localhost")
    assert command("hydra", names=("PATH",), root=True, oversubscribed=True, A="b") == Command(
        argv=("/mpi/bin/mpirun", "-np", "2", *where, *PROGRAM), environ={"A": "b"}
    )


def test_hydra_on_several_hosts() -> None:
    where = ("-rmk", "user", "-launcher", "ssh", "-hosts", "node1:2,node2:1", "-genvall")
    assert command("hydra", "node1:2,node2:1", names=("DATA",), DATA="/d") == Command(
        argv=("/mpi/bin/mpirun", "-np", "3", *where, *PROGRAM), environ={"DATA": "/d"}
    )


@pytest.mark.parametrize("hosts", ["localhost:2", "node1:2,node2"])
def test_the_systems_openmpi_is_in_the_right_folder_anyway(hosts: str) -> None:
    argv = command("openmpi4", hosts, mpirun="/usr/bin/mpirun").argv
    assert "--noprefix" in argv
    assert "--prefix" not in argv


def test_openmpi_5_reads_addresses_with_colons_from_a_file() -> None:
    where = ("--prefix", "/mpi", "--hostfile", str(HOSTFILE))
    hosts = "[fd00::1]:2,node2"
    argv = ("/mpi/bin/mpirun", "-np", "3", *openmpi_argv("--prtemca", *where))
    assert command("openmpi5", hosts).argv == argv
    assert hostfile_text(plan(hosts)) == "fd00::1 slots=2\nnode2 slots=1\n"


@pytest.mark.parametrize("family", ["openmpi4", "hydra"])
def test_others_do_not_read_them(family: Family) -> None:
    """Neither in brackets nor without, in an argument or in a file."""
    with pytest.raises(ConfigurationError, match=r"fd00::1 .*IPv6.*name in /etc/hosts"):
        command(family, "[fd00::1]:2,node2")


def test_the_users_own_settings_stay() -> None:
    mine = {
        "OMPI_MCA_btl": "self,ofi",
        "OMPI_MCA_pml": "ucx",
        "OMPI_MCA_osc": "",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "OMPI_ALLOW_RUN_AS_ROOT": "0",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "0",
    }
    assert command("openmpi5", root=True, oversubscribed=True, **mine).environ == mine


def test_ranks_that_share_cores_yield() -> None:
    """Busy ranks would starve the others."""
    assert command("openmpi4", oversubscribed=True).environ["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert "OMPI_MCA_mpi_yield_when_idle" not in command("openmpi4").environ


def test_root_is_allowed_where_it_is_root() -> None:
    assert command("openmpi5", "node1,node2", root=True).environ == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    assert command("openmpi5", "node1,node2").environ == {}


def test_srun() -> None:
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
def test_no_value_is_in_argv_where_others_read_it(family: Family, hosts: str) -> None:
    environ = rank_environment({"TOKEN": SECRET, "HVDTRAIN_JOB": SECRET}, [Path("/venv/bin")])
    started = command(family, hosts, names=forwarded(environ, ["TOKEN"]), **environ)
    assert SECRET not in " ".join(started.argv)
    assert started.environ["TOKEN"] == started.environ["HVDTRAIN_JOB"] == SECRET


def test_without_whom_nothing_goes_on() -> None:
    hosts = parse_hosts("a:4")
    plain = Plan(places=tuple(place(hosts, 4)), program=PROGRAM, local=False)
    assert plain.critical == {}
    served = dataclasses.replace(plain, places=tuple(place(hosts, 4, servers=(2,))))
    assert served.critical == {0: "the chief", 2: "a parameter server"}


TO_STDERR = "are written to STDERR"
FOLDERS = [Path("/venv/bin"), Path("/mpi/bin")]


def test_ranks_find_python_and_mpi_first() -> None:
    assert rank_environment({"PATH": "/usr/bin:/bin", "HOME": "/home/me"}, FOLDERS) == {
        "HOME": "/home/me",
        "I_MPI_PIN": "0",
        "PATH": "/venv/bin:/mpi/bin:/usr/bin:/bin",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/usr/bin::/venv/bin:/usr/bin:", "/venv/bin:/mpi/bin:/usr/bin"),
        ("", "/venv/bin:/mpi/bin"),
        (None, f"/venv/bin:/mpi/bin:{os.defpath}"),
    ],
)
def test_path_names_no_folder_twice(given: str | None, path: str) -> None:
    environ = {} if given is None else {"PATH": given}
    assert rank_environment(environ, FOLDERS)["PATH"] == path


def test_the_users_own_variables_win() -> None:
    mine = {
        "PYTHONUNBUFFERED": "",
        "PYTHONFAULTHANDLER": "0",
        "I_MPI_PIN": "1",
        "TF_CPP_MIN_LOG_LEVEL": "0",
    }
    made = rank_environment(mine, [])
    assert {name: made[name] for name in mine} == mine


def test_what_is_forwarded() -> None:
    names = [
        *("CONDA_PREFIX", "CUDA_VISIBLE_DEVICES", "HVDTRAIN_LAUNCHER", "KERAS_BACKEND"),
        *("LD_LIBRARY_PATH", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "PYTHON", "PYTHONPATH"),
        *("TF_CPP_MIN_LOG_LEVEL", "VIRTUAL_ENV", "XLA_FLAGS"),
    ]
    stay = ["HOME", "HOSTNAME", "MANPATH", "MYPATH", "SLURM_JOB_ID", "PATHS", "AWS_SECRET_KEY"]
    environ = dict.fromkeys([*reversed(names), *stay], "x")
    assert forwarded(environ) == tuple(names)


def test_extra_names_are_forwarded_once() -> None:
    environ = {"PATH": "x", "HOME": "x"}
    assert forwarded(environ, ["HOME", "PATH", "HOME"]) == ("PATH", "HOME")


@pytest.mark.parametrize(
    ("level", "hidden"),
    [(None, True), ("1", True), ("3", True), ("0", False), ("", False), ("x", False)],
)
def test_who_asks_for_information_gets_it(level: str | None, hidden: bool) -> None:
    environ = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    assert hides_information(environ) is hidden


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("I0000 00:00:1795552261.046417   17820 port.cc:153] oneDNN is on", True),
        (f"WARNING: All log messages before absl::InitializeLog() is called {TO_STDERR}", True),
        ("W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] Cannot dlopen", False),
        # The program's own, through absl-py.
        ("I1124 20:29:51.046417 140 train.py:12] epoch 3", False),
        ("", False),
    ],
)
def test_information_that_can_not_be_turned_off(line: str, is_one: bool) -> None:
    assert is_information(line) is is_one
