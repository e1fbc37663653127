"""What a test can ask for.

``@pytest.mark.ranks(2, 3, 4)``
    The test's body, with its fixtures, runs on every rank of a real MPI job, once for each of the
    numbers, and passes only if it passes on every rank. A file's items of one number share a job,
    which is started again after a failure. ``ranks(1, 2)`` runs it in this process as well.
    Whoever kills or hangs ranks on purpose starts its own job with ``launch``.

``launch(np, script, ...)``, ``run_command(argv, ...)``
    Fixtures that run a script under mpirun (``np=None``: alone), or any program, in a folder of
    their own, and return what it printed, its exit code and its time. Nothing outlives them.
    Scripts are forks of a process that has imported TensorFlow; ``fresh=True`` has none of that.

``forked_python``
    Fixture: the beginning of a command, in the place of ``python``, whose program is such a fork.

``elastic(script, ...)``
    Fixture that runs a script's text on three ranks of ``hvdtrain run --elastic``, some of which it
    may kill, and returns the same.

``world``
    Fixture: ``hvdtrain`` after ``hvdtrain.init()``, alone or on every rank.

``HVDTRAIN_TEST_REQUIRE=mpi`` turns "skipped: no mpirun" into a failure.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.forkserver import ForkServers, can_fork
from tests.harness.inner import RankPlugin
from tests.harness.jobs import (
    PATIENCE,
    Completed,
    clean_environment,
    mpirun_argv,
    mpirun_missing,
    run_job,
)
from tests.harness.outer import Outcome, RankSessions, timeout_of
from tests.harness.required import do_without
from tests.harness.scratch import Scratch

Launch = Callable[..., Completed]

_SIZE = "rank_count"
_COMPLETED = pytest.StashKey[list[Completed]]()
_FORK_SERVERS = pytest.StashKey[ForkServers]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n, ...): runs on every rank of an MPI job of n")
    config.addinivalue_line("markers", "mpi: starts MPI jobs itself")
    config.addinivalue_line("markers", "in_job: runs on the ranks of an MPI job; given by itself")
    config.addinivalue_line("markers", "slow: takes seconds; not in `make quick`")
    config.addinivalue_line("markers", "more: more of what other tests do")
    inside = any(isinstance(plugin, RankPlugin) for plugin in config.pluginmanager.get_plugins())
    if not inside:
        config.pluginmanager.register(_OuterPlugin(config), "hvdtrain-outer")
        signal.signal(signal.SIGTERM, _end_well)
        # A shell's background jobs ignore Ctrl-C; the programs under test are to see it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_well(number: int, frame: object) -> None:
    """End as on Ctrl-C, so that the jobs end as well: ranks have groups of their own."""
    pytest.exit("terminated", returncode=128 + number)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if not marker.args or not all(isinstance(n, int) and n > 0 for n in marker.args):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ranks takes numbers of ranks, got {marker.args}"
        )
    if _SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_SIZE)
    metafunc.parametrize(_SIZE, marker.args, ids=[f"np{n}" for n in marker.args], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by fixture, before tests are chosen by their markers."""
    for item in items:
        # Closer than any that the test has itself.
        item.add_marker(pytest.mark.timeout(timeout_of(item) * PATIENCE), append=False)
        if {"elastic", "environment", "launch", "mpirun"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("mpi")
        if _size(item) > 1:
            item.add_marker("in_job")
        if marker := item.get_closest_marker("ranks"):
            few = min((n for n in marker.args if n > 1), default=1)
            if _size(item) > few:
                item.add_marker("more")


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make: there is much that they have imported."""
    gc.freeze()
    # The programs of tests read the bytecode of these modules. AutoGraph would leave its own in
    # /tmp, where tests look for what is left behind.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture
def rank_count(request: pytest.FixtureRequest) -> int:
    """How many ranks this item runs on."""
    return getattr(request, "param", 1)


@pytest.fixture
def world() -> Any:
    """``hvdtrain`` after ``hvdtrain.init()``."""
    import hvdtrain

    hvdtrain.init()
    return hvdtrain


@pytest.fixture
def run_command(tmp_path: Path, request: pytest.FixtureRequest) -> Launch:
    """Run a program and return a ``Completed``; running out of time fails the test.

    Where the test fails, the report shows what its programs printed.

    ``env`` changes variables, None removes one. ``may_time_out=True`` returns instead.
    """

    def run(
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        may_time_out: bool = False,
    ) -> Completed:
        limit_s = timeout_s if may_time_out else timeout_s * PATIENCE
        done = run_job(
            [os.fspath(part) for part in argv],
            folder=tmp_path,
            timeout_s=limit_s,
            environment=clean_environment(env),
        )
        request.node.stash.setdefault(_COMPLETED, []).append(done)
        if done.timed_out and not may_time_out:
            pytest.fail(f"{done.argv[0]} was not done after {limit_s:g} s")
        return done

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show what the programs of a failed test printed; assertions cut long texts."""
    report = yield
    if report.failed and report.when == "call":
        for done in item.stash.get(_COMPLETED, []):
            report.sections.append(("Program", repr(done)))
    return report


@pytest.fixture(scope="session")
def fork_servers(request: pytest.FixtureRequest) -> ForkServers:
    """What forks programs; not started before somebody wants one."""
    return request.config.stash[_FORK_SERVERS]


@pytest.fixture
def forked_python(fork_servers: ForkServers) -> list[str]:
    """A command in the place of ``python``, for programs that import TensorFlow."""
    return fork_servers.python()


@pytest.fixture
def launch(run_command: Launch, tmp_path: Path, request: pytest.FixtureRequest) -> Launch:
    """Run a Python script, given as a path or as its text, on ``np`` ranks (None: alone).

    ``fresh=True``, and variables that Python or libraries read when they are loaded, have it start
    with nothing imported.
    """

    def run(
        np: int | None,
        script: str | Path,
        *arguments: str,
        fresh: bool = False,
        **options: Any,
    ) -> Completed:
        if isinstance(script, str):
            path = tmp_path / "script.py"
            path.write_text(textwrap.dedent(script))
        else:
            path = script
        if np is not None:
            _need_mpirun()
        fresh = fresh or not can_fork(options.get("env") or {})
        python = [sys.executable] if fresh else request.getfixturevalue("forked_python")
        program = [*python, str(path), *arguments]
        if np is None:
            return run_command(program, **options)
        return run_command(mpirun_argv(np, program), **options)

    return run


@pytest.fixture
def elastic(run_command: Launch, tmp_path: Path, forked_python: list[str]) -> Launch:
    """Run a Python script, given as its text, on three ranks that go on when some of them die.

    ``options`` are those of ``hvdtrain run``.
    """

    def run(script: str, *options: str, arguments: Sequence[str] = ()) -> Completed:
        _need_mpirun()
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        command = [
            sys.executable,
            "-m",
            "hvdtrain",
            "run",
            "--no-collapse",
            "-np",
            "3",
            "--elastic",
        ]
        program = [*forked_python, str(path), *arguments]
        return run_command([*command, "--grace-s", "2", *options, "--", *program], timeout_s=200)

    return run


@pytest.fixture
def mpirun() -> Callable[[int, Sequence[str]], list[str]]:
    """The command that starts a program on so many ranks, for tests that run it in their way."""
    _need_mpirun()
    return mpirun_argv


def _need_mpirun() -> None:
    if reason := mpirun_missing():
        do_without("mpi", reason)


def _size(item: pytest.Item) -> int:
    """The number of ranks an item runs on; 1 for ordinary tests."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(_SIZE, 1) if callspec is not None else 1


def _kind(item: pytest.Item) -> str:
    """What a test takes most of its time for; empty for quick ones."""
    if item.get_closest_marker("cluster"):
        return "cluster"
    if item.get_closest_marker("mpi"):
        return "mpi"
    return "ranks" if _size(item) > 1 else ""


class _OuterPlugin:
    """Sends the items of several ranks to their sessions; the rest runs as ever."""

    def __init__(self, config: pytest.Config) -> None:
        self._scratch = Scratch()
        folder = self._scratch.folder
        forks = folder / "forks"
        forks.mkdir()
        self._fork_servers = config.stash[_FORK_SERVERS] = ForkServers(forks, clean_environment())
        self._sessions = RankSessions(config, folder, self._fork_servers.python)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the quick tests first, and then files of each kind in turn.

        Those of the cluster wait for most of their time, those on ranks compute, the others do
        both: side by side they keep the machine busy. The largest of a kind comes first, so that
        none is alone at the end.
        """
        quick = [item for item in items if not _kind(item)]
        kinds: dict[str, dict[Path, list[pytest.Item]]] = {"cluster": {}, "ranks": {}, "mpi": {}}
        for item in items:
            if kind := _kind(item):
                kinds[kind].setdefault(item.path, []).append(item)
        queues = [
            sorted(files.values(), key=lambda file: sum(map(_size, file)), reverse=True)
            for files in kinds.values()
        ]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*queues, fillvalue=[]))
        # A file's tests on as many ranks share a job.
        items[:] = [*quick, *(item for file in turns for item in sorted(file, key=_size))]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if _size(item) == 1:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        begun = time.perf_counter()
        outcome = self._outcome(item)
        # The start of the job counts, too.
        for report in _reports(item, outcome, time.perf_counter() - begun):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # What earlier tests of this process set up must not outlive its scope.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """The session keeps the time of its items."""
        return True if _size(item) > 1 else None

    def pytest_unconfigure(self) -> None:
        self._sessions.close()
        self._fork_servers.close()
        self._scratch.close()

    def _outcome(self, item: pytest.Item) -> Outcome:
        try:
            _need_mpirun()
        except pytest.skip.Exception as reason:
            return Outcome(outcome="skipped", text=f"Skipped: {reason}")
        except pytest.fail.Exception as reason:
            return Outcome(outcome="failed", text=str(reason))
        items = item.session.items
        later = items[items.index(item) + 1 :]
        like = (item.path, _size(item))
        following = [other for other in later if (other.path, _size(other)) == like]
        try:
            return self._sessions.run(item, following, _size(item))
        except KeyboardInterrupt:
            self._sessions.close()
            raise


def _reports(item: pytest.Item, outcome: Outcome, duration_s: float) -> Iterator[pytest.TestReport]:
    path, line, _ = item.location
    longrepr: Any = None
    if outcome.outcome == "failed":
        longrepr = outcome.text
    elif outcome.outcome == "skipped" and outcome.xfail is None:
        longrepr = (path, (line or 0) + 1, outcome.text)
    elif outcome.outcome == "skipped":
        longrepr = outcome.text
    decided = {"call": (outcome.outcome, longrepr, duration_s)}
    for when in ("setup", "call", "teardown"):
        state, text, taken_s = decided.get(when, ("passed", None, 0.0))
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=state,  # type: ignore[arg-type]
            longrepr=text,
            when=when,  # type: ignore[arg-type]
            duration=taken_s,
            start=0.0,
            stop=taken_s,
        )
        if when == "call" and outcome.xfail is not None:
            report.wasxfail = outcome.xfail
        yield report
