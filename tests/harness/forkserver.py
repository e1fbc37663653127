"""Programs that begin with TensorFlow imported: forks of a process that has done it once.

``python -m tests.harness.forkserver SOCKET`` imports it and listens; ``forked.py`` stands for the
program wherever it is started, and lives as long as the fork. The import takes four seconds of a
core, a fork a hundredth of one.

A fork has what importing leaves behind, which is the same in real programs, but for one thing: the
order of sets. So there are two servers with different hash seeds, and even and odd ranks are not of
the same. Random numbers are seeded again.

A server ends when its standard input does, and its programs with it.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import os
import pkgutil
import random
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["SERVERS", "ForkServers", "can_fork"]

# Where programs find the servers: their sockets are ``0`` and ``1`` in this folder.
SERVERS = "HVDTRAIN_TEST_FORKSERVERS"
COUNT = 2

_PRELOADED = ("tensorflow", "keras", "pytest", "mpi4py", "hvdtrain.world", "hvdtrain.job_entry")
# With all that is in them, most of which programs load when they need it.
_PRELOADED_PACKAGES = tuple(
    f"hvdtrain.{name}"
    for name in (
        *("checkpoint", "cluster", "collectives", "config", "gradients", "horovod", "keras"),
        *("monitor", "parameter_server", "private_api", "tensorflow"),
    )
)
# Read by the interpreter or by libraries when they are loaded: forks have those of the server.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "TF_", "XLA_", "KERAS_"),
    *("CUDA_", "NVIDIA_"),
)
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
_MESSAGE_BYTES = 1 << 20
_MOST_FILES = 64
_ABOVE = 512
# pid, uid and gid of who is at the other end: struct ucred of unix(7).
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class _Request:
    """A program to become: what ``forked.py`` has sent."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    numbers: list[int]
    files: list[int]


class ForkServers:
    """Two servers for all processes of a test run, which start when the first wants a program.

    The process that is here first, be it the one that shares out the tests among others, has a
    pipe from which the servers read: they end when it closes that, or has died.

    Args:
        folder: Empty, for sockets and logs; its path is short, as that of a socket must be.
        environment: Of the servers.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._pipe: int | None = None
        if SERVERS not in os.environ:
            os.mkfifo(folder / "pipe")
            self._pipe = os.open(folder / "pipe", os.O_RDWR)
            os.environ[SERVERS] = str(folder)
        self.folder = Path(os.environ[SERVERS])
        self._started = self.folder / "started"

    def python(self) -> list[str]:
        """What stands for ``python`` in a command; tells by this process's environment where."""
        if not self._started.exists():
            with (self.folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._started.exists():
                    self._start_all()
        # Without site-packages, which it has no use for, to start fast.
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("forked.py"))]

    def close(self) -> None:
        """End them, and what still runs of their programs, where this process was the first."""
        if self._pipe is None:
            return
        del os.environ[SERVERS]
        os.close(self._pipe)
        self._pipe = None
        pids = self._started.read_text().split() if self._started.exists() else []
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                ended, _, _ = select.select([pidfd], [], [], _END_TIMEOUT_S)
                os.close(pidfd)
                if not ended:
                    raise TimeoutError(f"fork server {pid} did not end within {_END_TIMEOUT_S:g} s")

    def _start_all(self) -> None:
        starts = [self._start(number) for number in range(COUNT)]
        pids = [self._await(number, start) for number, start in enumerate(starts)]
        new = self.folder / "new"
        new.write_text(" ".join(pids))
        new.rename(self._started)

    def _start(self, number: int) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.harness.forkserver", str(self.folder / str(number))]
        with (
            (self.folder / f"{number}.log").open("wb") as log,
            open(os.open(self.folder / "pipe", os.O_RDONLY)) as pipe,
        ):
            return subprocess.Popen(
                argv,
                stdin=pipe,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**self._environment, "PYTHONHASHSEED": str(random.randrange(1 << 32))},
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )

    def _await(self, number: int, start: subprocess.Popen[str]) -> str:
        """The server's process, when it listens."""
        assert start.stdout is not None
        start.wait(_START_TIMEOUT_S)
        ready, _, _ = select.select([start.stdout], [], [], _START_TIMEOUT_S)
        pid = start.stdout.readline() if ready else ""
        start.stdout.close()
        if not pid:
            log = (self.folder / f"{number}.log").read_text(errors="replace")
            raise RuntimeError(f"no fork server within {_START_TIMEOUT_S:g} s:\n{log}")
        return pid.strip()


def can_fork(changes: Mapping[str, str | None]) -> bool:
    """Whether a fork does what a program would with these changes of the environment."""
    return not any(name.startswith(_READ_AT_START) for name in changes)


class _Server:
    """Forks programs; one thread, as a fork has none of the others."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._stop)
        # Who asked for a program, and its process.
        self._programs: dict[socket.socket, int] = {}
        self._stopped = False

    def serve(self) -> _Request | None:
        """Fork until it ends; in a fork, what that is to become."""
        while not self._stopped:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map() and (request := key.data(key.fileobj)):
                    return request
        for pid in self._programs.values():
            _end(pid)
        return None

    def _accept(self, listener: socket.socket) -> None:
        asker, _ = listener.accept()
        self._selector.register(asker, selectors.EVENT_READ, self._hear)

    def _stop(self, _: int) -> None:
        self._stopped = True

    def _hear(self, asker: socket.socket) -> _Request | None:
        """A program to start, then signals to it, then the end of who asked for it."""
        try:
            data, files, _, _ = socket.recv_fds(asker, _MESSAGE_BYTES, _MOST_FILES)
        except OSError:
            data, files = b"", []
        pid = self._programs.get(asker)
        if not data:
            if pid is not None:
                _end(pid)
            self._forget(asker)
        elif pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, int(data))
        elif (pid := os.fork()) == 0:
            _enter_namespaces(_peer(asker))
            self._leave()
            return _Request(**ast.literal_eval(data.decode()), files=files)
        else:
            for file in files:
                os.close(file)
            self._programs[asker] = pid
            ended = functools.partial(self._reap, pid, asker)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ended)
        return None

    def _reap(self, pid: int, asker: socket.socket, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if asker in self._programs:
            with contextlib.suppress(OSError):
                asker.send(str(os.waitstatus_to_exitcode(status)).encode())
            self._forget(asker)

    def _forget(self, asker: socket.socket) -> None:
        self._selector.unregister(asker)
        self._programs.pop(asker, None)
        asker.close()

    def _leave(self) -> None:
        """In a fork: keep nothing of the server's open."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd != sys.stdin.fileno():
                os.close(key.fd)
        self._selector.close()


def _peer(asker: socket.socket) -> int:
    """The process at the other end."""
    credentials = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _enter_namespaces(pid: int) -> None:
    """Be on the host of ``pid``, where that is one of the test cluster's."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as theirs, open(f"/proc/self/ns/{kind}") as own:
            if os.path.sameopenfile(theirs.fileno(), own.fileno()):
                continue
            if libc.setns(theirs.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), f"no way into the {kind} namespace of {pid}")


def _end(pid: int) -> None:
    """Kill a program and what it started, in its group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _become(request: _Request) -> None:
    """Run the program as Python would; returns or raises as it does."""
    os.setpgid(0, 0)
    # Out of the way first: the number that one of them has may be wanted for another.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _ABOVE) for file in request.files]
    for file in request.files:
        os.close(file)
    for file, number in zip(moved, request.numbers):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    tempfile.tempdir = None
    # Python's own generator does it by itself in a fork.
    sys.modules["numpy"].random.seed()
    what, *arguments = request.argv
    if what == "-m":
        sys.argv, sys.path[0] = arguments, request.folder
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if what == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[1:]], ""
        code = compile(arguments[0], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = request.argv, os.path.dirname(os.path.abspath(what))
        main.__file__ = what
        with io.open_code(os.path.abspath(what)) as file:
            code = compile(file.read(), what, "exec")
    exec(code, main.__dict__)


class _End:
    """Ends a fork before Python clears up its modules, once all else that is due has been done.

    The clearing up writes to all the memory that forks share, which takes 0.4 s of a core.
    """

    def __init__(self) -> None:
        # Of those that libraries register, all later, it runs last.
        atexit.register(self._leave)
        self._code: int | None = None

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """What happens in the block tells the code; what ended it goes on its way."""
        try:
            yield
            self._code = 0
        except SystemExit as end:
            # Who asks an exception of hvdtrain's sys.exit for its ``code`` must be Python itself.
            status = end.args[0] if end.args else None
            self._code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
            raise
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._code = 1
            raise

    def _leave(self) -> None:
        if self._code is None or _mpi_is_to_be_finalized():
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return
        os._exit(self._code)


def _mpi_is_to_be_finalized() -> bool:
    """Whether mpi4py does it when Python ends."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or sys.modules["mpi4py"].rc.finalize is False:
        return False
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())


def main() -> None:
    """Serve; in a fork, be the program."""
    # Programs of all test processes are to be no descendants of the one that was the first.
    if os.fork() != 0:
        os._exit(0)
    server = _Server(sys.argv[1])
    end = _End()
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PRELOADED_PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    # Forks share memory until it is written to, and collecting garbage writes to all of it. Most of
    # what they trace is kept: looking for garbage in that took a fifteenth of their time.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    print(os.getpid(), flush=True)
    if (request := server.serve()) is not None:
        with end.expected():
            _become(request)


if __name__ == "__main__":
    main()
