"""Sessions of the outer pytest: MPI jobs that run many items each."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.jobs import MARK, Job, clean_environment, mpirun_argv
from tests.harness.reports import ItemReport, ReportReader, read_log

__all__ = ["Outcome", "RankSessions", "timeout_of"]

START_TIMEOUT_S = 90.0
END_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an item on all ranks."""

    outcome: str
    text: str = ""
    xfail: str | None = None


class RankSessions:
    """The sessions of a test run.

    Args:
        config: The configuration of the outer pytest.
        folder: The parent of the sessions' folders.
    """

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._count = 0
        self._session: _Session | None = None
        self._cannot_start: dict[tuple[int, str], Outcome] = {}

    def run(
        self,
        item: pytest.Item,
        following: list[pytest.Item],
        size: int,
        python: list[str],
        backend: str,
    ) -> Outcome:
        """Run ``item`` on ``size`` ranks, in a session that also runs ``following``.

        Args:
            item: The item to run.
            following: Later items of the same file, number of ranks and backend.
            size: Number of ranks.
            python: The command that starts Python.
            backend: The backend of Keras.
        """
        if (size, backend) in self._cannot_start:
            return self._cannot_start[size, backend]
        session = self._session
        if session is None or session.next_nodeid != item.nodeid:
            self.close()
            session = self._session = self._start([item, *following], size, python, backend)
        outcome, continues = session.next_outcome()
        if not continues:
            self.close()
        if session.never_started:
            self._cannot_start[size, backend] = outcome
        return outcome

    def close(self) -> None:
        """End the running session, if any."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _start(
        self, items: list[pytest.Item], size: int, python: list[str], backend: str
    ) -> _Session:
        if MARK in os.environ:
            raise pytest.UsageError("a process of a test job must not start a session")
        folder = self._folder / f"session{self._count}"
        self._count += 1
        folder.mkdir()
        config = self._config
        arguments = ["--capture=no"]
        # Unused on ranks, and slow to load.
        for plugin in ("cacheprovider", "terminal", "anyio", "xdist", "xdist.looponfail"):
            arguments += ["-p", f"no:{plugin}"]
        # The project's options may belong to the terminal plugin.
        arguments += ["-o", "addopts=--import-mode=importlib --strict-markers"]
        arguments += [f"--rootdir={config.rootpath}"]
        if config.inipath is not None:
            arguments += ["-c", str(config.inipath)]
        limits = [timeout_of(item) for item in items]
        plan = {
            "size": size,
            "items": [item.nodeid for item in items],
            "item_timeout_s": limits,
            "arguments": arguments,
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        program = [*python, "-m", "tests.harness", str(folder)]
        nodeids = [item.nodeid for item in items]
        environment = clean_environment({"KERAS_BACKEND": backend})
        return _Session(folder, config.rootpath, program, nodeids, limits, size, environment)


class _Session:
    """An MPI job that runs a list of items."""

    def __init__(
        self,
        folder: Path,
        rootdir: Path,
        program: list[str],
        nodeids: list[str],
        limits_s: list[float],
        size: int,
        environment: dict[str, str],
    ) -> None:
        self._folder = folder
        self._nodeids = nodeids
        self._limits_s = limits_s
        self._size = size
        self._next = 0
        self._reader = ReportReader(folder, size)
        self._output = (folder / "mpirun.log").open("wb")
        self._job = Job(
            mpirun_argv(size, program),
            stdout=self._output,
            stderr=self._output,
            environment=environment,
            folder=rootdir,
        )

    @property
    def next_nodeid(self) -> str | None:
        """The next item."""
        return self._nodeids[self._next] if self._next < len(self._nodeids) else None

    @property
    def never_started(self) -> bool:
        """Whether the job ended before any rank started an item."""
        return not self._reader.started

    def next_outcome(self) -> tuple[Outcome, bool]:
        """Wait for the next item, and return its outcome and whether the session continues."""
        index = self._next
        self._next += 1
        problem = self._wait_for(index)
        ended = self._reader.ended.get(index, {})
        if problem:
            return Outcome(outcome="failed", text=self._explain(index, problem)), False
        outcome = _combine(ended)
        if outcome.outcome == "failed":
            return outcome, False
        if self._next == len(self._nodeids):
            problem = self._wait_for_end()
            if problem:
                return Outcome(outcome="failed", text=self._explain(index, problem)), False
        return outcome, True

    def close(self) -> None:
        """End the job."""
        self._job.end()
        self._output.close()

    def _wait_for(self, index: int) -> str | None:
        """Wait until all ranks have reported the item, or return why they can't."""
        started: float | None = None
        created = time.monotonic()
        while True:
            code = self._job.poll()
            if not self._reader.poll():
                time.sleep(0.005)
            if len(self._reader.ended.get(index, {})) == self._size:
                return None
            if code is not None:
                return f"the MPI job ended with exit code {code} during this test"
            now = time.monotonic()
            if started is None and index in self._reader.started:
                started = now
            if started is not None and now - started > self._limits_s[index]:
                return f"not all ranks ended the test within {self._limits_s[index]:g} s"
            if started is None and now - created > START_TIMEOUT_S:
                return f"no rank started this test within {START_TIMEOUT_S:g} s"

    def _wait_for_end(self) -> str | None:
        code = self._job.wait(END_TIMEOUT_S)
        if code is None:
            return f"the ranks did not exit within {END_TIMEOUT_S:g} s after all tests had passed"
        if code:
            return f"the MPI job exited with code {code} after all tests had passed"
        return None

    def _explain(self, index: int, problem: str) -> str:
        ended = self._reader.ended.get(index, {})
        started = self._reader.started.get(index, {})
        parts = [problem]
        for rank in range(self._size):
            report = ended.get(rank) or started.get(rank)
            state = "did not start it" if report is None else (report.outcome or "was running it")
            parts.append(f"--- rank {rank} of {self._size} {state}")
            if report is not None and report.text:
                parts.append(report.text)
            parts.append(read_log(self._folder, rank, report.log_offset if report else 0))
        parts.append("--- mpirun")
        parts.append((self._folder / "mpirun.log").read_text(errors="replace")[-3000:])
        return "\n".join(part for part in parts if part)


def _combine(ended: dict[int, ItemReport]) -> Outcome:
    """Combine the outcomes of all ranks. If they differ, the test has failed."""
    size = len(ended)
    reports = [ended[rank] for rank in range(size)]
    failed = sorted((r for r in reports if r.outcome == "failed"), key=lambda r: r.time_s)
    if failed:
        text = "\n".join(
            f"--- rank {report.rank} of {size} failed in {report.phase}\n{report.text}"
            for report in failed
        )
        return Outcome(outcome="failed", text=text)
    if len({(report.outcome, report.xfail is None) for report in reports}) > 1:
        lines = [f"rank {r.rank}: {r.outcome} {r.text}".rstrip() for r in reports]
        text = "the ranks have different outcomes\n" + "\n".join(lines)
        return Outcome(outcome="failed", text=text)
    first = reports[0]
    return Outcome(outcome=first.outcome, text=first.text, xfail=first.xfail)


def timeout_of(item: pytest.Item) -> float:
    """Return the timeout of a test in seconds."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    try:
        return float(item.config.getini("timeout"))
    except (KeyError, TypeError, ValueError):
        return 120.0
