"""How processes end: what mpirun returns, what each rank says, and how long it takes."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from tests.harness.jobs import Completed

# As hvdtrain.init() does it, without TensorFlow, which takes seconds to import.
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

# A job that ends by itself; ranks that are busy or hang would sleep for longer.
LIMIT_S = 35.0
ENGINES = ["mpi", "shared_memory"]


def _script(body: str) -> str:
    return START + textwrap.dedent(body)


def _said(done: Completed) -> dict[int, str]:
    """The line with which each failed rank took its leave."""
    lines = re.findall(r"^hvdtrain: rank (\d+) of \d+ ((?:failed|stops): .*)$", done.stderr, re.M)
    return {int(rank): text for rank, text in lines}


@pytest.mark.parametrize("engine", ENGINES)
def test_different_calls(launch, engine: str) -> None:
    body = """
        engine.allreduce(np.ones(3), name="first")
        if rank == 1:
            engine.barrier(name="epoch")
        else:
            engine.allreduce(np.ones(300_000, np.float32), name="gradients")
        print("not reached")
    """
    done = launch(3, _script(body), env={"HVDTRAIN_COLLECTIVES": engine})
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    assert done.stdout == ""
    said = _said(done)
    assert sorted(said) == [0, 1, 2]
    for text in said.values():
        assert text.startswith("failed: MismatchError: Ranks made different calls")
        assert "rank 0, 2: allreduce(gradients) of sum, float32, ((300000,),); rank 1: " in text
        assert "rank 1: barrier(epoch)." in text


@pytest.mark.parametrize("engine", ENGINES)
def test_exception_on_one_rank(launch, engine: str) -> None:
    """The cause is on every rank's lips, with the line of the user's program."""
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
    said = _said(done)
    cause = "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    assert said[2] == f"failed: {cause}"
    for rank in (0, 1):
        assert said[rank].startswith(f"stops: rank 2 failed: {cause} (")
        assert re.search(r"script\.py:16\)\. Rank \d was waiting", said[rank])
        assert "in allreduce(gradients)" in said[rank]


def test_wrong_argument_on_one_rank(launch) -> None:
    """The place that the others name is the user's line, not one inside hvdtrain."""
    body = """
        engine.allreduce(np.ones(3), "sum" if rank else "mean")
    """
    done = launch(2, _script(body))
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    said = _said(done)
    assert said[0].startswith("failed: ConfigurationError: op must be")
    assert "script.py:14)" in said[1]


def test_exception_while_others_are_busy(launch) -> None:
    body = """
        if rank == 0:
            raise KeyboardInterrupt
        time.sleep(60)
    """
    done = launch(2, _script(body))
    assert done.returncode != 0
    assert done.seconds < LIMIT_S
    assert _said(done)[0].startswith("failed: KeyboardInterrupt")


def test_exit_code_of_one_rank(launch) -> None:
    body = """
        if rank == 1:
            sys.exit(7)
        engine.barrier(name="epoch")
    """
    done = launch(2, _script(body))
    assert done.returncode == 7
    assert done.seconds < LIMIT_S
    assert _said(done) == {
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
        f"hvdtrain: rank {rank} of 2 ends with exit code 7, before rank {1 - rank}\n" in done.stderr
    )


def test_exit_code_where_a_loss_is_survived(elastic) -> None:
    """It is none, and ends the others, which would otherwise go on without the rank."""
    body = """
        engine.barrier()
        if rank == 1:
            sys.exit(7)
        time.sleep(60)
    """
    done = elastic(_script(body))
    assert done.returncode == 7
    assert "rank 1 on " in done.stderr.partition(" failed first: exit code 7")[0].splitlines()[-1]


def test_end_of_a_forked_child(launch) -> None:
    """It is not the end of the rank, whatever its exit code is."""
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


def test_early_end_of_one_rank(launch) -> None:
    """Exit code 0 on one rank is no success when the others still need it."""
    body = """
        if rank == 2:
            sys.exit()
        engine.allreduce(np.ones(5))
    """
    done = launch(3, _script(body))
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    assert "rank 2 ended its program" in done.stderr
    assert set(_said(done)) == {0, 1}


def test_exit_code_at_the_end(launch) -> None:
    """Nobody waits any more; the code still counts."""
    done = launch(2, _script("engine.barrier(); sys.exit(3 * rank)"))
    assert done.returncode == 3
    assert _said(done) == {}


def test_killed_rank(launch) -> None:
    body = """
        if rank == 1:
            os.kill(os.getpid(), 9)
        engine.barrier()
    """
    done = launch(2, _script(body))
    assert done.returncode == 128 + 9
    assert done.seconds < LIMIT_S


def test_hung_rank(launch) -> None:
    body = """
        if rank == 1:
            time.sleep(60)
        engine.barrier(name="epoch")
    """
    done = launch(3, _script(body), env={"HVDTRAIN_TIMEOUT_S": "4"})
    assert done.returncode == 1
    assert done.seconds < LIMIT_S
    said = _said(done)
    assert set(said) == {0, 2}
    for rank, text in said.items():
        assert f"rank {rank} waited 4 s in barrier(epoch)" in text or text.startswith("stops")
        assert "CollectiveTimeoutError" in text
        assert "rank 1 waits in no collective" in text


def test_an_error_of_all_ranks_that_one_caught(launch) -> None:
    """It may go on, and needs the other, which has ended."""
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
    assert set(_said(done)) == {0, 1}


CLEAN = {
    "at-once": "engine.allreduce(np.ones(3))",
    "without-a-collective": "",
    "one-after-another": "engine.barrier(); time.sleep(rank)",
    "later-than-the-timeout": "engine.barrier(); time.sleep(7 * (rank == 0))",
    "explicit-exit": "engine.barrier(); sys.exit(0)",
    "closed": "engine.barrier(); engine.close()",
}


@pytest.mark.parametrize("body", CLEAN.values(), ids=CLEAN)
def test_clean_end(launch, body: str) -> None:
    env = {"HVDTRAIN_TIMEOUT_S": "5"}
    done = launch(2, _script(body + "\nprint(f'end of {rank}')"), env=env)
    if "sys.exit" not in body:
        assert sorted(done.stdout.splitlines()) == ["end of 0", "end of 1"], done
    assert done.returncode == 0, done
    notice = "hvdtrain: rank 1 has ended its program and waits for rank 0\n"
    assert done.stderr == (notice if "7 * (rank == 0)" in body else ""), done


def test_failure_of_a_second_life(launch) -> None:
    """After a shutdown and a new start a failure is told once, to those who are still there."""
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
    assert _said(done)[1] == "failed: ValueError: after all"
    assert _said(done)[0].startswith("stops: rank 1 failed: ValueError: after all (")
    assert done.stderr.count("hvdtrain: rank 1 of 2") == 1


PROGRAM = """
import atexit, sys
from hvdtrain.collectives.exit_hooks import ExitCodeWatch
before = sys.exit
watch = ExitCodeWatch()
def tell():
    watch.close()
    assert before == sys.exit
    print(watch.code)
atexit.register(tell)
"""

# The end of a program, and the code that it has.
ENDS = {
    "none": ("", 0),
    "exit": ("sys.exit(7)", 7),
    "exit-with-nothing": ("sys.exit()", 0),
    "exit-with-words": ("sys.exit('no data')", 1),
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
def test_code_of_sys_exit_is_known(body: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + body],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, f"{code}\n")
