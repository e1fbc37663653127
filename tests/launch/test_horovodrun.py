"""horovodrun's flags, their parser, and ``--check-build``."""

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
from hvdtrain.errors import LaunchError
from hvdtrain.launch.cli import add_arguments
from hvdtrain.launch.commands import network_variables
from hvdtrain.launch.horovodrun import HOROVOD_FLAGS, HorovodFlag, explain_unneeded
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import Supervisor, TimeLimits
from hvdtrain.version import __version__
from tests.harness.jobs import REPOSITORY, Completed
from tests.launch.test_other_mpis import HOSTS, TALK, seen_by_ranks
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(180)]


@pytest.fixture
def command(environment: Callable[[str], Path]) -> Path:
    """Return the path of the real horovodrun. The first line of the file names its Python."""
    return environment("horovod").parent / "horovodrun"


@pytest.fixture
def horovodrun(command: Path, run_command) -> Callable[..., Completed]:
    """Return a function that runs a Python program on two ranks, with the mpirun in ``folder``."""

    def run(*arguments: str | Path, folder: Path | None = None) -> Completed:
        argv = [command, "-np", "2", *arguments]
        return run_command(argv, env=environ_with(folder), timeout_s=150)

    return run


def environ_with(folder: Path | None) -> dict[str, str | None]:
    path = os.pathsep.join([*([str(folder)] if folder else []), os.defpath])
    return {"PATH": path, "PYTHONPATH": str(REPOSITORY)}


# Open MPI 5 would take Horovod's default binding options for the program.
BINDING = "--binding-args=--bind-to none --map-by slot"


@pytest.mark.parametrize("name", ["openmpi4", "openmpi5", "intel-mpi"])
def test_horovodrun_mpi(name: str, environment, horovodrun, mpirun, tmp_path: Path) -> None:
    is_ours = name == "openmpi5"
    folder = Path(mpirun(2, [])[0]).parent if is_ours else environment(name).parent
    script = tmp_path / "talk.py"
    script.write_text(f"import os, sys\n{TALK}")
    options = ["--mpi", BINDING] if is_ours else ["--mpi"]
    done = horovodrun(*options, "python", script, folder=folder)
    assert done.returncode == 0, done
    seen = seen_by_ranks(done.stdout)
    assert [place[:5] for place in seen] == [[str(r), "2", str(r), "2", "3"] for r in range(2)]


def test_horovodrun_mpi_over_ssh(environment, command: Path, cluster: Cluster) -> None:
    folder = environment("openmpi4").parent
    (cluster.folder / "talk.py").write_text(f"import os, sys\n{TALK}")
    argv = [command, "--mpi", "-np", "3", "-H", HOSTS, "python", cluster.folder / "talk.py"]
    done = cluster.run(argv, env=environ_with(folder), timeout_s=100)
    assert done.returncode == 0, done
    seen = [place[:5] for place in seen_by_ranks(done.stdout)]
    assert seen == [["0", "3", "0", "1", "6"], ["1", "3", "0", "2", "6"], ["2", "3", "1", "2", "6"]]


def test_horovodrun_gloo_is_an_error(horovodrun, forked_python: list[str], tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text("import hvdtrain\nhvdtrain.init()\nprint('trained')\n")
    done = horovodrun("--gloo", *forked_python, script)
    assert done.returncode != 0, done
    assert "trained" not in done.stdout
    assert (
        "LaunchError: This job communicates through Horovod, which can't be imported" in done.stderr
    )
    assert "start with horovodrun --mpi, mpirun or hvdtrain run" in done.stderr


NAMES = {name: flag for flag in HOROVOD_FLAGS for name in flag.names}


def of_fate(fate: str) -> list[HorovodFlag]:
    return [flag for flag in HOROVOD_FLAGS if flag.fate == fate]


def name_of(flag: HorovodFlag) -> str:
    return flag.names[0]


@pytest.fixture
def job(started) -> Callable[..., Job]:
    """Return a function from flags of horovodrun to the job that they describe."""

    def of(*flags: str) -> Job:
        assert main(["run", *flags, "python", "train.py", "--verbose", "--gloo"]) == 0
        (result, _) = started.pop()
        assert result.program == ("python", "train.py", "--verbose", "--gloo")
        return result

    return of


def test_the_table_matches_the_real_horovodrun(environment, run_command) -> None:
    python: Path = environment("horovod")
    script = REPOSITORY / "tests" / "launch" / "horovod_parser.py"
    done = run_command([python, script], timeout_s=60)
    assert done.returncode == 0, done
    real = json.loads(done.stdout)
    assert {name: flag.values for name, flag in NAMES.items()} == real


def test_the_parser_takes_the_numbers_of_values_in_the_table() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for name, flag in NAMES.items():
        action = parser._option_string_actions[name]
        assert (1 if action.nargs is None else action.nargs) == flag.values, name


def test_help_omits_horovods_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in HOROVOD_FLAGS:
        if flag.fate != "same" or flag.declared:
            for name in flag.names:
                assert f"  {name} " not in shown
    assert "docs/horovodrun.md" in shown


@pytest.mark.parametrize("flag", of_fate("unneeded"), ids=name_of)
def test_an_unneeded_flag_is_explained(
    flag: HorovodFlag, job, capsys: pytest.CaptureFixture[str]
) -> None:
    default = job("-np", "2")
    capsys.readouterr()
    for name in flag.names:
        assert job("-np", "2", name, *["1"] * flag.values) == default
        assert capsys.readouterr().err == f"hvdtrain run: {name}: {flag.reason}\n"


@pytest.mark.parametrize("flag", of_fate("refused"), ids=name_of)
def test_an_unsupported_flag_is_refused(
    flag: HorovodFlag, started, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in flag.names:
        assert main(["run", "-np", "2", name, *["1"] * flag.values, "true"]) == 2
        message = capsys.readouterr().err
        assert f"argument {name}: {flag.reason.format(*['1'] * flag.values)}" in message
        assert "Leave this flag out" in message or "Name the current hosts" in message
    assert not started


def test_flags_with_one_reason_share_a_line(job, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cycle-time-ms=5", "--mpi", "--autotune", "--stall-check", "--cycle-time-ms", "6"]
    job("-np", "2", *flags)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "--cycle-time-ms, --autotune",
        "--stall-check",
    ]
    assert explain_unneeded([]) == []


EQUIVALENTS = {
    "--start-timeout": (["30"], "--start-timeout-s", "30"),
    "--output-filename": (["logs"], "--output-dir", "logs"),
    "--min-num-proc": (["2"], "--min-np", "2"),
    "--reset-limit": (["3"], "--max-restarts", "3"),
    "--no-stall-check": ([], "--hang-timeout-s", "0"),
    "--stall-check-shutdown-time-seconds": (["90"], "--hang-timeout-s", "90"),
    "-hostfile": (["hosts"], "--hostfile", "hosts"),
}


def test_all_equivalents_are_listed() -> None:
    assert set(EQUIVALENTS) == {name for flag in of_fate("becomes") for name in flag.names}


@pytest.mark.parametrize("name", EQUIVALENTS)
def test_an_equivalent_flag_does_the_same(
    name: str, job, capsys: pytest.CaptureFixture[str]
) -> None:
    values, own, value = EQUIVALENTS[name]
    default, given = job("-np", "4"), job("-np", "4", name, *values)
    assert given == job("-np", "4", own, value)
    assert given != default
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "options", [("-hostfile", "f", "-H", "a:2"), ("-H", "a:2", "-hostfile", "f")]
)
def test_flags_exclude_the_same_flags_as_their_equivalents(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, "--dry-run", "true"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err


def test_the_last_flag_wins(job) -> None:
    assert job("--start-timeout", "7", "--start-timeout-s", "8").time_limits.start_s == 8
    assert job("--start-timeout-s", "8", "--start-timeout", "7").time_limits.start_s == 7


def test_an_invalid_value_names_the_equivalent_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--start-timeout", "soon", "true"]) == 2
    assert "--start-timeout-s: got 'soon': expected a number, 0 or more" in capsys.readouterr().err


def test_horovods_default_does_not_disable_hang_detection(
    job, capsys: pytest.CaptureFixture[str]
) -> None:
    given = job("--stall-check-shutdown-time-seconds", "0")
    assert given.time_limits == TimeLimits(start_s=120, grace_s=5, preempt_grace_s=60, hang_s=540)
    ignored = (
        "--stall-check-shutdown-time-seconds: the value 0, which is Horovod's default, is ignored"
    )
    assert ignored in capsys.readouterr().err


def test_flags_of_the_same_name(job) -> None:
    given = job("-p", "2222", "-i", "key", "--mpi-args=--mca a 'b c'", "-prefix-timestamp")
    assert given.ssh == ("-p", "2222", "-i", "key")
    assert given.mpi_args == ("--mca", "a", "b c")
    assert given.timestamps
    assert job("--ssh-identity-file=~/key").ssh == ("-i", os.path.expanduser("~/key"))
    assert job("--verbose", "-np", "2", "--log-level", "FATAL").settings.log_level == "error"
    assert job("--verbose").verbose
    assert not job().verbose


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-p", "0"], "expected a number from 1 to 65535, got '0'"),
        (["--ssh-port", "ssh"], "65535, got 'ssh'"),
        (["-i", "my key"], "expected a path without spaces, got 'my key'"),
        (["--mpi-args='"], "No closing quotation"),
        (["--network-interfaces", "eth0,"], "expected names like eth0,eth1, got 'eth0,'"),
        (["--log-level", "LOUD"], "got 'LOUD': expected one of debug, info"),
    ],
)
def test_values_are_checked(
    flags: list[str], message: str, started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-np", "2", *flags, "true"]) == 2
    assert message in capsys.readouterr().err
    assert not started


def test_interfaces_and_tcp_become_variables_of_the_ranks(started) -> None:
    interfaces = ["--network-interface", "eth0", "--network-interfaces", "eth1,eth0"]
    assert main(["run", "-np", "2", "--tcp", *interfaces, "true"]) == 0
    environ = started[0][1]
    assert environ["OMPI_MCA_btl_tcp_if_include"] == "eth0,eth1"
    assert environ["NCCL_SOCKET_IFNAME"] == "eth0,eth1"
    assert (environ["NCCL_IB_DISABLE"], environ["OMPI_MCA_pml"]) == ("1", "ob1")
    assert network_variables([], over_tcp=False) == {}


def test_a_dry_run_shows_variables_for_interfaces_and_tcp(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["-p", "2222", "-i", "key", "--network-interface=eth0", "--mpi-args=--mca a b"]
    argv = ["run", "-np", "2", "-H", "a:1,b:1", *flags, "--dry-run", "python", "-v", "train.py"]
    assert main(argv) == 0
    _, command, names = capsys.readouterr().out.split("\n\n")
    assert "'-p 2222 -i key' --mca a b " in command
    assert command.endswith(" python -v train.py")
    assert "NCCL_SOCKET_IFNAME" in names


def test_verbose_prints_the_plan_before_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(supervisor: Supervisor) -> None:
        raise LaunchError("not here")

    monkeypatch.setattr(Supervisor, "run", start)
    assert main(["run", "-np", "1", "--verbose", "-prefix-timestamp", "true"]) == 125
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert lines[-1].endswith(" hvdtrain run: error: not here")
    for line in lines:
        assert re.match(r"20\d\d-\d\d-\d\d [\d:]{8} hvdtrain run: ", line)
    assert sum("-np 1 " in line for line in lines) == 1
    assert captured.out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-v"]) == 0
    assert capsys.readouterr().out.startswith("hvdtrain ")


VERSIONS = {"torch": "2.13.0", "keras": "3.15.1", "mpi4py": "4.1.2"}

COMPLETE = """\
hvdtrain v0.1.0:

Available Frameworks:
    [ ] TensorFlow
    [X] PyTorch (2.13.0)
    [ ] JAX
    [X] Keras (3.15.1)

Available Controllers:
    [X] MPI (MPIRUN; mpi4py 4.1.2)

Available Tensor Operations:
    [ ] NCCL (part of TensorFlow's GPU build)
    [X] MPI
    [X] shared memory

To test that all of it works together: hvdtrain check
"""

INCOMPLETE = """\
hvdtrain v0.1.0:

Available Frameworks:
    [ ] TensorFlow
    [ ] PyTorch
    [ ] JAX
    [ ] Keras

Available Controllers:
    [ ] MPI (no mpirun; no mpi4py)

Available Tensor Operations:
    [ ] NCCL (part of TensorFlow's GPU build)
    [ ] MPI
    [ ] shared memory

Missing:
    TensorFlow: python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")
    Keras: python -m pip install keras
    mpi4py: python -m pip install mpi4py
"""


@pytest.mark.parametrize(("versions", "expected"), [(VERSIONS, COMPLETE), ({}, INCOMPLETE)])
def test_check_build(
    versions: dict[str, str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    versions = {"hvdtrain": "0.1.0", **versions}
    monkeypatch.setattr("hvdtrain.remote.host_probe.installed_versions", lambda: versions)
    if expected == INCOMPLETE:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--check-build"]) == 0
    shown = re.sub(r"Open MPI 5[^;]*", "MPIRUN", capsys.readouterr().out)
    assert shown.partition("    MPI: ")[0] == expected


def test_check_build_describes_this_environment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-cb"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"hvdtrain v{__version__}:\n")
    assert "[X] Keras (3." in shown
