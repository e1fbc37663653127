"""Connection of the devices of all ranks. On GPUs, NCCL would use this connection."""

from __future__ import annotations

import os
import re
import socket

import pytest
import tensorflow as tf

from hvdtrain.frameworks.tensorflow import device_connection
from hvdtrain.private_api import tensorflow as private_tensorflow

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

NCCL = {"HVDTRAIN_BACKEND": "nccl"}


def test_no_other_socket_can_bind_a_reserved_port() -> None:
    before = os.environ.get("TF_GRPC_REUSE_PORT")
    with private_tensorflow.reserve_port() as port, socket.socket() as other:
        with pytest.raises(OSError):
            other.bind(("", port))
        assert os.environ["TF_GRPC_REUSE_PORT"] == "1"
    assert os.environ.get("TF_GRPC_REUSE_PORT") == before


@pytest.mark.parametrize(
    ("interface", "problem"),
    [("lo", ""), ("missing0", "NCCL_SOCKET_IFNAME=missing0 selects no interface with an address")],
)
def test_a_missing_network_interface_is_an_obstacle(monkeypatch, interface, problem) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(private_tensorflow, "in_use", lambda: False)
    environ = {"NCCL_SOCKET_IFNAME": interface}
    _, obstacle, _ = device_connection.capabilities(environ, several_hosts=False)
    assert obstacle[: len(problem) or None] == problem


NAMELESS = """
import os, socket, sys
from hvdtrain.frameworks.tensorflow import device_connection
name = f"host-{os.environ['OMPI_COMM_WORLD_RANK']}.invalid"
socket.gethostname = lambda: name
device_connection._own_address = lambda: sys.argv[1]
"""

PROGRAM = """
import tensorflow as tf
import hvdtrain
from hvdtrain import world
hvdtrain.init()
world.device_collectives().allreduce([tf.ones(3)], "sum", name="x")
"""


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_hosts_with_unknown_names_are_reached_by_address(launch, address: str) -> None:
    done = launch(2, NAMELESS + PROGRAM, address, env=NCCL, timeout_s=60)
    assert (done.returncode == 0) == bool(address), done
    unknown = (
        "LaunchError: --backend nccl .* NCCL requires host names .*got host-0.invalid, host-1.inv"
    )
    assert bool(re.search(unknown, done.stderr)) != bool(address), done
