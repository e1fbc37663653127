"""The command of a job on this host, as lists of words; nothing is started here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster_jobs import AS_ROOT, mpirun_between

from hvdtrain.bench.measure_startup import bare_command
from hvdtrain.launch.starters import Mpirun
from peers.ways import Way

__all__ = ["Command", "command_on_cluster", "command_on_host", "python_of"]

# The words, and what changes in the environment: None takes a variable away.
Command = tuple[list[str], dict[str, str | None]]


def python_of(way: Way, own: Path, folder_of: Callable[[str], Path]) -> Path:
    """The Python that has what ranks of a way need.

    Args:
        way: The way.
        own: hvdtrain's own Python.
        folder_of: Where an environment of the tests is.
    """
    return folder_of(way.environment) / "bin" / "python" if way.environment else own


def command_on_host(
    way: Way, ranks: int, program: Sequence[str], python: Path, mpirun: Mpirun | None
) -> Command:
    """What starts ranks on this host.

    Args:
        way: How.
        ranks: So many; of one process there is one.
        program: A script and its arguments.
        python: The Python that runs it.
        mpirun: The one beside hvdtrain; only the launcher ``mpirun`` needs it.
    """
    run = [str(python), *program]
    if way.launcher == "hvdtrain":
        hvdtrain = str(python.with_name("hvdtrain"))
        return [hvdtrain, "run", "-np", str(ranks), "--chief-only", *way.flags, "--", *run], {}
    if way.launcher == "mpirun":
        assert mpirun is not None
        argv, extra = bare_command(mpirun, ranks)
        return [*argv, *run], {**extra}
    if way.launcher == "horovodrun":
        # Its mpirun is the system's.
        path = os.pathsep.join([str(python.parent), os.defpath])
        argv = [str(python.with_name("horovodrun")), *way.flags, "-np", str(ranks)]
        return [*argv, "-H", f"localhost:{ranks}", *run], {**AS_ROOT, "PATH": path}
    if way.launcher == "torchrun":
        # The same as torchrun, whose own first line may name another Python.
        argv = [str(python), "-m", "torch.distributed.run", "--standalone"]
        # Without it ranks of torch 2.13 that are started again wait for those that are gone.
        environ: dict[str, str | None] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [*argv, "--nproc-per-node", str(ranks), *way.flags, *program], environ
    return run, {}


def command_on_cluster(
    way: Way, hosts: Sequence[str], program: Sequence[str], python: Path
) -> Command:
    """What starts a rank on each host, from where ssh reaches them all.

    Horovod is started by its own command, or by the Open MPI that it was built with; all others
    by the one beside hvdtrain.
    """
    run = [str(python), *program]
    argv, environ = mpirun_between(hosts, 1, horovods=way.library == "horovod")
    if "--gloo" not in way.flags:
        return [*argv, *run], environ
    path = os.pathsep.join([str(python.parent), "/usr/bin:/bin"])
    slots = ",".join(f"{host}:1" for host in hosts)
    argv = [str(python.with_name("horovodrun")), *way.flags, "-np", str(len(hosts)), "-H", slots]
    return [*argv, *run], {**environ, "PATH": path}
