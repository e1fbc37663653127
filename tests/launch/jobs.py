"""Failing programs, and background jobs of ``hvdtrain run`` with all their processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.agent.cgroups import ENTER, FILL, LIMIT_BYTES
from tests.harness.jobs import REPOSITORY, YIELDING
from tests.testbed.cluster import Cluster

__all__ = [
    "COLLAPSING",
    "FAULTS",
    "HVDTRAIN",
    "ON_CLUSTER",
    "OWN_DEFAULTS",
    "RANK",
    "ClusterJob",
    "StartedJob",
    "kill_marked",
    "marked",
    "program",
    "with_mark",
]

COLLAPSING = [sys.executable, "-m", "hvdtrain", "run"]
# Every line has the tag of its rank.
HVDTRAIN = [*COLLAPSING, "--no-collapse"]
# Unsets variables of the test harness, to test hvdtrain's defaults.
OWN_DEFAULTS: dict[str, str | None] = {
    "OMPI_ALLOW_RUN_AS_ROOT": None,
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": None,
    "OMPI_MCA_btl": None,
    "OMPI_MCA_pml": None,
    "OMPI_MCA_osc": None,
    **dict.fromkeys(YIELDING),
    "OMPI_MCA_rmaps_base_oversubscribe": None,
    "PRTE_MCA_rmaps_default_mapping_policy": None,
    "OMP_NUM_THREADS": None,
    "TF_NUM_INTRAOP_THREADS": None,
    "HVDTRAIN_TIMEOUT_S": None,
}
RANK = (
    "int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK') "
    "or os.environ['SLURM_PROCID'])"
)

# The hosts of the cluster share cores, so waiting ranks must yield.
ON_CLUSTER = {**OWN_DEFAULTS, "PYTHONPATH": str(REPOSITORY), **YIELDING}

# The fault, the exit code of the job, and a part of the message. Out of memory needs the fixture
# cgroup.
FAULTS: dict[str, tuple[str, int, str]] = {
    "exception": ("raise ValueError('no such batch')", 1, "ValueError: no such batch"),
    "exit-7": ("sys.exit(7)", 7, ""),
    "segfault": ("import ctypes; ctypes.string_at(0)", 139, "Segmentation fault"),
    "abort": ("os.abort()", 134, "Fatal Python error: Aborted"),
    "sigkill": ("os.kill(os.getpid(), 9)", 137, "killed by signal 9 (SIGKILL); "),
    "out-of-memory": (
        f"{ENTER}; {FILL}",
        137,
        f"(SIGKILL): out of memory (cgroup limit {LIMIT_BYTES >> 20} MiB)",
    ),
    "import-error": ("import no_such_module", 1, "ModuleNotFoundError"),
    "missing-file": ("open('/nonexistent/data')", 1, "FileNotFoundError"),
    "in-a-thread-while-main-waits": (
        "import threading; threading.Thread(target=lambda: os._exit(9)).start(); time.sleep(60)",
        9,
        "",
    ),
}


def program(body: str, python: Sequence[str] = ("python",)) -> list[str]:
    """Return a command that runs ``body`` in Python, with its rank in ``rank``."""
    return [*python, "-c", f"import os, sys, time; rank = {RANK}\n{textwrap.dedent(body)}"]


def with_mark(mark: str) -> dict[str, str]:
    """Return an environment that marks processes for ``marked``."""
    environ = {name: value for name, value in os.environ.items() if name not in OWN_DEFAULTS}
    return {**environ, "PYTHONPATH": str(REPOSITORY), "HVDTRAIN_TEST_MARK": mark}


def marked(mark: str) -> list[int]:
    """Return the processes with an environment of ``with_mark``."""
    variable = f"HVDTRAIN_TEST_MARK={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and variable in (entry / "environ").read_bytes().split(b"\0"):
                pids.append(int(entry.name))
    return pids


def kill_marked(mark: str) -> None:
    """Kill all marked processes."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class StartedJob:
    """``hvdtrain run`` in the background, with a unique mark in its environment."""

    def __init__(
        self,
        arguments: list[str],
        body: str,
        mark: str,
        command: Sequence[str] = HVDTRAIN,
        python: Sequence[str] = ("python",),
    ) -> None:
        self.mark = mark
        self.process = subprocess.Popen(
            [*command, *arguments, "--", *program(body, python)],
            env=with_mark(mark),
            cwd=REPOSITORY,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def left(self) -> list[int]:
        """Return the job's processes that are still running."""
        return marked(self.mark)

    def named(self, *names: str) -> list[int]:
        """Return the processes of the job that run one of these programs or modules."""
        pids = []
        for pid in self.left():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            # Modules are started with python -P -m.
            module = words[1:3] == ["-P", "-m"]
            word = words[3] if module else os.path.basename(words[0])
            if word in names:
                pids.append(pid)
        return pids

    def wait_for(self, count: int, folder: Path, timeout_s: float = 30.0) -> None:
        """Wait until the ranks have created ``count`` files in ``folder``."""
        deadline = time.monotonic() + timeout_s
        while len(os.listdir(folder)) < count:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(
                    f"the ranks did not start: {self.process.communicate(timeout=10)[0]}"
                )
            time.sleep(0.02)

    def seconds_until_nothing_is_left(self, timeout_s: float) -> float:
        """Wait until no process is left, and return the seconds. Fail after ``timeout_s``."""
        started = time.monotonic()
        while self.left():
            if time.monotonic() - started > timeout_s:
                raise AssertionError(f"still running after {timeout_s} s: {self.left()}")
            time.sleep(0.05)
        return time.monotonic() - started

    def end(self) -> None:
        """Kill all processes of the job."""
        kill_marked(self.mark)
        self.process.wait(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class ClusterJob:
    """A job on the cluster whose ranks sleep. A ``with`` statement waits for it and kills it.

    Args:
        cluster: The cluster.
        command: Returns a command of ``hvdtrain run`` for Python code.
        ranks: The number of ranks.
        environ: The environment.
    """

    def __init__(
        self,
        cluster: Cluster,
        command: Callable[[str], list[str]],
        ranks: int,
        environ: Mapping[str, str | None],
    ) -> None:
        mark = uuid.uuid4().hex
        self._cluster = cluster
        self._mark = f"HVDTRAIN_TEST_MARK={mark}"
        folder = cluster.folder / mark
        folder.mkdir()
        body = f"open(os.path.join({str(folder)!r}, str(rank)), 'w').close(); time.sleep(120)"
        argv = command(body)
        at = argv.index("--")
        self.process = cluster.start(
            [*argv[:at], "-x", "HVDTRAIN_TEST_MARK", *argv[at:]],
            env={**environ, "HVDTRAIN_TEST_MARK": mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._folder, self._ranks = folder, ranks

    def __enter__(self) -> ClusterJob:
        deadline = time.monotonic() + 40
        try:
            while len(os.listdir(self._folder)) < self._ranks:
                assert time.monotonic() < deadline, "the ranks did not start"
                assert self.process.poll() is None, self.process.communicate(timeout=10)
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate(timeout=10)

    def running(self, *words: str) -> list[int]:
        """Return the processes of the job with all ``words`` in the command line."""
        processes = self._cluster.processes(self._mark)
        return [p.pid for p in processes if all(word in " ".join(p.argv) for word in words)]

    def assert_all_gone(self, within_s: float = 10.0) -> None:
        deadline = time.monotonic() + within_s
        while left := self._cluster.processes(self._mark):
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
