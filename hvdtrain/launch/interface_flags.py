"""Which way ranks and ssh take between hosts, where a user says so; pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.launch.commands import OVER_TCP

__all__ = ["network_variables", "ssh_options"]


def network_variables(interfaces: Sequence[str], *, over_tcp: bool) -> dict[str, str]:
    """Variables that keep MPI and NCCL to some interfaces, or to TCP.

    Open MPI passes on those that begin with OMPI_ by itself. Source: what horovodrun tells mpirun
    (horovod/runner/mpi_run.py).
    """
    variables: dict[str, str] = {}
    if interfaces:
        listed = ",".join(dict.fromkeys(interfaces))
        variables |= {"OMPI_MCA_btl_tcp_if_include": listed, "NCCL_SOCKET_IFNAME": listed}
    if over_tcp:
        variables |= {**OVER_TCP, "NCCL_IB_DISABLE": "1"}
    return variables


def ssh_options(port: int | None, identity_file: str | None) -> tuple[str, ...]:
    """Options of ssh for a port and the file of a private key."""
    options = () if port is None else ("-p", str(port))
    return options if identity_file is None else (*options, "-i", identity_file)
