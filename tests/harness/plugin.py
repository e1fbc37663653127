"""Markers and fixtures for tests on several ranks.

``@pytest.mark.ranks(2, 3, 4)``
    The test, with its fixtures, runs on every rank of a real MPI job, once for each number of
    ranks, and passes only if it passes on every rank. Tests of a file with the same number of
    ranks share a job, which is restarted after a failure. ``ranks(1, 2)`` also runs the test in
    pytest's process. Tests that kill or hang ranks start their own job with ``launch``.

``@pytest.mark.backends("tensorflow", "torch", "jax")``
    The test runs once with each of these backends of Keras. Without the marker, it runs on
    TensorFlow. Torch and JAX are in environments (``tests.environments``). The module of the test
    must not import TensorFlow.

``launch(np, script, ...)``, ``run_command(argv, ...)``
    Fixtures that run a script under mpirun (``np=None``: alone), or any program, in its own
    folder, and return its output, exit code and duration. No process outlives them. Scripts are
    forked from a process that has imported TensorFlow; ``fresh=True`` starts a new Python.

``forked_python``, ``python_with(backend)``
    Fixtures: the first arguments of a command that runs such a fork instead of ``python``.

``elastic(script, ...)``
    Fixture that runs a script on three ranks of ``hvdtrain run --elastic`` and returns the same.

``world``
    Fixture: ``hvdtrain`` after ``hvdtrain.init()``, alone or on every rank.

``HVDTRAIN_TEST_REQUIRE=mpi`` turns "skipped: no mpirun" into a failure.
"""

from __future__ import annotations

import functools
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

from tests.environments import folder_of, missing_environment
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
from tests.harness.required import skip_or_fail
from tests.harness.scratch import Scratch

Launch = Callable[..., Completed]

_SIZE = "rank_count"
_BACKEND = "keras_backend"
_DEFAULT_BACKEND = "tensorflow"
_COMPLETED = pytest.StashKey[list[Completed]]()
_FORK_SERVERS = pytest.StashKey[ForkServers]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n, ...): runs on every rank of an MPI job of n")
    config.addinivalue_line("markers", "backends(name, ...): runs with these backends of Keras")
    config.addinivalue_line("markers", "mpi: starts MPI jobs itself")
    config.addinivalue_line("markers", "in_job: runs on ranks of an MPI job; set automatically")
    config.addinivalue_line("markers", "slow: takes seconds; not in `make quick`")
    config.addinivalue_line("markers", "more: combinations and larger numbers of ranks")
    inside = any(isinstance(plugin, RankPlugin) for plugin in config.pluginmanager.get_plugins())
    if not inside:
        config.pluginmanager.register(_OuterPlugin(config), "hvdtrain-outer")
        signal.signal(signal.SIGTERM, _terminate)
        # Background jobs of a shell ignore SIGINT, and so would the programs under test.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _terminate(number: int, frame: object) -> None:
    """End pytest as on Ctrl-C. This also ends jobs, whose ranks have their own process groups."""
    pytest.exit("terminated", returncode=128 + number)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one item per backend and number of ranks."""
    if marker := metafunc.definition.get_closest_marker("backends"):
        if _BACKEND not in metafunc.fixturenames:
            metafunc.fixturenames.append(_BACKEND)
        metafunc.parametrize(_BACKEND, marker.args, indirect=True)
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if not marker.args or not all(isinstance(n, int) and n > 0 for n in marker.args):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ranks needs numbers of ranks, got {marker.args}"
        )
    if _SIZE not in metafunc.fixturenames:
        metafunc.fixturenames.append(_SIZE)
    metafunc.parametrize(_SIZE, marker.args, ids=[f"np{n}" for n in marker.args], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add markers by fixture, before pytest selects tests by markers."""
    for item in items:
        # Overrides the timeout of the test itself.
        item.add_marker(pytest.mark.timeout(timeout_of(item) * PATIENCE), append=False)
        if {"elastic", "environment", "launch", "mpirun", "python_with"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("mpi")
        if _in_session(item):
            item.add_marker("in_job")
        if marker := item.get_closest_marker("ranks"):
            few = min((n for n in marker.args if n > 1), default=1)
            if _size(item) > few:
                item.add_marker("more")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection."""
    gc.freeze()
    # Test programs read the bytecode of these modules. AutoGraph would write bytecode to /tmp,
    # where tests look for leftovers.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture
def rank_count(request: pytest.FixtureRequest) -> int:
    """The number of ranks of this item."""
    return getattr(request, "param", 1)


@pytest.fixture
def keras_backend(request: pytest.FixtureRequest) -> str:
    """The backend of Keras with which this item runs."""
    return getattr(request, "param", _DEFAULT_BACKEND)


@pytest.fixture
def world() -> Any:
    """``hvdtrain`` after ``hvdtrain.init()``."""
    import hvdtrain

    hvdtrain.init()
    return hvdtrain


@pytest.fixture
def run_command(tmp_path: Path, request: pytest.FixtureRequest) -> Launch:
    """Run a program and return a ``Completed``. A time-out fails the test.

    The report of a failed test shows the output of its programs. ``env`` changes variables, and the
    value None removes one. With ``may_time_out=True``, a time-out doesn't fail the test.
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
            pytest.fail(f"{done.argv[0]} did not end within {limit_s:g} s")
        return done

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the output of a failed test's programs, which assertions truncate."""
    report = yield
    if report.failed and report.when == "call":
        for done in item.stash.get(_COMPLETED, []):
            report.sections.append(("Program", repr(done)))
    return report


@pytest.fixture(scope="session")
def fork_servers(request: pytest.FixtureRequest) -> ForkServers:
    """The servers that fork programs, started on first use."""
    return request.config.stash[_FORK_SERVERS]


@pytest.fixture
def forked_python(fork_servers: ForkServers) -> list[str]:
    """A command that replaces ``python`` for programs that import TensorFlow."""
    return fork_servers.python()


@pytest.fixture
def python_with(fork_servers: ForkServers) -> Callable[[str], list[str]]:
    """A function that returns such a command for a backend of Keras."""
    return functools.partial(_forked_python, fork_servers)


@pytest.fixture
def launch(run_command: Launch, tmp_path: Path, request: pytest.FixtureRequest) -> Launch:
    """Run a Python script, given as path or text, on ``np`` ranks (None: alone).

    ``fresh=True``, and variables that are read at import, start a new Python.
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
            _require_mpirun()
        fresh = fresh or not can_fork(options.get("env") or {})
        python = [sys.executable] if fresh else request.getfixturevalue("forked_python")
        program = [*python, str(path), *arguments]
        if np is None:
            return run_command(program, **options)
        return run_command(mpirun_argv(np, program), **options)

    return run


@pytest.fixture
def elastic(run_command: Launch, tmp_path: Path, forked_python: list[str]) -> Launch:
    """Run a Python script on three ranks of an elastic job.

    ``options`` are options of ``hvdtrain run``.
    """

    def run(script: str, *options: str, arguments: Sequence[str] = ()) -> Completed:
        _require_mpirun()
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
    """A function that returns the mpirun command for a number of ranks and a program."""
    _require_mpirun()
    return mpirun_argv


def _forked_python(servers: ForkServers, backend: str) -> list[str]:
    if backend == _DEFAULT_BACKEND:
        return servers.python()
    if reason := missing_environment(backend):
        skip_or_fail(backend, reason)
    return servers.python(backend, str(folder_of(backend) / "bin" / "python"))


def _require_mpirun() -> None:
    if reason := mpirun_missing():
        skip_or_fail("mpi", reason)


def _size(item: pytest.Item) -> int:
    """Return the number of ranks of an item; 1 for ordinary tests."""
    return _parameter(item, _SIZE, 1)


def _backend(item: pytest.Item) -> str:
    """Return the backend of Keras with which an item runs."""
    return _parameter(item, _BACKEND, _DEFAULT_BACKEND)


def _parameter(item: pytest.Item, name: str, default: Any) -> Any:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name, default) if callspec is not None else default


def _in_session(item: pytest.Item) -> bool:
    """Return whether an item runs in processes of its own instead of pytest's process."""
    return _size(item) > 1 or _backend(item) != _DEFAULT_BACKEND


def _session_key(item: pytest.Item) -> tuple[Path, int, str]:
    """Return what the items of a session have in common."""
    return item.path, _size(item), _backend(item)


def _kind(item: pytest.Item) -> str:
    """Return the kind of a slow test, or an empty string."""
    if item.get_closest_marker("cluster"):
        return "cluster"
    if item.get_closest_marker("mpi"):
        return "mpi"
    return "ranks" if _in_session(item) else ""


class _OuterPlugin:
    """A plugin that runs items on several ranks in sessions."""

    def __init__(self, config: pytest.Config) -> None:
        self._scratch = Scratch()
        folder = self._scratch.folder
        forks = folder / "forks"
        forks.mkdir()
        self._fork_servers = config.stash[_FORK_SERVERS] = ForkServers(forks, clean_environment())
        self._sessions = RankSessions(config, folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put quick tests first, and then alternate files of each kind, largest first.

        Tests on the cluster mostly wait, and tests on ranks compute. In parallel, they keep the
        machine busy.
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
        # Tests of a file with the same number of ranks and backend share a job.
        items[:] = [*quick, *(item for file in turns for item in sorted(file, key=_session_key))]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not _in_session(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        start = time.perf_counter()
        outcome = self._outcome(item)
        # Includes the start of the job.
        for report in _reports(item, outcome, time.perf_counter() - start):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        # Tear down fixtures of earlier tests whose scope has ended.
        item.session._setupstate.teardown_exact(nextitem)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool | None:
        """Disable the timer for items on ranks, which the session times."""
        return True if _in_session(item) else None

    def pytest_unconfigure(self) -> None:
        self._sessions.close()
        self._fork_servers.close()
        self._scratch.close()

    def _outcome(self, item: pytest.Item) -> Outcome:
        try:
            _require_mpirun()
            python = _forked_python(self._fork_servers, _backend(item))
        except pytest.skip.Exception as reason:
            return Outcome(outcome="skipped", text=f"Skipped: {reason}")
        except pytest.fail.Exception as reason:
            return Outcome(outcome="failed", text=str(reason))
        items = item.session.items
        key = _session_key(item)
        later = items[items.index(item) + 1 :]
        following = [other for other in later if _session_key(other) == key]
        try:
            return self._sessions.run(item, following, _size(item), python, _backend(item))
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
    phases = {"call": (outcome.outcome, longrepr, duration_s)}
    for when in ("setup", "call", "teardown"):
        state, text, phase_s = phases.get(when, ("passed", None, 0.0))
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords=dict.fromkeys(item.keywords, 1),
            outcome=state,  # type: ignore[arg-type]
            longrepr=text,
            when=when,  # type: ignore[arg-type]
            duration=phase_s,
            start=0.0,
            stop=phase_s,
        )
        if when == "call" and outcome.xfail is not None:
            report.wasxfail = outcome.xfail
        yield report
