"""Hosts and how many ranks each takes, as named by ``-H``, by a hostfile or by Slurm.

A host is a name, an IPv4 or an IPv6 address; ``node[01-04,07]`` stands for several. Each takes as
many ranks as it has slots, one where nothing is said:

==================  =====================================================================
``-H``              ``a:4,b:4``, ``node[01-04,07]:2``, ``10.0.0.1:2``, ``[fe80::1]:4``, ``me@a:4``
Open MPI            ``a slots=4 max_slots=8``, ``me@a cpu=4``, ``a count=4 user_name=me``
MPICH, Intel MPI    ``a:4``
Horovod             ``a slots=4``, ``a:4``
Slurm               ``node[01-04,07]`` and the tasks per node, ``2(x3),1``
==================  =====================================================================

Hosts stay in the order of the text, since it decides which ranks they get. A host that is named
again gets the slots of both; names compare without case.
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
    "read_names",
    "slurm_hosts",
    "ssh_user",
]

# Addresses of one host that are tried; more would be the same interfaces again.
_TRIED = 2

_LIST_EXPECTED = (
    "Expected hosts with the number of ranks that each takes (1 where none is given), like "
    "a:4,b:4, node[01-04,07]:2, 10.0.0.1:2, [fe80::1]:4 or user@a:4."
)
_FILE_EXPECTED = (
    "Expected one host a line: its name, IPv4 or IPv6 address, or a list like node[01-04,07]; "
    "then slots=4 (and max_slots=8), or :4 right behind the name, or nothing for one slot; "
    "user@ before the name or user=NAME for the user of ssh, whose port --ssh-port sets; # starts "
    "a comment."
)
# Synonyms in Open MPI's hostfiles, and in MPICH's; with "-" as with "_".
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
    """A host that ranks can be started on.

    Attributes:
        name: Name or address, without brackets.
        slots: Ranks that it takes.
        max_slots: Ranks that it takes at most when more are asked for than all hosts have slots;
            ``None`` for any number.
        user: The user to log in as; ``None`` for the one that ssh chooses.
    """

    name: str
    slots: int
    max_slots: int | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ConfigurationError(f"{self.name} has slots={self.slots}, expected 1 or more")
        if self.max_slots is not None and self.max_slots < self.slots:
            raise ConfigurationError(
                f"{self.name} has max_slots={self.max_slots}, expected at least its slots, "
                f"{self.slots}"
            )


def parse_hosts(text: str) -> list[Host]:
    """Read the value of ``-H``.

    Raises:
        ConfigurationError: Something in it is no host, or there is none.
    """
    try:
        return merge_hosts(
            Host(name=name, slots=1 if slots is None else slots, user=user)
            for user, name, slots in _read_list(text)
        )
    except ValueError as error:
        raise ConfigurationError(
            f"The list of hosts {text!r} can't be read: {error}. {_LIST_EXPECTED}"
        ) from None


def parse_hostfile(text: str, path: str) -> list[Host]:
    """Read the content of a hostfile; lines of several dialects may stand side by side.

    Raises:
        ConfigurationError: A line can't be read, or there is no host; the message names the path,
            the line and what is accepted.
    """
    hosts: list[Host] = []
    for number, line in enumerate(re.split(r"\r\n?|\n", text.removeprefix("\ufeff")), start=1):
        try:
            hosts += _read_line(re.sub(r"(^|\s)#.*", "", line).strip())
        except ValueError as error:
            raise ConfigurationError(
                f"{path}, line {number}: {line.strip()!r} can't be read: {error}. {_FILE_EXPECTED}"
            ) from None
    if not hosts:
        raise ConfigurationError(f"{path} names no host. {_FILE_EXPECTED}")
    return merge_hosts(hosts)


def slurm_hosts(environ: Mapping[str, str]) -> list[Host] | None:
    """The hosts of the Slurm allocation that ``environ`` tells of; ``None`` outside of one.

    A host takes as many ranks as Slurm would start tasks on it; one where Slurm doesn't tell.

    Raises:
        ConfigurationError: The variables can't be read or contradict each other, or the job is
            heterogeneous.
    """
    groups = environ.get("SLURM_HET_SIZE", "1")
    if groups.isdecimal() and int(groups) > 1:
        raise _heterogeneous(int(groups), environ)
    return _slurm_group(environ, "")


def _heterogeneous(groups: int, environ: Mapping[str, str]) -> ConfigurationError:
    """Return an error that names the hosts of all groups."""
    hosts: list[Host] = []
    for group in range(groups):
        hosts += _slurm_group(environ, f"_HET_GROUP_{group}") or []
    listed = ",".join(f"{host.name}:{host.slots}" for host in merge_hosts(hosts))
    return ConfigurationError(
        f"This Slurm job is heterogeneous, with {groups} groups, which hvdtrain run can't start "
        f"through srun. Name the hosts of all groups to start through mpirun and ssh: -H {listed}; "
        f"or start the ranks yourself: srun --het-group=0-{groups - 1} --mpi=pmix slurm/train.sh "
        "train.py"
    )


def _slurm_group(environ: Mapping[str, str], suffix: str) -> list[Host] | None:
    """Read the hosts from the variables of Slurm that end in ``suffix``."""
    listing, counting = f"SLURM_JOB_NODELIST{suffix}", f"SLURM_TASKS_PER_NODE{suffix}"
    nodes, tasks = environ.get(listing), environ.get(counting)
    if not nodes:
        return None
    try:
        names = [name for name, _ in read_names(nodes)]
        counts = _task_counts(tasks) if tasks else [1] * len(names)
        if len(names) != len(counts):
            # srun -N1 in a job of two nodes: the list is the job's, the counts are the step's.
            raise ValueError(f"the list names {len(names)}, but there are tasks for {len(counts)}")
        return merge_hosts(Host(name=name, slots=count) for name, count in zip(names, counts))
    except ValueError as error:
        raise ConfigurationError(
            f"Slurm set {listing}={nodes!r} and {counting}={tasks!r}, which can't be used: "
            f"{error}. Name the hosts with -H or --hostfile; or, if they are left from another "
            f"job, run: unset {listing} {counting}"
        ) from None


def merge_hosts(hosts: Iterable[Host]) -> list[Host]:
    """Each host once, where it comes first and as it is spelled there, with all its slots."""
    merged: dict[str, Host] = {}
    for host in hosts:
        first = merged.setdefault(host.name.lower(), host)
        if first is host:
            continue
        if first.user and host.user and first.user != host.user:
            raise ConfigurationError(
                f"{host.name} has the users {first.user} and {host.user}; name one"
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
    """Return the user to log in as on all ``remote`` hosts; ``None`` for the one that ssh chooses.

    Raises:
        ConfigurationError: The hosts have different users.
    """
    users = {host.user: host.name for host in remote}
    if len(users) > 1:
        shown = ", ".join(f"{user or 'none'} for {name}" for user, name in users.items())
        raise ConfigurationError(
            f"Hosts must all have the same user for ssh, got {shown}; give each host the same, or "
            "none and set User for each host in ~/.ssh/config."
        )
    return next(iter(users), None)


def read_names(text: str) -> list[tuple[str, str | None]]:
    """The hosts that ``text`` names, each with what stands behind its colon, if anything does.

    Raises:
        ValueError: With the reason only; the caller says where it is.
    """
    hosts: list[tuple[str, str | None]] = []
    for entry in _split(text):
        names, behind = _read_entry(entry)
        hosts += [(name, behind) for name in names]
    return hosts


# What follows raises ValueError, too.


def _read_line(line: str) -> list[Host]:
    """The hosts of one line of a hostfile, comments removed."""
    if not line:
        return []
    names, *words = re.sub(r"\s*=\s*", "=", line).split()
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        meaning = _KEYS.get(key.lower().replace("-", "_"))
        if not equals or meaning is None:
            raise ValueError(f"{word!r} is neither slots=N, max_slots=N nor user=NAME")
        if meaning in values:
            raise ValueError(f"it has {meaning} twice")
        values[meaning] = value
    own, most = (_count(values[key]) if key in values else None for key in ("slots", "max_slots"))
    named = _user(values["user"]) if "user" in values else None
    hosts = []
    for user, name, slots in _read_list(names):
        if slots is not None and own is not None:
            raise ValueError(f"{name} has :{slots} and slots={own}, expected one")
        if user is not None and named is not None:
            raise ValueError(f"{name} has {user}@ and user={named}, expected one")
        # Open MPI starts as many ranks as it may at most where nothing else is said.
        slots = next((count for count in (slots, own, most or None) if count is not None), 1)
        hosts.append(Host(name=name, slots=slots, max_slots=most, user=user or named))
    return hosts


def _read_list(text: str) -> list[tuple[str | None, str, int | None]]:
    """Users, names and slots of hosts separated by commas."""
    hosts: list[tuple[str | None, str, int | None]] = []
    for entry in _split(text):
        user, _, rest = entry.rpartition("@")
        for name, slots in read_names(rest if user else entry):
            count = None if slots is None else _count(slots)
            hosts.append((_user(user) if user else None, name, count))
    return hosts


def _split(text: str) -> list[str]:
    # Commas inside brackets separate numbers.
    return [entry.strip() for entry in re.split(r",(?![^\[\]]*\])", text)]


def _user(text: str) -> str:
    # A name that starts with "-" would reach ssh as an option.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
        raise ValueError(f"{text!r} is not a valid user name")
    return text


def _read_entry(text: str) -> tuple[list[str], str | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?", text)
    if bracketed is not None:
        return [_ipv6(bracketed[1])], bracketed[2]
    if text.count(":") > 1:
        # fe80::1:4 is an address of its own; slots need the brackets.
        return [_ipv6(text)], None
    names, colon, behind = text.partition(":")
    return _expand(names), behind if colon else None


def _ipv6(text: str) -> str:
    import ipaddress  # costs a start milliseconds, and few need it

    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        raise ValueError(f"{text!r} is no IPv6 address") from None
    if percent and not re.fullmatch(r"[A-Za-z0-9_.-]+", zone):
        raise ValueError(f"{text!r} is no IPv6 address with a zone, like fe80::1%eth0")
    return text


def _expand(text: str) -> list[str]:
    """The hosts that ``node[01-04,07]`` stands for; a plain name stands for itself."""
    if not text:
        raise ValueError("a host is missing")
    # A name that starts with "-" would reach ssh and mpirun as an option.
    if not re.fullmatch(r"(?![-.])([A-Za-z0-9_.-]|\[[^\[\]]*\])+", text):
        raise ValueError(
            f"{text!r} is no host: names consist of letters, digits, '-', '_' and '.', start "
            "with none of '-' and '.', and every '[' has its ']'"
        )
    # Names and insides of brackets take turns. Each range is expanded by itself, because
    # ClusterShell sorts; RangeSet is the part of NodeSet that knows no groups, wildcards and
    # configuration files, and loads in an eighth of the time.
    parts = re.split(r"\[([^\[\]]*)\]", text)
    choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    """``01-03,07`` as 01, 02, 03, 07."""
    from ClusterShell.RangeSet import RangeSet, RangeSetParseError

    numbers: list[str] = []
    for part in ranges.split(","):
        # RangeSet takes 1-2-3 for -2 to 3.
        if not re.fullmatch(r"[0-9]+(-[0-9]+)?", part):
            raise ValueError(f"{part!r} in [{ranges}] is neither a number nor a range like 01-04")
        try:
            numbers += RangeSet(part).striter()
        except RangeSetParseError as error:
            raise ValueError(f"the range {part} in [{ranges}] is wrong ({error})") from None
    return numbers


def _count(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{text!r} is no number of slots")
    return int(text)


def _task_counts(text: str) -> list[int]:
    from hvdtrain.cluster.topology import slurm_task_counts

    try:
        return slurm_task_counts(text)
    except ValueError as error:
        raise ValueError(f"SLURM_TASKS_PER_NODE {error}") from None


def is_this_host(name: str) -> bool:
    """Whether a host is called by a name of the one that this process runs on."""
    own_names = ("localhost", "127.0.0.1", "::1", socket.gethostname().lower())
    return name.lower() in own_names


def own_addresses(hosts: Sequence[str]) -> list[str]:
    """This host's addresses as its routes to ``hosts`` say, and its name; alone, the local one."""
    if not hosts:
        return ["127.0.0.1"]
    found = []
    for host in hosts:
        try:
            known = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
            for family, kind, protocol, _, address in known[:_TRIED]:
                # Connecting a datagram socket sends nothing; it asks the routing table.
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys([*found, socket.gethostname()]))
