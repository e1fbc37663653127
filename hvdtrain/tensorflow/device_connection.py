"""Connection of the devices of all ranks, for reductions with NCCL or TensorFlow's ring."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

import tensorflow as tf

from hvdtrain.collectives.engine import Engine
from hvdtrain.errors import LaunchError
from hvdtrain.private_api import tensorflow as private_tensorflow
from hvdtrain.tensorflow.device_collectives import DeviceCollectives

__all__ = ["connect"]


def connect(collectives: Engine, *, on_gpus: bool, hosts: Sequence[int]) -> DeviceCollectives:
    """Connect the GPUs or the CPUs of all ranks.

    All ranks must call this.

    Args:
        collectives: Engine that connects the ranks.
        on_gpus: Whether to reduce on GPUs.
        hosts: Host number of each rank.

    Raises:
        LaunchError: On all ranks, if a rank is unreachable or can't start its server.
    """
    if not private_tensorflow.is_connected():
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
            raise LaunchError(
                "TensorFlow could not start its server for collectives on "
                f"{'; '.join(filter(None, problems))}. Use --backend mpi."
            )
    (device, *_) = tf.config.list_logical_devices("GPU" if on_gpus else "CPU")
    return DeviceCollectives(collectives, device.name, "nccl" if on_gpus else "ring")


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
                f"--backend nccl requires host names that all hosts can resolve, or a route; got "
                f"{', '.join(dict.fromkeys(names))}. Add the hosts to /etc/hosts or DNS, or use "
                "--backend mpi."
            )
    ports = collectives.allgather_object(port, name="ports of servers")
    return [f"{server}:{number}" for server, number in zip(servers, ports)]


def _is_known(host: str) -> bool:
    try:
        addresses = socket.getaddrinfo(host, None)
    except OSError:
        return False
    return not any(ipaddress.ip_address(address[0]).is_loopback for *_, address in addresses)


def _own_address() -> str:
    """Return this host's address on its default route, or "" without a route."""
    # These addresses are reserved for documentation. Connecting a UDP socket sends nothing.
    for family, remote in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((remote, 9))
            address = str(probe.getsockname()[0])
            return f"[{address}]" if family == socket.AF_INET6 else address
    return ""
