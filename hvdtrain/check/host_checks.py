"""The checks of ``hvdtrain check``, which find problems in the hosts' answers.

Each check is a function. It takes the answers of the launcher and of all hosts, and yields
problems.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Sequence

from hvdtrain.check.software_checks import check_backend, check_versions
from hvdtrain.cluster.gpu_problems import ONE_PART, different_models, gpu_problems
from hvdtrain.remote.keras_frameworks import FRAMEWORKS
from hvdtrain.remote.problem import (
    Problem,
    answered,
    failure_problems,
    format_bytes,
    hosts_by,
)
from hvdtrain.remote.remote_probe import Answer, Method, clock_offset_s
from hvdtrain.text import plural

__all__ = ["find_problems"]

# The free space in /dev/shm that a host's ranks need for full speed.
SHM_EXPECTED_BYTES = 200_000_000
MAX_CLOCK_OFFSET_S = 1.0

Check = Callable[[Answer, Sequence[Answer]], Iterator[Problem]]


def _warning(hosts: Iterable[str], summary: str, expected: str, remedy: str) -> Problem:
    return Problem(
        hosts=tuple(hosts), summary=summary, expected=expected, remedy=remedy, is_error=False
    )


def _error(hosts: Iterable[str], summary: str, expected: str, remedy: str) -> Problem:
    return Problem(hosts=tuple(hosts), summary=summary, expected=expected, remedy=remedy)


def _check_folder(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that all hosts share the working directory."""
    groups = hosts_by(answers, lambda facts: facts.folder)
    if absent := groups.get("absent"):
        yield _error(
            absent,
            "the working directory does not exist there",
            "the program and its data at the same path on every host",
            "start in a directory that all hosts share, such as one on NFS, or copy the directory "
            "there",
        )
    if other := groups.get("other"):
        yield _warning(
            other,
            "the working directory exists there, but is not shared",
            "a shared directory, so that a file that is written here is visible there",
            "start in a shared directory, or keep the program identical on all hosts and put "
            "checkpoints on a file system that all hosts share",
        )
    # For the launcher, this fact is empty only if the working directory is not writable.
    if launcher.facts is not None and not launcher.facts.folder:
        yield _warning(
            (),
            "the working directory is not writable, so it is unknown whether hosts share it",
            "a directory that all hosts share, for checkpoints and logs",
            "start in a directory that you can write to",
        )


def _check_names(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that each host can resolve all other hosts' names, and gets no loopback address."""
    # If the launcher can't resolve a name either, that has been reported as a failure.
    reported = {
        answer.host
        for answer in answers
        if answer.failure is not None and answer.failure.kind == "unknown name"
    }
    unknown: dict[str, list[str]] = {}
    loopback: dict[str, list[str]] = {}
    for host, facts in answered(answers):
        for name, addresses in facts.names.items():
            if name == host or name in reported:
                continue
            if not addresses:
                unknown.setdefault(name, []).append(host)
            elif any(map(_is_loopback, addresses)):
                loopback.setdefault(name, []).append(host)
    for name, hosts in unknown.items():
        yield _error(
            hosts,
            f"the name {name} can't be resolved there",
            "every host resolves the names of all others",
            f"add {name} to DNS, or to /etc/hosts there: getent hosts {name} must find it",
        )
    for name, hosts in loopback.items():
        yield _error(
            hosts,
            f"the name {name} resolves to a loopback address there, which is the host itself",
            "an address at which other hosts can reach that host",
            f"use names that all hosts know, not localhost, or remove {name} from the lines of "
            "127.0.0.1, 127.0.1.1 and ::1 in /etc/hosts",
        )


def _check_machines(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that each machine is listed under one name only."""
    for machine, hosts in hosts_by(answers, lambda facts: facts.machine).items():
        if machine and len(hosts) > 1:
            yield _warning(
                hosts,
                "these names belong to the same machine",
                "each machine is listed once",
                f"list it once, with all its slots, as in -H {hosts[0]}:{len(hosts)}",
            )


def _check_connections(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that hosts can connect to the launcher."""
    for host, facts in answered(answers):
        if facts.back_error:
            yield _error(
                [host],
                f"it can't connect to the launcher over TCP ({facts.back_error})",
                "ranks can connect to the launcher and to each other at any port",
                "allow the cluster's hosts in this host's firewall, or start from one of the "
                "cluster's hosts",
            )


def _check_memory(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that shared memory has space, and that locked memory is unlimited for InfiniBand."""
    for answer in answers:
        free = answer.facts.shm_free_bytes if answer.facts else None
        if free is not None and free < SHM_EXPECTED_BYTES and answer.ranks > 1:
            total = answer.facts.shm_bytes if answer.facts else None
            yield _warning(
                [answer.host],
                f"/dev/shm has {format_bytes(free)} free of {format_bytes(total or 0)}",
                f"{format_bytes(SHM_EXPECTED_BYTES)} for full speed; with less, a host's ranks "
                "exchange data in smaller chunks or by messages",
                "remove unused files there, or enlarge it: mount -o remount,size=1G /dev/shm; for "
                "a container: docker run --shm-size=1g",
            )
    locked = [
        host
        for host, facts in answered(answers)
        if facts.infiniband and facts.memlock_bytes not in (None, -1)
    ]
    if locked:
        yield _warning(
            locked,
            "InfiniBand is present, but locked memory is limited (ulimit -l)",
            "no limit, because InfiniBand sends from locked memory",
            "set * - memlock unlimited in /etc/security/limits.conf (under Slurm: "
            "LimitMEMLOCK=infinity in slurmd.service), then log in again",
        )


def _check_clock(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that clocks agree. This matters when logs and file times are compared."""
    for answer in answers:
        if answer.facts is None:
            continue
        offset_s, error_s = clock_offset_s(answer)
        if abs(offset_s) - error_s > MAX_CLOCK_OFFSET_S:
            side = "ahead of" if offset_s > 0 else "behind"
            yield _warning(
                [answer.host],
                f"its clock is {abs(offset_s):.1f} s {side} the launcher's",
                f"at most {MAX_CLOCK_OFFSET_S:g} s, because logs and file times are compared",
                "synchronize it with NTP: timedatectl set-ntp true, or chronyc makestep",
            )


def _check_load(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that there is a core for every rank, and that hosts are idle."""
    for answer in answers:
        facts = answer.facts
        if facts is None or not facts.cores:
            continue
        if answer.ranks > facts.cores:
            yield _warning(
                [answer.host],
                f"{answer.ranks} ranks share {plural(facts.cores, 'core')}",
                "at least one core per rank",
                _fewer_ranks(answer.host, facts.cores),
            )
        if facts.load is not None and facts.load > facts.cores:
            yield _warning(
                [answer.host],
                f"it is busy: its load is {facts.load:.1f} on {plural(facts.cores, 'core')}",
                "an idle host, because all ranks wait for the slowest",
                "find the processes with top, or leave the host out",
            )


def _check_errors(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that all parts of the probe succeeded."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for host, facts in answered(answers):
        for item in facts.errors.items():
            reasons.setdefault(item, []).append(host)
    for (part, reason), hosts in reasons.items():
        yield _warning(
            hosts,
            f"this could not be checked: {part} ({reason})",
            "an answer",
            "check there whether a file system or driver hangs: dmesg | tail",
        )


def _check_gpus(launcher: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that GPUs work, that each rank can have a GPU, and that all GPUs are identical."""
    for host, facts in answered(answers):
        if facts.gpu_error:
            yield _error(
                [host],
                facts.gpu_error.rstrip("."),
                "GPUs that CUDA can use",
                "compare nvidia-smi there; then reload the driver or reboot the host; to train on "
                "the CPU: export CUDA_VISIBLE_DEVICES=-1",
            )
    for answer in answers:
        gpus = answer.facts.usable_gpus if answer.facts else []
        if 0 < len(gpus) < answer.ranks:
            fewer = (
                f"{_fewer_ranks(answer.host, len(gpus))}; or share GPUs: hvdtrain run --share-gpus"
            )
            yield _error(
                [answer.host],
                f"it has {plural(len(gpus), 'GPU')} for {answer.ranks} ranks",
                "a GPU for every rank",
                f"{fewer}; {ONE_PART}" if " MIG " in gpus[0].model else fewer,
            )
    backend = launcher.facts.backend if launcher.facts else ""
    for host, facts in answered(answers):
        if facts.usable_gpus and facts.backend_gpus == 0:
            title = FRAMEWORKS[backend].title
            yield _error(
                [host],
                f"{title} sees none of its {plural(len(facts.usable_gpus), 'GPU')}",
                f"a {title} that can use the GPUs",
                f"install {FRAMEWORKS[backend].with_gpus}; to train on the CPU: export "
                "CUDA_VISIBLE_DEVICES=-1",
            )
    kinds = different_models(
        (host, f"{gpu.model}, driver {gpu.driver}", gpu.memory_bytes)
        for host, facts in answered(answers)
        for gpu in facts.usable_gpus
    )
    if kinds:
        yield _warning(
            (host for host, facts in answered(answers) if facts.gpus),
            f"GPUs differ: {kinds}",
            "identical GPUs and drivers, because all ranks wait for the slowest",
            "train on identical hosts, and install the same driver",
        )
    for host, facts in answered(answers):
        # Parts of a GPU share its faults.
        found = dict.fromkeys(problem for gpu in facts.gpus for problem in gpu_problems(gpu))
        for problem in found:
            yield _warning([host], problem.summary, problem.expected, problem.remedy)


def find_problems(
    launcher: Answer,
    answers: Sequence[Answer],
    *,
    method: Method,
    python: str,
    use_gpus: bool = True,
) -> list[Problem]:
    """Return the problems that all checks find, errors first."""
    checks: list[Check] = [
        *(check_versions, check_backend, _check_folder, _check_names, _check_machines),
        *(_check_connections, _check_memory, _check_clock, _check_load, _check_errors),
    ]
    if use_gpus:
        checks.append(_check_gpus)
    problems = [*failure_problems(answers, method=method, python=python)]
    for check in checks:
        problems += check(launcher, answers)
    return sorted(problems, key=lambda problem: not problem.is_error)


def _fewer_ranks(host: str, ranks: int) -> str:
    return f"start fewer ranks there: -H {host}:{ranks}, or under Slurm --ntasks-per-node={ranks}"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
