"""Asks all hosts at once what ``hvdtrain check`` wants to know, and lets them reduce an array."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.bench.results import format_seconds
from hvdtrain.cluster.hosts import is_this_host, own_addresses
from hvdtrain.config import Settings
from hvdtrain.exit_codes import ExitCode
from hvdtrain.launch.attempts import run_job
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import TimeLimits
from hvdtrain.remote.probe_messages import Question
from hvdtrain.remote.problem import Problem
from hvdtrain.remote.remote_probe import (
    Answer,
    Failure,
    FailureKind,
    Way,
    read_answer,
    srun_probe,
    ssh_probe,
)

__all__ = [
    "MeasuredAllreduce",
    "judge_allreduce",
    "measure_allreduce",
    "probe_hosts",
    "show_allreduce",
]

# The probe gives up on what it asks after 16 s.
ANSWER_TIMEOUT_S = 40.0
ENDING_TIMEOUT_S = 2.0
ASKED_AT_ONCE = 64
_MOST_LINES = 12
START_TIMEOUT_S = 60.0
_NOT_STARTED: dict[Way, FailureKind] = {
    "here": "no answer",
    "ssh": "ssh failed",
    "srun": "srun failed",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredAllreduce:
    """The outcome and speed of an allreduce.

    Attributes:
        code: Exit code of the job that it was.
        words: The complaints of the job.
        ranks: How many ranks took part.
        engine: Which of hvdtrain's engines did it.
        right: Whether every rank got the right sum.
        nbytes: Size of the array.
        best_s: Seconds of the quickest one.
        latency_s: Seconds of the quickest one of four bytes.
        bus_bandwidth: Bytes a second that the network or the memory carried, as nccl-tests
            counts them.
    """

    code: int = 0
    words: str = ""
    ranks: int = 0
    engine: str = ""
    right: bool = True
    nbytes: int = 0
    best_s: float = 0.0
    latency_s: float = 0.0
    bus_bandwidth: float = 0.0


def probe_hosts(
    hosts: Mapping[str, int],
    environ: Mapping[str, str],
    *,
    way: Way,
    ssh: Sequence[str] = (),
) -> tuple[Answer, list[Answer]]:
    """Ask this host, and all ``hosts`` at the same time.

    Args:
        hosts: Ranks of each host by its name.
        environ: The environment of the commands.
        way: How to start something on a host; ``here`` asks none but this one.
        ssh: Options of ssh.

    Returns:
        The answer of this host, and those of ``hosts``, in their order.
    """
    remote = [name for name in hosts if way == "srun" or not is_this_host(name)]
    environ = {**environ, "LC_ALL": "C"}
    with (
        _token_file() as (token_file, token),
        # Hosts connect to it as the agents of ranks do. Nobody accepts: the kernel does, for as
        # many as are let wait.
        socket.create_server(("", 0), backlog=1024) as listener,
    ):
        question = Question(
            names=tuple(hosts),
            folder=os.getcwd(),
            token_file=token_file,
            token=token,
            port=listener.getsockname()[1],
        )
        with ThreadPoolExecutor(max_workers=min(ASKED_AT_ONCE, 1 + len(remote))) as pool:
            mine = pool.submit(_ask_one, "", "here", question, remote[:1], environ, ssh)
            theirs = {
                name: pool.submit(_ask_one, name, way, question, [name], environ, ssh)
                for name in remote
            }
            try:
                here = mine.result()
                asked = {name: theirs[name].result() if name in theirs else here for name in hosts}
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return here, [
        dataclasses.replace(asked[name], host=name, ranks=ranks) for name, ranks in hosts.items()
    ]


def measure_allreduce(
    ranks: int | None, hosts: str | None, hostfile: str | None, environ: Mapping[str, str]
) -> MeasuredAllreduce:
    """Start the ranks as ``hvdtrain run`` does, and time an allreduce over them.

    Raises:
        ConfigurationError: The ranks don't fit on the hosts.
        LaunchError: There is no usable mpirun or srun.
    """
    mark = f"hvdtrain-allreduce-{secrets.token_hex(4)} "
    job = Job(
        program=(sys.executable, "-P", "-m", "hvdtrain.check.allreduce_program", mark),
        ranks=ranks,
        hosts=hosts,
        hostfile=hostfile,
        settings=Settings(share_gpus=True),
        time_limits=TimeLimits(start_s=START_TIMEOUT_S),
        chief_only=True,
    )
    output, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(complaints):
        code = run_job(job, {"HVDTRAIN_TIMEOUT_S": "60", **environ})
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    for line in output.getvalue().splitlines():
        _, found, text = line.partition(mark)
        if found and code == 0:
            return MeasuredAllreduce(**json.loads(text))
    return MeasuredAllreduce(
        code=code or ExitCode.CANNOT_START, words=complaints.getvalue().strip()
    )


def show_allreduce(measured: MeasuredAllreduce) -> str:
    """Format an allreduce that is right as one line."""
    return (
        f"allreduce over {measured.ranks} ranks ({measured.engine}): "
        f"{measured.nbytes / 1e6:.1f} MB in {format_seconds(measured.best_s)}, "
        f"{measured.nbytes / measured.best_s / 1e9:.2f} GB/s "
        f"(bus {measured.bus_bandwidth / 1e9:.2f} GB/s); "
        f"4 bytes in {format_seconds(measured.latency_s)}"
    )


def judge_allreduce(measured: MeasuredAllreduce, answers: Sequence[Answer]) -> Problem | None:
    """Return what is wrong with the allreduce; None if nothing is."""
    if measured.code == 0 and measured.right:
        return None
    if measured.code == 0:
        return Problem(
            found=f"an allreduce over {measured.ranks} ranks gave wrong sums",
            expected="the same right sum on every rank",
            remedy="find the host: check the others without it, hvdtrain check -H a,b",
        )
    lines = [line.removeprefix("hvdtrain run: ") for line in measured.words.splitlines()]
    said = "\n".join(f"    {line}" for line in lines[-_MOST_LINES:])
    hangs = measured.code == ExitCode.HANG
    what = "did not end in time" if hangs else f"failed (exit code {measured.code})"
    return Problem(
        found=f"the hosts are well one by one, but an allreduce over all {what}"
        + (f":\n{said}" if said else ""),
        expected="all ranks reduce an array together",
        remedy=_remedy(answers),
    )


def _remedy(answers: Sequence[Answer]) -> str:
    facts = [answer.facts for answer in answers if answer.facts is not None]
    interfaces = {one.interface for one in facts} - {"", "lo"}
    name = interfaces.pop() if len(interfaces) == 1 else "eth0"
    if len(facts) < 2:
        return "see what the ranks said above; hvdtrain run shows all of it"
    return (
        "let the hosts reach each other at all ports, and keep MPI to one network, such as "
        f"{name}: export OMPI_MCA_btl_tcp_if_include={name} (Open MPI) or "
        f"FI_TCP_IFACE={name} (MPICH, Intel MPI)"
    )


def _ask_one(
    host: str,
    way: Way,
    question: Question,
    towards: Sequence[str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
) -> Answer:
    """Start the probe on ``host`` and wait for its answer; never raises for what goes wrong.

    It is told the addresses of this host on the way ``towards`` others.
    """
    question = dataclasses.replace(question, addresses=tuple(own_addresses(towards)))
    asked = json.dumps(dataclasses.asdict(question))
    program = (sys.executable, "-P", "-m", "hvdtrain.remote.host_probe", asked)
    argv: Sequence[str] = program
    if way == "ssh":
        argv = ssh_probe(host, program, environ, ssh)
    elif way == "srun":
        argv = srun_probe(host, program)
    asked_s = time.time()
    try:
        code, stdout, stderr = _run(argv, environ)
    except OSError as error:
        words = f"{argv[0]}: {error.strerror}"
        return Answer(host=host, failure=Failure(kind=_NOT_STARTED[way], words=words))
    answered_s = time.time()
    found = read_answer(way, code, stdout, stderr)
    if isinstance(found, Failure):
        return Answer(host=host, failure=found)
    return Answer(host=host, facts=found, asked_s=asked_s, answered_s=answered_s)


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Exit code, None if it took too long, and what was printed."""
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    code: int | None = None
    try:
        stdout, stderr = process.communicate(timeout=ANSWER_TIMEOUT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        # srun ends its step when it is asked to, and leaves it behind when it is killed.
        process.terminate()
        try:
            stdout, stderr = process.communicate(timeout=ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            stdout, stderr = b"", b""
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_TIMEOUT_S)
    return code, stdout.decode(errors="replace"), stderr.decode(errors="replace")


@contextlib.contextmanager
def _token_file() -> Iterator[tuple[str, str]]:
    """A file in the current folder, and what is in it; no name where none can be written."""
    token = secrets.token_hex(16)
    path = Path(f".hvdtrain-check-{secrets.token_hex(8)}")
    try:
        try:
            path.write_text(token)
            name = path.name
        except OSError:
            name = ""
        yield name, token
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
