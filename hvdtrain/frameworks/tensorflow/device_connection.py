"""Connection of the devices of all ranks, for reductions with NCCL or TensorFlow's ring."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdtrain.cluster.nccl_advice import socket_problem
from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import LaunchError
from hvdtrain.frameworks.tensorflow.device_collectives import DeviceCollectives
from hvdtrain.frameworks.tensorflow.device_probe import nccl_version, probe
from hvdtrain.private_api import tensorflow as private_tensorflow

__all__ = ["capabilities", "connect"]


def capabilities(environ: Mapping[str, str], *, several_hosts: bool) -> tuple[bool, str, int]:
    """Return the values ``has_nccl``, ``obstacle`` and ``nccl`` of ``DeviceCapabilities``."""
    has_nccl = tf.test.is_built_with_cuda() or tf.test.is_built_with_rocm()
    has_gpus = bool(tf.config.list_physical_devices("GPU"))
    obstacle = ""
    if private_tensorflow.has_failed():
        obstacle = "TensorFlow's collectives failed before"
    elif private_tensorflow.in_use() and not private_tensorflow.is_connected():
        obstacle = "TensorFlow's devices were used before hvdtrain.init()"
    elif "NCCL_SOCKET_IFNAME" in environ and has_gpus:
        obstacle = socket_problem(environ, _interfaces(), several_hosts=several_hosts)
    return has_nccl, obstacle, nccl_version() if has_nccl and has_gpus else 0


def connect(
    collectives: Engine, *, on_gpus: bool, hosts: Sequence[int], bucket_bytes: int | None = None
) -> DeviceCollectives:
    """Connect the GPUs or the CPUs of all ranks, and test the connection.

    All ranks must call this.

    ``hosts`` contains the number of each rank's host.

    Raises:
        LaunchError: On all ranks, if a rank is unreachable, can't start its server, or fails the
            test.
    """
    connects = not private_tensorflow.is_connected()
    addresses = _start_servers(collectives, hosts) if connects else []
    (device, *_) = tf.config.list_logical_devices("GPU" if on_gpus else "CPU")
    hint = "nccl" if on_gpus else "ring"
    if connects:
        probe(collectives, addresses, device.name, hint)
    return DeviceCollectives(collectives, device.name, hint, bucket_bytes)


def _start_servers(collectives: Engine, hosts: Sequence[int]) -> list[str]:
    """Start TensorFlow's server on each rank, and return their addresses."""
    with private_tensorflow.reserve_port() as port:
        addresses = _exchange_addresses(collectives, hosts, port)
        problem = ""
        try:
            private_tensorflow.connect(addresses, collectives.rank, port)
        except (tf.errors.OpError, RuntimeError, ValueError) as error:
            problem = f"port {port} of rank {collectives.rank}: {error}"
        # After this, all servers are running.
        problems = collectives.allgather_object(problem, name="servers of TensorFlow")
    if any(problems):
        private_tensorflow.mark_failed()
        raise LaunchError(
            "TensorFlow could not start its server for collectives on "
            f"{'; '.join(filter(None, problems))}"
        )
    return addresses


def _exchange_addresses(collectives: Engine, hosts: Sequence[int], port: int) -> list[str]:
    """Return the address of each rank's server.

    All ranks must call this. Addresses contain host names if every host can resolve them, and IP
    addresses otherwise.
    """
    if len(set(hosts)) == 1:
        servers = ["127.0.0.1"] * len(hosts)
    else:
        own_name = socket.gethostname()
        names: list[str] = collectives.allgather_object(own_name, name="hosts of servers")
        unknown = [n for n in dict.fromkeys(names) if n != own_name and not _is_known(n)]
        unknown_anywhere = any(collectives.allgather_object(unknown, name="unknown hosts"))
        servers = names
        if unknown_anywhere or len(set(names)) < len(set(hosts)):
            servers = collectives.allgather_object(_own_address(), name="addresses of servers")
        if "" in servers:
            raise LaunchError(
                "NCCL requires host names that all hosts can resolve, or a route, got "
                f"{', '.join(dict.fromkeys(names))}; add the hosts to /etc/hosts or DNS"
            )
    ports = collectives.allgather_object(port, name="ports of servers")
    return [f"{server}:{number}" for server, number in zip(servers, ports)]


def _interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of each network interface that is up."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    states = psutil.net_if_stats()
    return {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }


def _is_known(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return not any(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _own_address() -> str:
    """Return this host's address on its default route, or "" if it has no default route."""
    # These addresses are reserved for documentation. Connecting a UDP socket sends nothing.
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))
            address = str(probe.getsockname()[0])
            return f"[{address}]" if family == socket.AF_INET6 else address
    return ""
