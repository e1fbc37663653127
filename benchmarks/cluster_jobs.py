"""Jobs of benchmarks on the test cluster."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
JOB_TIMEOUT_S = 900.0
QUEUE_MS = 20
HVDTRAIN = "hvdtrain"
HOROVOD = "horovod"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun_between(
    hosts: Sequence[str], ranks_per_host: int, *, horovods: bool
) -> tuple[list[str], dict[str, str | None]]:
    """Return the mpirun command for ranks on hosts, and the changes of its environment.

    Horovod uses the system's Open MPI, which it was built with, instead of the one in hvdtrain's
    environment.
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


def run_on_hosts(
    cluster: Any,
    environ: dict[str, str | None],
    library: str,
    program: Sequence[Any],
    ranks_per_host: int = 1,
) -> Any:
    """Run a script with arguments on all hosts, and parse the last line of its output as JSON.

    ``library`` is ``HVDTRAIN``, or ``HOROVOD`` for the environment with Horovod.
    """
    from tests.environments import folder_of

    horovods = library == HOROVOD
    argv, changes = mpirun_between(cluster.hosts, ranks_per_host, horovods=horovods)
    python = folder_of(HOROVOD) / "bin" / "python" if horovods else sys.executable
    argv += map(str, (python, *program))
    done = cluster.run(argv, env={**environ, **changes}, timeout_s=JOB_TIMEOUT_S)
    if done.returncode:
        raise SystemExit(
            f"{done.stdout}{done.stderr}\nthe ranks failed with exit code {done.returncode}"
        )
    *lines, results = done.stdout.splitlines()
    for line in lines:
        print(line, flush=True)
    return json.loads(results)


@contextmanager
def shaped_cluster(
    count: int, rate: str, queue_ms: int = QUEUE_MS, round_trip_ms: float = 0
) -> Iterator[tuple[Any, dict[str, str | None]]]:
    """Start the test cluster, and yield it with the environment for its programs."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.launch.jobs import ON_CLUSTER
    from tests.testbed.cluster import Cluster

    with Cluster(size=count) as cluster:
        if round_trip_ms:
            cluster.delay(round_trip_ms / 2)
        cluster.shape(rate, queue_ms)
        yield cluster, {**ON_CLUSTER, "OMPI_MCA_osc": "^ucx", "TF_CPP_MIN_LOG_LEVEL": "2"}
