"""Probes all hosts at the same time, and measures an allreduce over all ranks."""

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
from pathlib import Path

from hvdtrain.cluster.hosts import is_this_host, own_addresses
from hvdtrain.config import Settings
from hvdtrain.errors import LaunchError
from hvdtrain.exit_codes import ExitCode
from hvdtrain.launch.attempts import run_job
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import TimeLimits
from hvdtrain.remote.host_probe import ProbeRequest
from hvdtrain.remote.problem import Problem
from hvdtrain.remote.remote_probe import (
    Answer,
    Failure,
    FailureKind,
    Method,
    read_answer,
    srun_probe,
    ssh_probe,
)

__all__ = ["allreduce_problem", "measure_allreduce", "probe_hosts"]

# A probe takes at most 26 s; the rest is for ssh or srun.
ANSWER_TIMEOUT_S = 40.0
END_TIMEOUT_S = 2.0
MAX_PROBES = 64
START_TIMEOUT_S = 60.0
_MAX_LINES = 12
_NOT_STARTED: dict[Method, FailureKind] = {
    "local": "no answer",
    "ssh": "ssh failed",
    "srun": "srun failed",
}


def probe_hosts(
    hosts: Mapping[str, int],
    environ: Mapping[str, str],
    *,
    method: Method,
    ssh: Sequence[str] = (),
    details: bool = False,
    imports: bool = True,
) -> tuple[Answer, list[Answer]]:
    """Probe this host and all ``hosts`` at the same time.

    ``hosts`` maps the name of each host to its number of ranks.

    Returns:
        The answer of this host, and the answers of ``hosts`` in their order.
    """
    remote = [name for name in hosts if method == "srun" or not is_this_host(name)]
    environ = {**environ, "LC_ALL": "C"}
    with (
        _token_file() as (token_file, token),
        # Hosts connect to this socket to test the way back. This process never accepts the
        # connections: the kernel completes them, up to the backlog.
        socket.create_server(("", 0), backlog=1024) as listener,
    ):
        request = ProbeRequest(
            names=tuple(hosts),
            folder=os.getcwd(),
            token_file=token_file,
            token=token,
            port=listener.getsockname()[1],
            details=details,
            imports=imports,
        )
        with ThreadPoolExecutor(max_workers=min(MAX_PROBES, 1 + len(remote))) as pool:
            local = pool.submit(_probe, "", "local", request, remote[:1], environ, ssh)
            probes = {
                name: pool.submit(_probe, name, method, request, [name], environ, ssh)
                for name in remote
            }
            try:
                launcher = local.result()
                answers = {name: probes.get(name, local).result() for name in hosts}
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return launcher, [
        dataclasses.replace(answers[name], host=name, ranks=ranks) for name, ranks in hosts.items()
    ]


def measure_allreduce(
    ranks: int,
    hosts: str | None,
    hostfile: str | None,
    environ: Mapping[str, str],
    answers: Sequence[Answer],
) -> str | Problem:
    """Start the ranks as ``hvdtrain run`` does, and time an allreduce over them.

    Returns:
        One line with the times, or a problem.

    Raises:
        ConfigurationError: If the ranks don't fit on the hosts.
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
    stdout, stderr = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = run_job(job, {"HVDTRAIN_TIMEOUT_S": "60", **environ})
    except LaunchError as error:
        return Problem(
            summary=str(error),
            expected="a launcher that starts ranks on all hosts",
            remedy="follow the message above",
        )
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    _, has_result, text = stdout.getvalue().partition(mark)
    if code != 0 or not has_result:
        return allreduce_problem(code or ExitCode.CANNOT_START, stderr.getvalue(), answers)
    if line := text.splitlines()[0]:
        return line
    return Problem(
        summary=f"an allreduce over {ranks} ranks returned wrong sums",
        expected="the correct sum on every rank",
        remedy="find the faulty host by leaving out one host at a time: hvdtrain check -H a,b",
    )


def allreduce_problem(code: int, stderr: str, answers: Sequence[Answer]) -> Problem:
    """Return the problem for an allreduce that failed with this exit code and these messages."""
    lines = [line.removeprefix("hvdtrain run: ") for line in stderr.strip().splitlines()]
    messages = "".join(f"\n    {line}" for line in lines[-_MAX_LINES:])
    outcome = "timed out" if code == ExitCode.HANG else f"failed (exit code {code})"
    facts = [answer.facts for answer in answers if answer.facts is not None]
    interfaces = {one.interface for one in facts} - {"", "lo"}
    name = interfaces.pop() if len(interfaces) == 1 else "eth0"
    remedy = (
        "let the hosts connect to each other at all ports, and restrict MPI to one network, such "
        f"as {name}: export OMPI_MCA_btl_tcp_if_include={name} (Open MPI) or "
        f"FI_TCP_IFACE={name} (MPICH, Intel MPI)"
    )
    if len(facts) < 2:
        remedy = "see the messages above; hvdtrain run shows all of them"
    return Problem(
        summary=f"each host is ready, but an allreduce over all {outcome}"
        + (f":{messages}" if messages else ""),
        expected="an allreduce over all ranks succeeds",
        remedy=remedy,
    )


def _probe(
    host: str,
    method: Method,
    request: ProbeRequest,
    destinations: Sequence[str],
    environ: Mapping[str, str],
    ssh: Sequence[str],
) -> Answer:
    """Run the probe on a host.

    The probe connects to the launcher to test the connection. Of the launcher's addresses, it tries
    those from which the launcher reaches ``destinations``.
    """
    request = dataclasses.replace(request, addresses=tuple(own_addresses(destinations)))
    text = json.dumps(dataclasses.asdict(request))
    program = (sys.executable, "-P", "-m", "hvdtrain.remote.host_probe", text)
    argv: Sequence[str] = program
    if method == "ssh":
        argv = ssh_probe(host, program, environ, ssh)
    elif method == "srun":
        argv = srun_probe(host, program)
    asked_s = time.time()
    try:
        code, stdout, stderr = _run(argv, environ)
    except OSError as error:
        message = f"{argv[0]}: {error.strerror}"
        return Answer(host=host, failure=Failure(kind=_NOT_STARTED[method], message=message))
    answered_s = time.time()
    result = read_answer(method, code, stdout, stderr)
    if isinstance(result, Failure):
        return Answer(host=host, failure=result)
    return Answer(host=host, facts=result, asked_s=asked_s, answered_s=answered_s)


def _run(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[int | None, str, str]:
    """Run a command and return its exit code (None after a time-out), stdout and stderr."""
    process = subprocess.Popen(
        argv,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    try:
        stdout, stderr = process.communicate(timeout=ANSWER_TIMEOUT_S)
        return process.returncode, stdout, stderr
    except subprocess.TimeoutExpired:
        # srun ends its step after SIGTERM, but leaves it running after SIGKILL.
        process.terminate()
    try:
        stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        stdout = stderr = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_TIMEOUT_S)
    return None, stdout, stderr


@contextlib.contextmanager
def _token_file() -> Iterator[tuple[str, str]]:
    """Yield the name and content of a file in the working directory; no name if not writable."""
    token = secrets.token_hex(16)
    path = Path(f".hvdtrain-check-{secrets.token_hex(8)}")
    try:
        name = ""
        with contextlib.suppress(OSError):
            path.write_text(token)
            name = path.name
        yield name, token
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
