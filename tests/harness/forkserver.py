"""Servers that fork programs from a process that has imported TensorFlow, PyTorch or JAX.

``python -m tests.harness.forkserver SOCKET BACKEND`` imports a backend of Keras and listens.
``forked.py`` requests a fork and runs as long as the fork. The import takes one to four seconds of
a core, and a fork a hundredth of a second.

In real programs the order of sets differs between ranks. Therefore two servers with different hash
seeds serve even and odd ranks. Random numbers are seeded again in each fork.

A server and its programs end when its standard input ends.
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

# The folder with the sockets of the servers, ``tensorflow0`` and ``tensorflow1`` for example.
SERVERS = "HVDTRAIN_TEST_FORKSERVERS"
COUNT = 2

_PRELOADED = ("keras", "pytest", "mpi4py", "hvdtrain.world", "hvdtrain.job_entry")
# Imported with all their modules.
_PRELOADED_PACKAGES = tuple(
    f"hvdtrain.{name}"
    for name in (
        *("checkpoint", "cluster", "collectives", "compat.horovod", "config", "data", "frameworks"),
        *("gradients", "monitor", "parameter_server", "private_api", "trainer"),
    )
)
# Variables that are read at start or import; forks have the server's values.
_READ_AT_START = (
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_", "TF_", "XLA_", "KERAS_"),
    *("CUDA_", "NVIDIA_", "JAX_", "TORCH"),
)
# TensorFlow reads it at its first operation.
_READ_LATER = ("TF_NUM_INTEROP_THREADS",)
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
_MESSAGE_BYTES = 1 << 20
_MOST_FILES = 64
_ABOVE = 512
# pid, uid and gid of the peer: struct ucred of unix(7).
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class _Request:
    """The program to run, as sent by ``forked.py``."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    numbers: list[int]
    files: list[int]


class ForkServers:
    """The two servers of each backend in a test run, started on first use.

    The first process of the test run holds a pipe from which the servers read. The servers end when
    this process closes the pipe or dies.

    Args:
        folder: An empty folder for sockets and logs, with a short path.
        environment: The environment of the servers.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._pipe: int | None = None
        if SERVERS not in os.environ:
            os.mkfifo(folder / "pipe")
            self._pipe = os.open(folder / "pipe", os.O_RDWR)
            os.environ[SERVERS] = str(folder)
        self.folder = Path(os.environ[SERVERS])

    def python(self, backend: str = "tensorflow", python: str = sys.executable) -> list[str]:
        """Return the command that replaces ``python``, a Python with this backend of Keras."""
        started = self._started(backend)
        if not started.exists():
            with (self.folder / f"{backend}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not started.exists():
                    self._start_all(backend, python)
        # Without site-packages, to start fast.
        return [sys.executable, "-I", "-S", str(Path(__file__).with_name("forked.py")), backend]

    def close(self) -> None:
        """End the servers and their programs, if this process started them."""
        if self._pipe is None:
            return
        del os.environ[SERVERS]
        os.close(self._pipe)
        self._pipe = None
        pids = [pid for file in self.folder.glob("*.started") for pid in file.read_text().split()]
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                ended, _, _ = select.select([pidfd], [], [], _END_TIMEOUT_S)
                os.close(pidfd)
                if not ended:
                    raise TimeoutError(f"fork server {pid} did not end within {_END_TIMEOUT_S:g} s")

    def _started(self, backend: str) -> Path:
        return self.folder / f"{backend}.started"

    def _start_all(self, backend: str, python: str) -> None:
        names = [f"{backend}{number}" for number in range(COUNT)]
        starts = [self._start(name, backend, python) for name in names]
        pids = [self._await(name, start) for name, start in zip(names, starts)]
        new = self.folder / "new"
        new.write_text(" ".join(pids))
        new.rename(self._started(backend))

    def _start(self, name: str, backend: str, python: str) -> subprocess.Popen[str]:
        argv = [python, "-m", "tests.harness.forkserver", str(self.folder / name), backend]
        changes = {
            "KERAS_BACKEND": backend,
            # Where mpirun lets ranks find the MPI that is installed with pip.
            "LD_LIBRARY_PATH": os.pathsep.join(
                [f"{sys.prefix}/lib", *filter(None, [self._environment.get("LD_LIBRARY_PATH")])]
            ),
            "PYTHONHASHSEED": str(random.randrange(1 << 32)),
            # Programs on JAX compile what no other has compiled. That takes a third less time.
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        with (
            (self.folder / f"{name}.log").open("wb") as log,
            open(os.open(self.folder / "pipe", os.O_RDONLY)) as pipe,
        ):
            return subprocess.Popen(
                argv,
                stdin=pipe,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**self._environment, **changes},
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )

    def _await(self, name: str, start: subprocess.Popen[str]) -> str:
        """Wait until a server listens, and return its process id."""
        assert start.stdout is not None
        start.wait(_START_TIMEOUT_S)
        ready, _, _ = select.select([start.stdout], [], [], _START_TIMEOUT_S)
        pid = start.stdout.readline() if ready else ""
        start.stdout.close()
        if not pid:
            log = (self.folder / f"{name}.log").read_text(errors="replace")
            raise RuntimeError(
                f"the fork server did not start within {_START_TIMEOUT_S:g} s:\n{log}"
            )
        return pid.strip()


def can_fork(changes: Mapping[str, str | None]) -> bool:
    """Return whether a fork can apply these changes of the environment."""
    return not any(name.startswith(_READ_AT_START) for name in changes if name not in _READ_LATER)


class _Server:
    """A server that forks programs, in a single thread."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._stop)
        # Process of each client's program.
        self._programs: dict[socket.socket, int] = {}
        self._stopped = False

    def serve(self) -> _Request | None:
        """Serve until the end. In a fork, return its request."""
        while not self._stopped:
            for key, _ in self._selector.select():
                if key.fd in self._selector.get_map() and (request := key.data(key.fileobj)):
                    return request
        for pid in self._programs.values():
            _end(pid)
        return None

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        self._selector.register(client, selectors.EVENT_READ, self._handle)

    def _stop(self, _: int) -> None:
        self._stopped = True

    def _handle(self, client: socket.socket) -> _Request | None:
        """Handle a client's message: a program to start, a signal for the program, or the end."""
        try:
            data, files, _, _ = socket.recv_fds(client, _MESSAGE_BYTES, _MOST_FILES)
        except OSError:
            data, files = b"", []
        pid = self._programs.get(client)
        if not data:
            if pid is not None:
                _end(pid)
            self._forget(client)
        elif pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, int(data))
        elif (pid := os.fork()) == 0:
            _enter_namespaces(_peer(client))
            self._leave()
            return _Request(**ast.literal_eval(data.decode()), files=files)
        else:
            for file in files:
                os.close(file)
            self._programs[client] = pid
            ended = functools.partial(self._reap, pid, client)
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, ended)
        return None

    def _reap(self, pid: int, client: socket.socket, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        if client in self._programs:
            with contextlib.suppress(OSError):
                client.send(str(os.waitstatus_to_exitcode(status)).encode())
            self._forget(client)

    def _forget(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        self._programs.pop(client, None)
        client.close()

    def _leave(self) -> None:
        """Close the server's files in a fork."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd != sys.stdin.fileno():
                os.close(key.fd)
        self._selector.close()


def _peer(client: socket.socket) -> int:
    """Return the process id of the peer."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


def _enter_namespaces(pid: int) -> None:
    """Enter the namespaces of ``pid``, which may be on a host of the test cluster."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("net", "uts", "mnt"):
        with open(f"/proc/{pid}/ns/{kind}") as target, open(f"/proc/self/ns/{kind}") as own:
            if os.path.sameopenfile(target.fileno(), own.fileno()):
                continue
            if libc.setns(target.fileno(), 0) != 0:
                raise OSError(
                    ctypes.get_errno(), f"can't enter the {kind} namespace of process {pid}"
                )


def _end(pid: int) -> None:
    """Kill a program and its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _become(request: _Request) -> None:
    """Run the program as Python does."""
    os.setpgid(0, 0)
    # Move all descriptors away first, because their numbers may overlap the target numbers.
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
    # Python's own generator is seeded again in a fork.
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
    """An exit function that ends a fork before Python clears its modules.

    Clearing them writes to memory shared by all forks, which takes 0.4 s of a core.
    """

    def __init__(self) -> None:
        # Registered first, so it runs last.
        atexit.register(self._leave)
        self._code: int | None = None

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Record the exit code that follows from how the block ends."""
        try:
            yield
            self._code = 0
        except SystemExit as end:
            # Don't read ``code``, because hvdtrain expects the interpreter to read it.
            status = end.args[0] if end.args else None
            self._code = 0 if status is None else status & 0xFF if isinstance(status, int) else 1
            raise
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._code = 1
            raise

    def _leave(self) -> None:
        if self._code is None or _finalizes_mpi():
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError):
            return
        os._exit(self._code)


def _finalizes_mpi() -> bool:
    """Return whether mpi4py will finalize MPI at exit."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or sys.modules["mpi4py"].rc.finalize is False:
        return False
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())


@contextlib.contextmanager
def _blocked(modules: set[str]) -> Iterator[None]:
    """Make imports of these modules fail."""
    sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]
    yield
    for name in modules:
        del sys.modules[name]


class _LoadedTensorFlow:
    """What ``keras.utils.set_random_seed`` uses of TensorFlow.

    With each backend, Keras would import TensorFlow to set its seed, which takes four seconds.
    """

    available = property(lambda self: "tensorflow" in sys.modules)
    random = property(lambda self: sys.modules["tensorflow"].random)


def main() -> None:
    """Serve. In a fork, run the program."""
    # Programs must not be descendants of the first test process.
    if os.fork() != 0:
        os._exit(0)
    path, backend = sys.argv[1:]
    server = _Server(path)
    end = _End()
    for name in (backend, *_PRELOADED):
        importlib.import_module(name)
    with _blocked({"tensorflow", "torch", "jax"} - {backend}):
        for name in _PRELOADED_PACKAGES:
            for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
                # Modules of other frameworks can't be imported.
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)
    vars(sys.modules["keras.src.utils.rng_utils"])["tf"] = _LoadedTensorFlow()
    # Each rank would take 0.02 s of a core to load it.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libmpi.so.40")
    # Garbage collection writes to memory that forks share. Most objects live until the end:
    # collecting them took a fifteenth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    print(os.getpid(), flush=True)
    if (request := server.serve()) is not None:
        with end.expected():
            _become(request)


if __name__ == "__main__":
    main()
