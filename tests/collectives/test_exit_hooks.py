"""The end of processes: mpirun's exit code, the ranks' error messages, and the time they take."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from tests.harness.jobs import Completed

# Like hvdtrain.init(), but without importing TensorFlow.
START = """
import os, sys, time
import numpy as np
from hvdtrain.cluster.topology import read_topology
from hvdtrain.collectives import create, exit_hooks
from hvdtrain.config import read_settings
from hvdtrain.log import configure_log

configure_log("info")
engine = create(read_topology(os.environ), read_settings(os.environ))
exit_hooks.install(engine)
rank = engine.rank
"""

# Busy or hung ranks would sleep longer.
LIMIT_S = 35.0
ENGINES = ["mpi", "shared_memory"]


def _script(body: str) -> str:
    return START + textwrap.dedent(body)


def _errors(done: Completed) -> dict[int, str]:
    """Return the error of each failed rank."""
    lines = re.findall(r"^hvdtrain: rank (\d+) of \d+ ((?:failed|stops): .*)$", done.stderr, re.M)
    return {int(rank): text for rank, text in lines}


@pytest.mark.parametrize("engine", ENGINES)
def test_exception_on_one_rank(launch, engine: str) -> None:
    """All ranks print the cause and the line of the user's program."""
    body = """
        engine.barrier()
        if rank == 2:
            open("/no/such/file")
        engine.allreduce(np.ones(3), name="gradients")
        print("not reached")
    """
    done = launch(3, _script(body), env={"HVDTRAIN_COLLECTIVES": engine})
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    assert done.stdout == ""
    errors = _errors(done)
    cause = "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    assert errors[2] == f"failed: {cause}"
    for rank in (0, 1):
        assert errors[rank].startswith(f"stops: rank 2 failed: {cause} (")
        assert re.search(r"script\.py:16\)\. Rank \d was waiting", errors[rank])
        assert "in allreduce(gradients)" in errors[rank]


def test_wrong_argument_on_one_rank(launch) -> None:
    """The other ranks print the line of the user's program, not one in hvdtrain."""
    body = """
        engine.allreduce(np.ones(3), "sum" if rank else "mean")
    """
    done = launch(2, _script(body))
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    errors = _errors(done)
    assert errors[0].startswith("failed: ConfigurationError: op must be")
    assert "script.py:14)" in errors[1]


def test_exception_while_others_are_busy(launch) -> None:
    body = """
        if rank == 0:
            raise KeyboardInterrupt
        time.sleep(60)
    """
    done = launch(2, _script(body))
    assert done.returncode != 0
    assert done.seconds < LIMIT_S
    assert _errors(done)[0].startswith("failed: KeyboardInterrupt")


@pytest.mark.parametrize(("code", "returncode"), [(7, 7), (0, 1)])
def test_one_rank_exits_early(launch, code: int, returncode: int) -> None:
    body = f"""
        if rank == 1:
            sys.exit({code})
        engine.barrier(name="epoch")
    """
    done = launch(2, _script(body))
    assert done.returncode == returncode
    assert done.seconds < LIMIT_S
    assert _errors(done) == {
        0: "stops: rank 1 ended its program while rank 0 waits for it in barrier(epoch). Every "
        "rank must make the same calls; look for an early exit, or for a step that only some "
        "ranks take."
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_exit_code_while_others_are_busy(launch, rank: int) -> None:
    body = f"""
        engine.barrier()
        if rank == {rank}:
            sys.exit(7)
        time.sleep(60)
    """
    done = launch(2, _script(body))
    assert done.returncode == 7
    assert done.seconds < LIMIT_S
    assert (
        f"hvdtrain: rank {rank} of 2 ends with exit code 7 before rank {1 - rank} has ended\n"
        in done.stderr
    )


def test_an_exit_code_ends_an_elastic_job(elastic) -> None:
    body = """
        engine.barrier()
        if rank == 1:
            sys.exit(7)
        time.sleep(60)
    """
    done = elastic(_script(body))
    assert done.returncode == 7
    assert "rank 1 on " in done.stderr.partition(" failed first: exit code 7")[0].splitlines()[-1]


def test_a_forked_child_exits_without_hooks(launch) -> None:
    body = """
        engine.barrier()
        if rank == 1:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        engine.barrier()
    """
    done = launch(2, _script(body))
    assert (done.returncode, done.stderr) == (0, "")


def test_exit_code_at_the_end(launch) -> None:
    done = launch(2, _script("engine.barrier(); sys.exit(3 * rank)"))
    assert done.returncode == 3
    assert _errors(done) == {}


def test_a_rank_that_catches_an_error_of_all_ranks(launch) -> None:
    body = """
        try:
            engine.allreduce(np.ones(3 + rank))
        except Exception as error:
            print(type(error).__name__)
            if rank == 1:
                raise
        engine.barrier()
        print("not reached")
    """
    done = launch(2, _script(body))
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    assert done.stdout.split() == ["MismatchError"] * 2
    assert set(_errors(done)) == {0, 1}


CLEAN = {
    "at-once": "engine.allreduce(np.ones(3))",
    "without-a-collective": "",
    "later-than-the-timeout": "engine.barrier(); time.sleep(7 * (rank == 0))",
    "explicit-exit": "engine.barrier(); sys.exit(0)",
    "closed": "engine.barrier(); engine.close()",
}


@pytest.mark.parametrize("body", CLEAN.values(), ids=CLEAN)
def test_successful_end(launch, body: str) -> None:
    env = {"HVDTRAIN_TIMEOUT_S": "5"}
    done = launch(2, _script(body + "\nprint(f'end of {rank}')"), env=env)
    if "sys.exit" not in body:
        assert sorted(done.stdout.splitlines()) == ["end of 0", "end of 1"], done
    assert done.returncode == 0, done
    notice = "hvdtrain: rank 1 has ended its program and waits for rank 0\n"
    assert done.stderr == (notice if "7 * (rank == 0)" in body else ""), done


@pytest.mark.parametrize("end", ["", "engine.close()"], ids=["exit", "close"])
def test_operations_of_another_thread_end_first(launch, end: str) -> None:
    """JAX runs the collectives of compiled functions in its own threads."""
    body = f"""
        import threading

        def step():
            time.sleep(0.5 + rank)
            engine.allreduce(np.ones(3))
            print("step", flush=True)

        def wait():
            if threading.current_thread() is not thread:
                thread.join()

        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        engine.before_operation = wait
        {end}
    """
    done = launch(2, _script(body))
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["step"] * 2, "")


def test_failure_after_shutdown_and_init(launch) -> None:
    """The failure is reported once, to the ranks of the new engine."""
    body = """
        engine.barrier()
        engine.close()
        engine = create(read_topology(os.environ), read_settings(os.environ))
        exit_hooks.install(engine)
        if rank == 1:
            raise ValueError("after all")
        engine.barrier()
    """
    done = launch(2, _script(body))
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    assert _errors(done)[1] == "failed: ValueError: after all"
    assert _errors(done)[0].startswith("stops: rank 1 failed: ValueError: after all (")
    assert done.stderr.count("hvdtrain: rank 1 of 2") == 1


PROGRAM = """
import atexit, sys
from hvdtrain.collectives.exit_hooks import ExitCodeWatch
before = sys.exit
watch = ExitCodeWatch()
def report():
    watch.close()
    assert before == sys.exit
    print(watch.code)
atexit.register(report)
"""

# The end of a program, and its exit code.
ENDS = {
    "none": ("", 0),
    "exit": ("sys.exit(7)", 7),
    "exit-with-nothing": ("sys.exit()", 0),
    "exit-with-text": ("sys.exit('no data')", 1),
    "exit-with-a-large-number": ("sys.exit(-1)", 255),
    "exception-class": ("raise SystemExit", 0),
    "within-a-function": ("def main():\n    sys.exit(7)\nmain()", 7),
    "after-others": ("try: sys.exit(7)\nfinally: sys.exit(8)", 8),
    "caught": ("try: sys.exit(7)\nexcept SystemExit as end: assert end.code == 7", 0),
    "caught-with-the-class": ("try: raise SystemExit(7)\nexcept SystemExit as e: e.code", 0),
    "arguments": ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2),
    "in-a-thread": ("import threading; threading.Thread(target=sys.exit, args=[7]).start()", 0),
    "changed": ("try: sys.exit(7)\nexcept SystemExit as end: end.code = 8; raise", 8),
    "pickled": (
        "import pickle\ntry: sys.exit(7)\n"
        "except SystemExit as end: assert pickle.loads(pickle.dumps(end)).code == 7",
        0,
    ),
}


@pytest.mark.parametrize(("body", "code"), ENDS.values(), ids=ENDS)
def test_the_watch_records_exit_codes(body: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + body],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, f"{code}\n")
