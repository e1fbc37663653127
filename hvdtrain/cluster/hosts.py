"""Hosts and their slots, from ``-H``, a hostfile or the environment of a Slurm job.

A host is a name, an IPv4 address or an IPv6 address. ``node[01-04,07]`` names several hosts. A host
takes one rank per slot, and has one slot by default:

==================  =====================================================================
``-H``              ``a:4,b:4``, ``node[01-04,07]:2``, ``10.0.0.1:2``, ``[fe80::1]:4``, ``me@a:4``
Open MPI            ``a slots=4 max_slots=8``, ``me@a cpu=4``, ``a count=4 user_name=me``
MPICH, Intel MPI    ``a:4``
Horovod             ``a slots=4``, ``a:4``
Slurm               ``node[01-04,07]`` and the tasks per node, ``2(x3),1``
==================  =====================================================================

Hosts get ranks in the order of the text. A host that is named several times gets the sum of its
slots. Names are not case-sensitive.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.errors import ConfigurationError

__all__ = [
    "Host",
    "is_this_host",
    "merge_hosts",
    "own_addresses",
    "parse_hostfile",
    "parse_hosts",
    "slurm_hosts",
    "slurm_task_counts",
    "split_hosts",
    "ssh_user",
]

# A host usually resolves to several addresses that share an interface; two are enough.
_MAX_ADDRESSES = 2

_LIST_EXPECTED = (
    "Expected hosts with their slots (default 1), such as a:4,b:4, node[01-04,07]:2, 10.0.0.1:2, "
    "[fe80::1]:4 or user@a:4."
)
_FILE_EXPECTED = (
    "Expected a host per line: a name, an IPv4 or IPv6 address, or a list such as node[01-04,07], "
    "followed by slots=4 (and max_slots=8), or :4 right after the name, or nothing for one slot. "
    "user@ before the name or user=NAME sets the user for ssh; --ssh-port sets its port. # starts "
    "a comment."
)
# Synonyms in the hostfiles of Open MPI and MPICH, also with "-" instead of "_".
# Source: prrte, src/util/hostfile/hostfile_lex.l
_KEYS = {
    **dict.fromkeys(("slots", "cpu", "count"), "slots"),
    **dict.fromkeys(
        ("max_slots", "slots_max", "max_cpu", "cpu_max", "max_count", "count_max"), "max_slots"
    ),
    **dict.fromkeys(("user", "username", "user_name"), "user"),
}


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host that can run ranks."""

    name: str  # name or address, without brackets
    slots: int  # number of ranks that the host takes
    # maximum number of ranks with ``--oversubscribe``; None if unlimited
    max_slots: int | None = None
    user: str | None = None  # user for ssh; ssh's default if None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigurationError(f"slots of {self.name} must be at least 1, got {self.slots}")
        if self.max_slots is not None and self.max_slots < self.slots:
            raise ConfigurationError(
                f"max_slots of {self.name} must be at least its slots, {self.slots}, got "
                f"{self.max_slots}"
            )


def parse_hosts(text: str) -> list[Host]:
    """Parse the value of ``-H``.

    Raises:
        ConfigurationError: If the list is empty or an entry is invalid.
    """
    try:
        return merge_hosts(
            Host(name=name, slots=1 if slots is None else slots, user=user)
            for user, name, slots in _parse_list(text)
        )
    except ValueError as error:
        raise ConfigurationError(
            f"The list of hosts {text!r} is invalid: {error}. {_LIST_EXPECTED}"
        ) from None


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Parse the content of a hostfile.

    Each line may be in the format of any MPI or of Horovod.

    Raises:
        ConfigurationError: If a line is invalid, or no line names a host. The message contains
            ``path`` and the line.
    """
    hosts: list[Host] = []
    for number, line in enumerate(re.split(r"\r\n?|\n", text.removeprefix("\ufeff")), start=1):
        try:
            hosts += _parse_line(re.sub(r"(^|\s)#.*", "", line).strip())
        except ValueError as error:
            raise ConfigurationError(
                f"{path}, line {number}: {line.strip()!r} is invalid: {error}. {_FILE_EXPECTED}"
            ) from None
    if not hosts:
        raise ConfigurationError(f"{path} contains no hosts. {_FILE_EXPECTED}")
    return merge_hosts(hosts)


def slurm_hosts(environ: Mapping[str, str]) -> list[Host] | None:
    """Return the hosts of the surrounding Slurm allocation, or None outside of Slurm.

    A host has a slot for each task that Slurm assigns to it, or one slot if the number of tasks is
    unknown.

    Raises:
        ConfigurationError: If the variables are invalid or contradict each other, or the job is
            heterogeneous.
    """
    groups = environ.get("SLURM_HET_SIZE", "1")
    if not groups.isdecimal() or int(groups) < 2:
        return _slurm_group(environ, "")
    hosts: list[Host] = []
    for group in range(int(groups)):
        hosts += _slurm_group(environ, f"_HET_GROUP_{group}") or []
    names = ",".join(f"{host.name}:{host.slots}" for host in merge_hosts(hosts))
    raise ConfigurationError(
        f"hvdtrain run can't start a heterogeneous Slurm job, which has {groups} groups, through "
        f"srun. Name the hosts of all groups to start through mpirun and ssh: -H {names}; or start "
        f"the ranks yourself: srun --het-group=0-{int(groups) - 1} --mpi=pmix slurm/train.sh "
        "train.py"
    )


def _slurm_group(environ: Mapping[str, str], suffix: str) -> list[Host] | None:
    """Return the hosts in the Slurm variables that end in ``suffix``."""
    nodes_name, tasks_name = f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}"
    nodes, tasks = environ.get(nodes_name), environ.get(tasks_name)
    if not nodes:
        return None
    try:
        names = [name for name, _ in split_hosts(nodes)]
        counts = slurm_task_counts(tasks) if tasks else [1] * len(names)
        if len(names) != len(counts):
            # For instance under srun -N1 in a job with two nodes: the variables contain the nodes
            # of the job, but the counts of the step.
            raise ValueError(f"there are {len(names)} nodes, but task counts for {len(counts)}")
        return merge_hosts(Host(name=name, slots=count) for name, count in zip(names, counts))
    except ValueError as error:
        raise ConfigurationError(
            f"Slurm set {nodes_name}={nodes!r} and {tasks_name}={tasks!r}, which are invalid: "
            f"{error}. Name the hosts with -H or --hostfile; or, if the variables are left from "
            f"another job, run: unset {nodes_name} {tasks_name}"
        ) from None


def slurm_task_counts(text: str) -> list[int]:
    """Parse Slurm's tasks per node: ``2(x3),1`` stands for 2, 2, 2, 1.

    Raises:
        ValueError: If the text is in a different format.
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            raise ValueError(f"{entry!r} is not a task count such as 4 or 2(x3)")
        counts.extend([int(match[1])] * int(match[2] or 1))
    return counts


def merge_hosts(hosts: Iterable[Host]) -> list[Host]:
    """Merge hosts of the same name into the first one, with the sum of their slots."""
    merged: dict[str, Host] = {}
    for host in hosts:
        first = merged.setdefault(host.name.lower(), host)
        if first is host:
            continue
        if first.user and host.user and first.user != host.user:
            raise ConfigurationError(
                f"{host.name} has two users, {first.user} and {host.user}; name only one of them"
            )
        limited = first.max_slots is not None and host.max_slots is not None
        merged[host.name.lower()] = dataclasses.replace(
            first,
            slots=first.slots + host.slots,
            max_slots=(first.max_slots or 0) + (host.max_slots or 0) if limited else None,
            user=first.user or host.user,
        )
    return list(merged.values())


def ssh_user(remote: Iterable[Host]) -> str | None:
    """Return the ssh user of all remote hosts, or None if they use ssh's default.

    Raises:
        ConfigurationError: If the hosts have different users.
    """
    users = {host.user: host.name for host in remote}
    if len(users) > 1:
        listed = ", ".join(f"{user or 'none'} for {name}" for user, name in users.items())
        raise ConfigurationError(
            f"Hosts must all have the same user for ssh, got {listed}; give each host the same, or "
            "none and set User for each host in ~/.ssh/config."
        )
    return next(iter(users), None)


def split_hosts(text: str) -> list[tuple[str, str | None]]:
    """Split a comma-separated list into hosts and the texts after their colons.

    ``a:4,node[1-2]`` becomes ``[("a", "4"), ("node1", None), ("node2", None)]``.

    Raises:
        ValueError: If an entry is invalid.
    """
    hosts: list[tuple[str, str | None]] = []
    for entry in _split(text):
        bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", entry)
        if bracketed is not None:
            hosts.append((_check_ipv6(bracketed[1]), bracketed[2]))
        elif entry.count(":") > 1:
            # fe80::1:4 is an address; slots require brackets.
            hosts.append((_check_ipv6(entry), None))
        else:
            names, colon, suffix = entry.partition(":")
            hosts += [(name, suffix if colon else None) for name in _expand(names)]
    return hosts


def _parse_line(line: str) -> list[Host]:
    """Return the hosts in a line of a hostfile. The line must not contain a comment."""
    if not line:
        return []
    names, *options = re.sub(r"\s*=\s*", "=", line).split()
    values: dict[str, str] = {}
    for option in options:
        name, equals, value = option.partition("=")
        key = _KEYS.get(name.lower().replace("-", "_"))
        if not equals or key is None:
            raise ValueError(f"{option!r} is neither slots=N, max_slots=N nor user=NAME")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    line_slots = _parse_slots(values["slots"]) if "slots" in values else None
    max_slots = _parse_slots(values["max_slots"]) if "max_slots" in values else None
    line_user = _check_user(values["user"]) if "user" in values else None
    hosts = []
    for user, name, slots in _parse_list(names):
        if slots is not None and line_slots is not None:
            raise ValueError(f"{name} has both :{slots} and slots={line_slots}")
        if user is not None and line_user is not None:
            raise ValueError(f"{name} has both {user}@ and user={line_user}")
        if slots is None:
            # Like Open MPI, default to max_slots.
            slots = (max_slots or 1) if line_slots is None else line_slots
        hosts.append(Host(name=name, slots=slots, max_slots=max_slots, user=user or line_user))
    return hosts


def _parse_list(text: str) -> list[tuple[str | None, str, int | None]]:
    """Return the user, name and slots of each host in a comma-separated list."""
    hosts: list[tuple[str | None, str, int | None]] = []
    for entry in _split(text):
        user, _, host = entry.rpartition("@")
        for name, slots in split_hosts(host if user else entry):
            count = None if slots is None else _parse_slots(slots)
            hosts.append((_check_user(user) if user else None, name, count))
    return hosts


def _split(text: str) -> list[str]:
    """Split at commas, except within brackets."""
    return [entry.strip() for entry in re.split(r",(?![^\[\]]*\])", text)]


def _parse_slots(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{text!r} is not a number of slots")
    return int(text)


def _check_user(text: str) -> str:
    # ssh would take a name that starts with "-" for an option.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
        raise ValueError(f"{text!r} is not a valid user name")
    return text


def _check_ipv6(text: str) -> str:
    import ipaddress  # slow to import and rarely needed

    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise ValueError(f"{text!r} is not a valid IPv6 address") from None
    if percent and not re.fullmatch(r"[A-Za-z0-9_.-]+", zone):
        raise ValueError(f"{text!r} has an invalid zone; expected one such as fe80::1%eth0")
    return text


def _expand(text: str) -> list[str]:
    """Expand ``node[01-02,07]`` to ``["node01", "node02", "node07"]``, and ``a`` to ``["a"]``."""
    if not text:
        raise ValueError("a host is missing")
    # ssh and mpirun would take a name that starts with "-" for an option.
    if not re.fullmatch(r"(?![-.])([A-Za-z0-9_.-]|\[[^\[\]]*\])+", text):
        raise ValueError(
            f"{text!r} is not a valid host: names consist of letters, digits, '-', '_' and '.', do "
            "not start with '-' or '.', and brackets are paired"
        )
    # ClusterShell sorts numbers, so each range is expanded separately. ClusterShell's NodeSet would
    # also accept groups, wildcards and configuration files, and takes eight times as long to
    # import.
    parts = re.split(r"\[([^\[\]]*)\]", text)
    choices = [_expand_ranges(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _expand_ranges(ranges: str) -> list[str]:
    """Expand ``01-03,07`` to ``["01", "02", "03", "07"]``, keeping leading zeros."""
    from ClusterShell.RangeSet import RangeSet, RangeSetParseError

    numbers: list[str] = []
    for part in ranges.split(","):
        # RangeSet would read 1-2-3 as -2 to 3.
        if not re.fullmatch(r"[0-9]+(-[0-9]+)?", part):
            raise ValueError(f"{part!r} in [{ranges}] is neither a number nor a range like 01-04")
        try:
            numbers += RangeSet(part).striter()
        except RangeSetParseError as error:
            raise ValueError(f"the range {part} in [{ranges}] is invalid ({error})") from None
    return numbers


def is_this_host(name: str) -> bool:
    """Return whether a name refers to the host of this process."""
    return name.lower() in ("localhost", "127.0.0.1", "::1", socket.gethostname().lower())


def own_addresses(hosts: Sequence[str]) -> list[str]:
    """Return this host's name and addresses as seen from ``hosts``; loopback if empty."""
    if not hosts:
        return ["127.0.0.1"]
    addresses = []
    for host in hosts:
        try:
            targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, target in targets[:_MAX_ADDRESSES]:
                # Connecting a datagram socket sends nothing; it only looks up the route.
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(target)
                    addresses.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys([*addresses, socket.gethostname()]))
