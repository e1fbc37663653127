"""``hvdtrain run`` on this host with the real mpirun: output, failures and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.agent.cgroups import ENTER, FILL
from tests.harness.jobs import REPOSITORY
from tests.launch.jobs import COLLAPSING, FAULTS, HVDTRAIN, OWN_DEFAULTS, StartedJob, program

pytestmark = pytest.mark.mpi


@pytest.fixture
def hvdtrain_run(run_command):
    """Return a function that runs Python code on all ranks, with the rank in ``rank``."""

    def run(
        *arguments: str,
        body: str,
        env: dict[str, str | None] | None = None,
        python: Sequence[str] = ("python",),
        **options,
    ):
        env = {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY), **(env or {})}
        argv = [*HVDTRAIN, *arguments, "--", *program(body, python)]
        return run_command(argv, env=env, **options)

    return run


@pytest.mark.parametrize("ranks", [2, 5])
def test_ranks_share_the_cores(hvdtrain_run, ranks: int) -> None:
    done = hvdtrain_run(
        *("-np", str(ranks)),
        body="""
        threads = os.environ["TF_NUM_INTRAOP_THREADS"]
        print("seen", rank, sorted(os.sched_getaffinity(0)), threads, sep=":")
        """,
    )
    assert done.returncode == 0, done
    cores = sorted(os.sched_getaffinity(0))
    seen = sorted(line.split(":")[1:] for line in done.stdout.splitlines())
    assert [rank for rank, _, _ in seen] == [str(rank) for rank in range(ranks)]
    bound = [eval(cores_of_rank) for _, cores_of_rank, _ in seen]
    assert [str(len(own)) for own in bound] == [t for _, _, t in seen] or ranks > len(cores)
    if ranks <= len(cores):
        assert sorted(core for own in bound for core in own) == cores
    else:
        assert all(own == cores for own in bound)


def test_the_environment_of_ranks(hvdtrain_run) -> None:
    """Python's environment isn't activated in this test, and ranks are not bound."""
    variables = ("-x", "GIVEN=a b", "-x", "INHERITED")
    done = hvdtrain_run(
        *("-np", "2", "--no-bind", "--timeout-s", "7", "--share-gpus", *variables),
        body="""
        from hvdtrain.config import read_settings
        settings = read_settings(os.environ)
        print(settings.timeout_s, settings.share_gpus, settings.log_level)
        print(os.environ["GIVEN"], os.environ["INHERITED"])
        print(sys.prefix, len(os.sched_getaffinity(0)), repr(sys.stdin.read()))
        print("session", os.getsid(0), os.getpgid(0) == os.getpid())
        time.sleep(1.5 * rank)
        print("done")
        """,
        env={
            "HVDTRAIN_TIMEOUT_S": "9",
            "HVDTRAIN_LOG_LEVEL": "error",
            "INHERITED": "c",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    place = f"{sys.prefix} {len(os.sched_getaffinity(0))} ''"
    for rank in (0, 1):
        own = [line.removeprefix(f"[{rank}] ") for line in done.stdout.splitlines()]
        own = [line for line in own if not line.startswith("[")]
        assert own[:3] == ["7.0 True error", "a b c", place]
        assert own[4:] == ["done"]
    # Linux shares cores between sessions, and balances load worse between them.
    sessions = re.findall(r"session (\d+) True", done.stdout)
    assert len(sessions) == 2
    assert len(set(sessions)) == 1


def test_only_the_program_imports_modules_from_the_working_folder(
    run_command, tmp_path: Path
) -> None:
    for name in ("json", "logging", "selectors", "socket", "subprocess"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} of the user')\n")
    words = "import logging, sys; print(sys.flags.safe_path)"
    command = [sys.executable, "-P", "-m", "hvdtrain", "run", "-np", "1", "--chief-only", "--"]
    env = {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY)}
    done = run_command([*command, "python", "-c", words], env=env)
    assert (done.returncode, done.stdout) == (0, "logging of the user\nFalse\n"), done


def test_settings_give_ranks_their_roles(hvdtrain_run) -> None:
    """The hosts of the tasks decide which ranks are servers."""
    tasks = {"worker": ["localhost:2222", "localhost"], "ps": ["localhost:2224"]}
    done = hvdtrain_run(
        *("--mode", "sync-ps", "--backup-workers", "1"),
        body="""
        from hvdtrain.cluster.roles import assign_roles
        from hvdtrain.config import read_settings
        settings = read_settings(os.environ)
        roles = assign_roles(3, settings)
        print(settings.mode, settings.backup_workers, settings.ps_ranks, roles.workers)
        print("TF_CONFIG" in os.environ)
        """,
        env={"TF_CONFIG": json.dumps({"cluster": tasks, "task": {"type": "worker", "index": 0}})},
    )
    assert done.returncode == 0, done
    assert sorted(done.stdout.splitlines()) == sorted(
        [f"[{rank}] {text}" for rank in range(3) for text in ("sync-ps 1 (2,) (0, 1)", "False")]
    )


def test_equal_lines_are_shown_once(run_command, tmp_path: Path) -> None:
    """No output is lost, even if a rank is killed in the middle of a line."""
    body = f"""
    print(f"I0000 00:00:1795552261.{{rank}}   178{{rank}} port.cc:153] oneDNN", file=sys.stderr)
    def meet(what):
        open(os.path.join({str(tmp_path)!r}, f"{{what}}-{{rank}}"), "w").close()
        while len([name for name in os.listdir({str(tmp_path)!r}) if what in name]) < 3:
            time.sleep(0.01)
    meet("began")
    for number in range(50):
        print(f"line {{number}}")
        print(f"own {{rank}}") if number % 10 == rank else None
        time.sleep(0.02)
    print("the end", end="")
    sys.stdout.flush()
    meet("ended")
    os.kill(os.getpid(), 9) if rank == 2 else time.sleep(60)
    """
    argv = [*COLLAPSING, "-np", "3", "--output-dir", str(tmp_path), "--", *program(body)]
    env = {**OWN_DEFAULTS, "TF_CPP_MIN_LOG_LEVEL": None, "PYTHONPATH": str(REPOSITORY)}
    done = run_command(argv, env=env)
    assert done.returncode == 137, done
    assert "oneDNN" not in done.stderr
    shown: dict[int, list[str]] = {0: [], 1: [], 2: []}
    lines = done.stdout.splitlines()
    for line in lines:
        match = re.fullmatch(r"\[(0|1|2|0,1|0,2|1,2|0-2)\] (.+)", line)
        assert match is not None, line
        tag, text = match.groups()
        for rank in range(3) if tag == "0-2" else map(int, tag.split(",")):
            shown[rank].append(text)
    assert len(lines) < 3 * 50, done
    for rank, texts in shown.items():
        written = (tmp_path / f"rank-{rank}.log").read_text().splitlines()
        assert texts[-1] == "the end"
        # Stdout and stderr are separate pipes, read in any order.
        assert sum(line.endswith("oneDNN") for line in written) == 1
        assert [line for line in written if "oneDNN" not in line] == texts


def test_a_file_for_each_rank(hvdtrain_run, tmp_path: Path) -> None:
    done = hvdtrain_run(
        *("-np", "2", "--chief-only", "--output-dir", str(tmp_path / "new" / "logs")),
        body="print('out', rank); print('err', rank, file=sys.stderr)",
    )
    assert done.returncode == 0, done
    assert (done.stdout, done.stderr) == ("out 0\n", "err 0\n")
    for rank in (0, 1):
        lines = (tmp_path / "new" / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]


# Each fault occurs once, alternately on the first and the last rank.
@pytest.mark.parametrize(
    ("fault", "failing"), [(fault, 2 * (at % 2)) for at, fault in enumerate(FAULTS)]
)
def test_the_first_failure_is_named(hvdtrain_run, request, fault: str, failing: int) -> None:
    action, code, words = FAULTS[fault]
    if fault == "out-of-memory":
        request.getfixturevalue("cgroup")
    done = hvdtrain_run(
        *("-np", "3"), body=f"time.sleep(0.3)\nif rank == {failing}: {action}\ntime.sleep(60)"
    )
    assert done.returncode == code, done
    before, named, verdict = done.stderr.rpartition("failed first")
    assert named
    assert f"rank {failing} on " in before.splitlines()[-1]
    assert words in verdict
    assert (code == 1) == ("Traceback (most recent call last):" in verdict)
    assert done.seconds < 55, "the others were stopped"
    for other in {0, 1, 2} - {failing}:
        assert f"[{other}]" not in done.stderr, "consequences are hidden"


def test_an_out_of_memory_kill_of_a_child_is_reported(hvdtrain_run, cgroup: Path) -> None:
    """The program only knows that its child was killed."""
    done = hvdtrain_run(
        *("-np", "2"),
        body=f"""
        import subprocess
        if rank == 1:
            {ENTER}
            subprocess.run([sys.executable, "-c", "{FILL}"], check=True)
        time.sleep(60)
        """,
    )
    assert done.returncode == 1, done
    assert "another process in its cgroup: out of memory (cgroup limit 64 MiB)" in done.stderr
    assert "CalledProcessError" in done.stderr


def test_a_program_that_does_not_exist(run_command) -> None:
    env = {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY)}
    done = run_command([*HVDTRAIN, "-np", "2", "--", "no-such-program"], env=env)
    assert done.returncode == 127, done
    assert "no-such-program: No such file or directory" in done.stderr


def test_the_other_ranks_are_stopped_at_once_unless_they_are_writing(
    hvdtrain_run, tmp_path: Path
) -> None:
    """The grace of ten minutes is for programs with a handler, like that of rank 3."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    done = hvdtrain_run(
        *("-np", "4", "--grace-s", "600"),
        env={"FOLDER": str(folder)},
        body="""
        import pathlib, signal
        from hvdtrain.monitor import report
        folder = pathlib.Path(os.environ["FOLDER"])
        if rank == 1:  # like Checkpoint, in a collective
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            report.saves_on_signal(True)
        elif rank == 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            report.saves_on_signal(True)
            report.writing(True)
        elif rank == 3:
            def end(*_):
                time.sleep(1)
                (folder / "handled").touch()
                sys.exit(3)
            signal.signal(signal.SIGTERM, end)
        (folder / str(rank)).touch()
        while len(os.listdir(folder)) < 4:
            time.sleep(0.01)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        elif rank == 2:
            time.sleep(2)
            (folder / "written").touch()
            report.writing(False)
        time.sleep(600)
        """,
        timeout_s=60,
    )
    assert done.returncode == 137, done
    assert "rank 0 on" in done.stderr
    assert {"handled", "written"} < set(os.listdir(folder))


def test_a_rank_that_ends_because_another_failed_is_not_named(
    hvdtrain_run, forked_python: list[str]
) -> None:
    """Rank 1 raises an exception. Rank 0 waits for rank 1, and ends earlier."""
    done = hvdtrain_run(
        *("-np", "2"),
        python=forked_python,
        body="""
        import numpy as np, hvdtrain
        from hvdtrain import world
        hvdtrain.init()
        if rank == 1:
            time.sleep(0.5)
            raise KeyError("label")
        world.collectives().allreduce(np.ones(3))
        """,
        timeout_s=90,
    )
    assert done.returncode == 1, done
    assert "rank 1 on " in done.stderr.partition("failed first")[0].splitlines()[-1]
    assert "KeyError: 'label'" in done.stderr.partition("failed first")[2]


ENGINE = """
    import time
    import numpy as np
    from hvdtrain.cluster.topology import read_topology
    from hvdtrain.collectives import create, exit_hooks
    from hvdtrain.config import read_settings
    from hvdtrain.monitor import report
    engine = create(read_topology(os.environ), read_settings(os.environ))
    exit_hooks.install(engine, report.failed)
    sys.stderr = open(os.devnull, "w")
"""


def test_a_timeout_is_recognized_without_output(hvdtrain_run) -> None:
    body = "if rank == 1: time.sleep(60)\n    engine.barrier()"
    done = hvdtrain_run("-np", "2", "--timeout-s", "2", body=f"{ENGINE}    {body}")
    assert done.returncode == 124, done
    assert "timed out waiting for other ranks; exit code 1" in done.stderr, done


WAIT = "open(os.path.join({folder!r}, str(rank)), 'w').close(); time.sleep(120)"
# Each rank has two children that ignore SIGTERM, one of them in another session.
STUBBORN = """
import subprocess, signal
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
subprocess.Popen([sys.executable, "-c", deaf])
subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(0.3)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2"])
def test_a_signal_stops_all_ranks(start_job, hangups, tmp_path: Path, name: str) -> None:
    job = start_job("-np", "2", body=WAIT.format(folder=str(tmp_path)))
    job.wait_for(2, tmp_path)
    number = getattr(signal, name)
    job.process.send_signal(number)
    output, _ = job.process.communicate(timeout=10)
    assert job.process.returncode == (75 if name == "SIGUSR2" else 128 + number)
    assert f"the job was stopped by {name}" in output
    assert job.left() == []


MPIRUN = ("mpirun", "prterun", "mpiexec.hydra")
AGENT = ("hvdtrain.agent.rank_agent",)


def victim_in(job: StartedJob, name: str) -> int:
    """Return a process of the job. An agent has two processes, and mpirun starts the first."""
    if name == "mpirun":
        return job.named(*MPIRUN)[0]
    agents = job.named(*AGENT)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().split()[3]) for pid in agents}
    inner = [pid for pid in agents if parents[pid] in agents]
    return inner[0] if name == "agent" else parents[inner[0]]


@pytest.mark.parametrize("victim", ["hvdtrain", "mpirun", "guard", "agent"])
def test_killing_a_part_leaves_no_processes(start_job, tmp_path: Path, victim: str) -> None:
    job = start_job("-np", "2", body=STUBBORN + WAIT.format(folder=str(tmp_path)))
    job.wait_for(2, tmp_path)
    if victim == "hvdtrain":
        job.process.kill()
    else:
        os.kill(victim_in(job, victim), signal.SIGKILL)
    assert job.seconds_until_nothing_is_left(10.0) < 10
    assert job.process.wait(timeout=10) != 0


def test_a_second_interrupt_kills_at_once(start_job, tmp_path: Path) -> None:
    job = start_job(
        "-np", "2", "--grace-s", "50", body=STUBBORN + WAIT.format(folder=str(tmp_path))
    )
    job.wait_for(2, tmp_path)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(timeout=10) == 130
    assert job.left() == []


def test_a_daemon_of_a_rank_ends_with_the_job(start_job) -> None:
    body = "import subprocess; subprocess.Popen(['sleep', '120'], start_new_session=True)"
    job = start_job("-np", "2", body=body)
    assert job.process.wait(timeout=20) == 0
    assert job.left() == []
