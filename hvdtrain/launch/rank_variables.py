"""The environment variables of ranks; pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = [
    "OVER_TCP",
    "forwarded",
    "hides_information",
    "is_information",
    "network_variables",
    "rank_environment",
]

# "vader" is the name of shared memory that Open MPI 4 and 5 both know.
OVER_TCP = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_osc": "^ucx"}
_LEVEL, _WITHOUT_INFORMATION = "TF_CPP_MIN_LOG_LEVEL", "1"
# TensorFlow's first messages of the level INFO, with a date of zeros; they precede its reading of
# the variable.
_EARLY_INFORMATION = re.compile(
    r"I0000 00:00:\d+\.\d+ +\d+ \S+:\d+\] "
    r"|WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR"
)
_FORWARDED = re.compile(
    r"PATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_\w+|PYTHON\w*"
    r"|(OMP|TF|KERAS|NCCL|HVDTRAIN|XLA|CUDA|MKL|KMP|OPENBLAS|TENSORBOARD)_\w+"
)


def rank_environment(environ: Mapping[str, str], folders: Sequence[Path]) -> dict[str, str]:
    """Return the environment of every rank: ``environ``, with ``folders`` first on PATH.

    So ``python`` is the Python that runs hvdtrain, even when its environment isn't activated.
    What a rank prints must not wait in a buffer until it is killed, and a crash must say where.
    Intel MPI would bind each rank to a part of the cores, of which its agent takes a part again.
    TensorFlow's information is for those who ask for it.
    """
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "I_MPI_PIN": "0",
        _LEVEL: _WITHOUT_INFORMATION,
    }
    path = [folder for folder in environ.get("PATH", os.defpath).split(os.pathsep) if folder]
    paths = os.pathsep.join(dict.fromkeys([*map(str, folders), *path]))
    return {**defaults, **environ, "PATH": paths}


def forwarded(environ: Mapping[str, str], extra: Sequence[str] = ()) -> tuple[str, ...]:
    """Names of the variables that ranks on other hosts get, too; their values stay out of argv."""
    names = [name for name in environ if _FORWARDED.fullmatch(name)]
    return tuple(dict.fromkeys([*sorted(names), *extra]))


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


def hides_information(environ: Mapping[str, str]) -> bool:
    """Whether ranks with ``environ`` print no messages of TensorFlow's of the level INFO."""
    level = environ.get(_LEVEL, _WITHOUT_INFORMATION)
    return level.isdecimal() and int(level) >= int(_WITHOUT_INFORMATION)


def is_information(line: str) -> bool:
    """Whether a line is information of TensorFlow's that ``TF_CPP_MIN_LOG_LEVEL`` can't hide."""
    return _EARLY_INFORMATION.match(line) is not None
