"""The candidates of the comparison, called ways, and their commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import Environ

from hvdtrain.bench.measure_startup import bare_command
from hvdtrain.launch.commands import Mpirun

HOROVOD = "horovod-optimised"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Environments of tests.environments, and the single process of the same framework.
ENVIRONMENTS = {
    "horovod": HOROVOD,
    "tensorflow": HOROVOD,
    "torch": "torch",
    "hvdtrain.torch": "torch",
}
ALONE = {"": "keras", HOROVOD: "horovods-tensorflow", "torch": "torch-alone"}


class Way(NamedTuple):
    """A candidate."""

    label: str  # name in tables
    launcher: str  # launcher of its ranks; ``alone`` for one process
    library: str  # library of its ranks, as named in ``peer_ranks``
    flags: tuple[str, ...] = ()  # flags of the launcher

    @property
    def environment(self) -> str:
        """Name of its environment; empty for hvdtrain's own."""
        return ENVIRONMENTS.get(self.library, "")


_RESTARTS = ("--max-restarts", "1")
_RING = "--backend nccl, on CPUs"
_OTHER = "(another framework)"
WAYS: Mapping[str, Way] = {
    "hvdtrain": Way("hvdtrain", "hvdtrain", "hvdtrain"),
    "hvdtrain-tensors": Way(
        "hvdtrain.tensorflow, eager tensors", "hvdtrain", "hvdtrain.tensorflow"
    ),
    "ring": Way(f"TensorFlow's ring (hvdtrain {_RING})", "hvdtrain", "ring"),
    "mpi": Way("MPI_Allreduce (mpi4py)", "mpirun", "mpi"),
    "horovod-mpi": Way("Horovod, MPI", "horovodrun", "horovod", ("--mpi",)),
    "horovod-gloo": Way("Horovod, Gloo", "horovodrun", "horovod", ("--gloo",)),
    "torch": Way(f"torch.distributed, Gloo {_OTHER}", "torchrun", "torch"),
    "hvdtrain-torch": Way(f"hvdtrain.torch {_OTHER}", "mpirun", "hvdtrain.torch"),
    "keras": Way("one process, Keras", "alone", "keras"),
    "horovods-tensorflow": Way("one process, Horovod's TensorFlow", "alone", "tensorflow"),
    "torch-alone": Way(f"one process, torch {_OTHER}", "alone", "torch"),
    "elastic": Way("hvdtrain run --elastic: the other rank continues", "alone", "bench"),
    "restart": Way("hvdtrain run --max-restarts 1", "hvdtrain", "hvdtrain", _RESTARTS),
    "ring-restart": Way(f"hvdtrain run --max-restarts 1 {_RING}", "hvdtrain", "ring", _RESTARTS),
    "torch-restart": Way(f"torchrun --max-restarts 1 {_OTHER}", "torchrun", "torch", _RESTARTS),
}
_PEERS = ("horovod-mpi", "horovod-gloo", "torch")
_TRAINING = ("hvdtrain", "ring", *_PEERS, "hvdtrain-torch", *ALONE.values())
# Candidates of each measure.
MEASURES: Mapping[str, tuple[str, ...]] = {
    "allreduce": ("hvdtrain", "hvdtrain-tensors", "ring", "mpi", *_PEERS),
    "training": _TRAINING,
    "startup": ("hvdtrain", *_PEERS),
    "memory": _TRAINING,
    "recovery": ("elastic", "restart", "ring-restart", "torch-restart"),
}
# Measures that also run on the cluster.
ON_CLUSTER = ("allreduce", "training")


def find_ways(
    names: Sequence[str], missing: Callable[[str], str | None]
) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the available candidates, and the reasons of the unavailable ones.

    ``missing`` returns the reason why an environment is unavailable, or None.
    """
    unavailable = {}
    for name in names:
        way = WAYS[name]
        if way.environment and (reason := missing(way.environment)):
            command = f"make environments NAMES={way.environment}"
            unavailable[name] = f"{way.label}: {reason.partition(';')[0]}; install it: {command}"
    return {name: WAYS[name] for name in names if name not in unavailable}, unavailable


def command_on_host(
    way: Way, ranks: int, program: Sequence[str], python: Path, mpirun: Mpirun | None
) -> tuple[list[str], Environ]:
    """Return the command that starts ranks on this host, and the changes of its environment."""
    run = [str(python), *program]
    if way.launcher == "hvdtrain":
        hvdtrain = str(python.with_name("hvdtrain"))
        return [hvdtrain, "run", "-np", str(ranks), "--chief-only", *way.flags, "--", *run], {}
    if way.launcher == "mpirun":
        assert mpirun is not None
        argv, extra = bare_command(mpirun, ranks)
        return [*argv, *run], {**extra}
    if way.launcher == "horovodrun":
        return _horovodrun(way, python, [f"localhost:{ranks}"], ranks, run)
    if way.launcher == "torchrun":
        # Equivalent to torchrun, whose shebang may name another Python.
        argv = [str(python), "-m", "torch.distributed.run", "--standalone"]
        # Without it, restarted ranks of torch 2.13 wait for the dead ones.
        environ: Environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [*argv, "--nproc-per-node", str(ranks), *way.flags, *program], environ
    return run, {}


def command_on_cluster(
    way: Way, hosts: Sequence[str], ranks_per_host: int, program: Sequence[str], python: Path
) -> tuple[list[str], Environ]:
    """Return the command that starts ranks on all hosts, and the changes of its environment.

    Horovod is started by horovodrun, or by the Open MPI that it was built with; all others by the
    Open MPI next to hvdtrain.
    """
    run = [str(python), *program]
    slots = [f"{host}:{ranks_per_host}" for host in hosts]
    by_host = f"ppr:{ranks_per_host}:node"
    if "--gloo" in way.flags:
        argv, environ = _horovodrun(way, python, slots, ranks_per_host * len(hosts), run)
        return argv, {**environ, "PYTHONPATH": None}
    if way.library == "horovod":
        argv = ["/usr/bin/mpirun", "--oversubscribe", "--bind-to", "none", "--map-by", by_host]
        argv += ["-H", ",".join(slots), "-x", "TF_CPP_MIN_LOG_LEVEL"]
        return [*argv, *run], {**AS_ROOT, "PATH": "/usr/bin:/bin", "PYTHONPATH": None}
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    argv = [mpirun, "--prefix", sys.prefix, "--map-by", f"{by_host}:OVERSUBSCRIBE"]
    return [*argv, "-H", ",".join(slots), *run], {**AS_ROOT}


def _horovodrun(
    way: Way, python: Path, slots: Sequence[str], ranks: int, run: Sequence[str]
) -> tuple[list[str], Environ]:
    argv = [str(python.with_name("horovodrun")), *way.flags, "-np", str(ranks)]
    # horovodrun uses the system's mpirun.
    path = os.pathsep.join([str(python.parent), os.defpath])
    return [*argv, "-H", ",".join(slots), *run], {**AS_ROOT, "PATH": path}
