"""Stands for a program that a fork server runs: ``python -I -S forked.py PROGRAM [ARGUMENT ...]``.

PROGRAM is a script, or ``-m`` and a module, or ``-c`` and code, as for Python. The fork has this
process's files, variables, folder and cores, and on the test cluster its host. Signals that come
here are sent on to it, and this process ends as the fork does, or takes it along.

The fork is not in this process's group and does not have its limits or control group, and that it
is stopped can't be seen here: tests of such things start Python itself.

It imports next to nothing, as it runs for every rank: of signals and sockets what is in C, no JSON.
"""

import _signal as signal
import _socket as socket
import os
import sys

_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_SENT_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGABRT),
)


def main() -> None:
    rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(f"{os.environ['HVDTRAIN_TEST_FORKSERVERS']}/{rank % 2}")
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if file != server.fileno() and _is_open(file)]
    request = {
        "argv": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": list(os.sched_getaffinity(0)),
        "numbers": files,
    }
    rights = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
    server.sendmsg([repr(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    for number in _SENT_ON:
        signal.signal(number, lambda number, frame: server.send(b"%d" % number))
    # The fork has them now: who reads from a pipe is to see its end when the fork closes it.
    for file in files:
        os.close(file)
    # Nothing is said by a server that has ended.
    code = int(server.recv(16) or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(file: int) -> bool:
    """Not so for what listed them."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
