"""Causes and remedies of NCCL's failures, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["SAME_VERSIONS", "ProbeReport", "explain", "remedy_for", "socket_problem"]

_NETWORK = (
    "all hosts must reach each other on all TCP ports of one network; select it with "
    "NCCL_SOCKET_IFNAME"
)
_SHARED_MEMORY = (
    "/dev/shm is too small; start the container with --shm-size=1g or --ipc=host (Kubernetes: "
    "mount an emptyDir with medium Memory)"
)
SAME_VERSIONS = "install the same TensorFlow and nvidia-nccl-cu12 on all hosts"
_DETAILS = "set NCCL_DEBUG=INFO to see details"

# Part of an error text, and the remedy. The texts are in NCCL's init.cc, bootstrap.cc, socket.cc,
# shmutils.cc and ibvwrap.cc, and in TensorFlow's nccl_stub.cc. The first match counts.
_REMEDIES = (
    ("Duplicate GPU detected", "give each rank a GPU of its own, not a part of one (MIG)"),
    ("Mismatched NCCL version", SAME_VERSIONS),
    ("Message truncated", SAME_VERSIONS),
    ("no socket interface found", "set NCCL_SOCKET_IFNAME to an interface with an IP address"),
    ("No usable listening interface", "set NCCL_SOCKET_IFNAME to an interface with an IP address"),
    ("shared memory segment", _SHARED_MEMORY),
    ("failed to extend /dev/shm", _SHARED_MEMORY),
    ("No space left on device", _SHARED_MEMORY),
    ("ibv_", "run hvdtrain check, raise `ulimit -l`, or set NCCL_IB_DISABLE=1 to use TCP"),
    ("Unable to load NCCL", "install tensorflow[and-cuda]"),
    ("driver version is insufficient", "update the GPU driver"),
    ("out of memory", "end other programs on the GPU, or reduce the batch size"),
    ("Connection refused", _NETWORK),
    ("Connection timed out", _NETWORK),
    ("No route to host", _NETWORK),
    ("Network is unreachable", _NETWORK),
    ("Connection closed by remote peer", _NETWORK),
    ("network error", _NETWORK),
    ("timed out", _NETWORK),
    ("no result within", _NETWORK),
)


class ProbeReport(NamedTuple):
    """What a rank knows about a failed test of the devices."""

    host: str  # name of the rank's host
    problem: str  # why the test failed on this rank; empty if another rank failed
    detail: str = ""  # NCCL's last error; empty if unknown


def explain(reports: Sequence[ProbeReport]) -> str:
    """Return which ranks failed the test of the devices, why, and what to do.

    At least one of the reports has a problem.
    """
    ranks: dict[str, list[int]] = {}
    for rank, (_, problem, detail) in enumerate(reports):
        if problem:
            ranks.setdefault(f"{problem} ({detail})" if detail else problem, []).append(rank)
    text = min(ranks, key=lambda text: (remedy_for(text) == _DETAILS, ranks[text]))
    hosts = dict.fromkeys(reports[rank].host for rank in ranks[text])
    who = f"rank{'s' * (len(ranks[text]) > 1)} {', '.join(map(str, ranks[text]))}"
    return f"{who} ({', '.join(hosts)}): {text.rstrip('.')}; {remedy_for(text)}"


def remedy_for(problem: str) -> str:
    """Return what to do about an error of NCCL or of TensorFlow's servers."""
    for part, remedy in _REMEDIES:
        if part in problem:
            return remedy
    return _DETAILS


def socket_problem(
    environ: Mapping[str, str],
    interfaces: Mapping[str, Sequence[str]],
    *,
    several_hosts: bool,
) -> str:
    """Return why NCCL finds no network interface; empty if it finds one.

    NCCL_SOCKET_IFNAME lists prefixes of interface names, or complete names after ``=``. After
    ``^``, the list contains the interfaces that NCCL must not use.

    ``interfaces`` maps each interface that is up to its IP addresses.
    """
    setting = environ.get("NCCL_SOCKET_IFNAME", "")
    if not setting:
        return ""
    excludes = setting.startswith("^")
    listed = setting.removeprefix("^")
    exact = listed.startswith("=")
    entries = [entry.split(":")[0] for entry in listed.removeprefix("=").split(",") if entry]

    def is_listed(name: str) -> bool:
        return any(name == e if exact else name.startswith(e) for e in entries)

    usable = [name for name in interfaces if is_listed(name) != excludes]
    addresses = [address for name in usable for address in interfaces[name]]
    if not addresses:
        names = ", ".join(name for name, own in interfaces.items() if own)
        return f"NCCL_SOCKET_IFNAME={setting} selects no interface with an address ({names})"
    if several_hosts and all(_is_loopback(address) for address in addresses):
        return f"NCCL_SOCKET_IFNAME={setting} selects the loopback interface"
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
