"""Running programs of benchmarks on the hosts of the tests, each beside others on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "AS_ROOT",
    "HOROVOD",
    "HVDTRAIN",
    "REPOSITORY",
    "Hosts",
    "mpirun_between",
    "shaped_cluster",
    "shaped_hosts",
]

REPOSITORY = Path(__file__).resolve().parents[1]
JOB_TIMEOUT_S = 900.0
HVDTRAIN = "hvdtrain"
HOROVOD = "horovod"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun_between(
    hosts: Sequence[str], ranks_per_host: int, *, horovods: bool
) -> tuple[list[str], dict[str, str | None]]:
    """What starts so many ranks on each host, and what changes in the environment for it.

    Args:
        hosts: Their names.
        ranks_per_host: So many.
        horovods: Whether with the system's Open MPI, which Horovod was built with, and not with the
            one beside hvdtrain.
    """
    slots = ",".join(f"{host}:{ranks_per_host}" for host in hosts)
    by_host = f"ppr:{ranks_per_host}:node"
    if horovods:
        argv = ["/usr/bin/mpirun", "--oversubscribe", "--bind-to", "none", "--map-by", by_host]
        argv += ["-H", slots, "-x", "TF_CPP_MIN_LOG_LEVEL"]
        return argv, {**AS_ROOT, "PATH": "/usr/bin:/bin", "PYTHONPATH": None}
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    argv = [mpirun, "--prefix", sys.prefix, "--map-by", f"{by_host}:OVERSUBSCRIBE", "-H", slots]
    return argv, {**AS_ROOT}


class Hosts:
    """Some hosts with links of a known speed.

    Args:
        cluster: The test cluster.
        environ: What programs are to have in their environment there.
        ranks_per_host: So many ranks on each.
    """

    def __init__(self, cluster: Any, environ: dict[str, str | None], ranks_per_host: int) -> None:
        self._cluster, self._environ = cluster, environ
        self._ranks_per_host = ranks_per_host

    def run(self, library: str, program: Sequence[Any]) -> Any:
        """Run a program on all ranks; what the last line of its output says, which is JSON.

        Args:
            library: ``HVDTRAIN``, or ``HOROVOD`` for the environment that has that.
            program: A script and its arguments.
        """
        from tests.environments import folder_of

        horovods = library == HOROVOD
        argv, changes = mpirun_between(self._cluster.hosts, self._ranks_per_host, horovods=horovods)
        python = folder_of(HOROVOD) / "bin" / "python" if horovods else sys.executable
        argv += [*map(str, (python, *program))]
        environ = {**self._environ, **changes}
        done = self._cluster.run(argv, env=environ, timeout_s=JOB_TIMEOUT_S)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}\nthe ranks ended with {done.returncode}")
        *told, found = done.stdout.splitlines()
        for line in told:
            print(line, flush=True)
        return json.loads(found)


@contextmanager
def shaped_hosts(
    count: int, ranks_per_host: int, rate: str, queue_ms: int, round_trip_ms: float = 0
) -> Iterator[Hosts]:
    """Hosts with links of this rate, as tc writes it; they are gone after the block."""
    with shaped_cluster(count, rate, queue_ms, round_trip_ms) as (cluster, environ):
        yield Hosts(cluster, environ, ranks_per_host)


@contextmanager
def shaped_cluster(
    count: int, rate: str, queue_ms: int, round_trip_ms: float = 0
) -> Iterator[tuple[Any, dict[str, str | None]]]:
    """The cluster of the tests, and what programs are to have in their environment there."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.launch.jobs import ON_CLUSTER
    from tests.testbed.cluster import Cluster

    with Cluster(size=count) as cluster:
        if round_trip_ms:
            cluster.delay(round_trip_ms / 2)
        cluster.shape(rate, queue_ms)
        yield cluster, {**ON_CLUSTER, "OMPI_MCA_osc": "^ucx", "TF_CPP_MIN_LOG_LEVEL": "2"}
