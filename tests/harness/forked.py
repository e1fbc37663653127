"""Run a program in a fork server: ``python -I -S forked.py BACKEND PROGRAM [ARGUMENT ...]``.

BACKEND is a backend of Keras, whose server forks. PROGRAM is a script, or ``-m`` and a module, or
``-c`` and code, as for Python. The fork gets this process's files, variables, working directory and
cores, and on the test cluster its host. Signals are forwarded to it, and this process ends with the
exit code or signal of the fork.

The fork has a different process group, different limits and a different control group, and stopping
it is not visible here. Tests of these start Python itself.

This script runs for every rank. It imports only C modules, so that it starts fast.
"""

import _signal as signal
import _socket as socket
import os
import sys

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGABRT),
)


def main() -> None:
    rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{os.environ['HVDTRAIN_TEST_FORKSERVERS']}/{sys.argv[1]}{rank % 2}")
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if file != server.fileno() and _is_open(file)]
    request = {
        "argv": sys.argv[2:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
        "numbers": files,
    }
    rights = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
    server.sendmsg([repr(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    for number in _FORWARDED:
        signal.signal(number, lambda number, frame: server.send(b"%d" % number))
    # Readers of a pipe must see its end when the fork closes it.
    for file in files:
        os.close(file)
    # An empty message: the server has ended.
    code = int(server.recv(16) or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(file: int) -> bool:
    """Return whether a file is open. A listing of open files also contains its own file."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
