"""Commands of jobs, as argument lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster_jobs import AS_ROOT, mpirun_between

from hvdtrain.bench.measure_startup import bare_command
from hvdtrain.launch.commands import Mpirun
from peers.ways import Way

__all__ = ["Command", "command_on_cluster", "command_on_host", "python_of"]

# Arguments, and changes of the environment; None removes a variable.
Command = tuple[list[str], dict[str, str | None]]


def python_of(way: Way, own: Path, folder_of: Callable[[str], Path]) -> Path:
    """Return the Python of a candidate's environment.

    Args:
        way: The candidate.
        own: hvdtrain's Python.
        folder_of: Returns the folder of an environment.
    """
    return folder_of(way.environment) / "bin" / "python" if way.environment else own


def command_on_host(
    way: Way, ranks: int, program: Sequence[str], python: Path, mpirun: Mpirun | None
) -> Command:
    """Return the command that starts ranks on this host.

    Args:
        way: The candidate.
        ranks: Number of ranks.
        program: A script and its arguments.
        python: The Python that runs it.
        mpirun: hvdtrain's mpirun, for the launcher ``mpirun``.
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
        # horovodrun uses the system's mpirun.
        path = os.pathsep.join([str(python.parent), os.defpath])
        argv = [str(python.with_name("horovodrun")), *way.flags, "-np", str(ranks)]
        return [*argv, "-H", f"localhost:{ranks}", *run], {**AS_ROOT, "PATH": path}
    if way.launcher == "torchrun":
        # Equivalent to torchrun, whose shebang may name another Python.
        argv = [str(python), "-m", "torch.distributed.run", "--standalone"]
        # Without it, restarted ranks of torch 2.13 wait for the dead ones.
        environ: dict[str, str | None] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return [*argv, "--nproc-per-node", str(ranks), *way.flags, *program], environ
    return run, {}


def command_on_cluster(
    way: Way, hosts: Sequence[str], program: Sequence[str], python: Path
) -> Command:
    """Return the command that starts a rank on each host.

    Horovod is started by horovodrun, or by the Open MPI that it was built with; all others by the
    Open MPI next to hvdtrain.
    """
    run = [str(python), *program]
    argv, environ = mpirun_between(hosts, 1, horovods=way.library == "horovod")
    if "--gloo" not in way.flags:
        return [*argv, *run], environ
    path = os.pathsep.join([str(python.parent), "/usr/bin:/bin"])
    slots = ",".join(f"{host}:1" for host in hosts)
    argv = [str(python.with_name("horovodrun")), *way.flags, "-np", str(len(hosts)), "-H", slots]
    return [*argv, *run], {**environ, "PATH": path}
