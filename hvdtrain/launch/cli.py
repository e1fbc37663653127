"""The arguments of ``hvdtrain run``, and the job that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hvdtrain.agent.messages import BIND
from hvdtrain.config import ModeSettings, Settings, read_settings, variable_name, written_default
from hvdtrain.config.fields import argument, count, flag_name, non_negative_float
from hvdtrain.errors import ConfigurationError
from hvdtrain.launch.commands import network_variables
from hvdtrain.launch.horovodrun import add_horovod_flags, note_on
from hvdtrain.launch.hosts import TF_CONFIG, add_cluster, add_where, named_cluster
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import TimeLimits
from hvdtrain.log import configure_log

__all__ = ["add_arguments", "job_of", "program_of", "reads_code_from_stdin", "with_files"]

logger = logging.getLogger(__package__)

# A hang is told shortly before ranks give up waiting for each other, while all can say where they
# are.
HANG_SHARE = 0.9
# The options that --help shows; --help-all shows all.
_COMMON = {
    *(
        "--help",
        "--help-all",
        "--config",
        "--num-proc",
        "--hosts",
        "--hostfile",
        "--env",
        "--dry-run",
    ),
    *("--output-dir", "--chief-only", "--max-restarts", "--hang-timeout-s"),
    *("--mode", "--elastic", "--share-gpus", "--log-level"),
}
_EPILOG = """\
examples:
  hvdtrain run -np 2 -- python train.py --epochs 3
  hvdtrain run -np 8 -H a:4,b:4 -- python train.py
  hvdtrain run -- python train.py               in a Slurm job: on all its tasks

exit codes: 0 if all ranks succeeded; else the code of the rank that failed first, or 128 + n if
signal n ended it or the job; 2 for invalid arguments, 75 if preempted (SIGUSR1, SIGUSR2), 124 if a
rank hangs, 125 if the job can't be started. With --max-restarts the code of the last attempt.

The flags of horovodrun, such as --check-build, work too: docs/horovodrun.md lists them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain run``."""
    parser.usage = "hvdtrain run [-np N] [-H a:4,b:4] [options] [--] program [argument ...]"
    parser.epilog = _EPILOG
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rare: dict[argparse.Action, str | None] = {}
    parser.add_argument("--help-all", action=_HelpAll, rare=rare, help="show all options and exit")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with options; those on the command line win"
    )
    where = parser.add_argument_group("ranks and hosts")
    add_where(where)
    where.add_argument(
        *("-x", "--env"),
        action="append",
        default=[],
        type=_variable,
        metavar="NAME[=VALUE]",
        help="pass an environment variable to all ranks; may be repeated",
    )
    where.add_argument(
        "--dry-run", action="store_true", help="print the plan and the command, start nothing"
    )
    add_cluster(where)
    where.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots")
    where.add_argument(
        "--no-bind", action="store_true", help="let ranks run on all cores of their host"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-dir", metavar="DIR", help="write each rank's output to DIR/rank-N.log"
    )
    output.add_argument(
        "--chief-only", action="store_true", help="show only rank 0's output, without tags"
    )
    output.add_argument(
        "--no-collapse",
        dest="collapse",
        action="store_false",
        help="show a line that several ranks print once for each",
    )
    output.add_argument(
        "--jobs-dir",
        metavar="DIR",
        help="folder for the records of jobs; default ~/.local/state/hvdtrain/jobs",
    )
    failures = parser.add_argument_group("failures and time limits")
    failures.add_argument(
        "--max-restarts",
        type=argument(count),
        default=0,
        metavar="N",
        help="restart the job up to N times after a recoverable failure; default 0",
    )
    failures.add_argument(
        "--hang-timeout-s",
        type=_seconds,
        metavar="S",
        help="seconds without a step after which the job hangs; 0: no limit; default 0.9 x "
        "--timeout-s",
    )
    for flag, default, what in (
        ("--start-timeout-s", 120.0, "seconds until all ranks must have started"),
        ("--grace-s", 5.0, "seconds between SIGTERM and SIGKILL"),
        ("--preempt-grace-s", 60.0, "seconds between SIGUSR1 or SIGUSR2 and SIGKILL"),
    ):
        text = f"{what}; default %(default)g"
        failures.add_argument(flag, type=_seconds, default=default, metavar="S", help=text)
    modes = parser.add_argument_group(
        "how ranks train together (docs/parameter-servers.md, docs/towers.md, docs/local-sgd.md)"
    )
    settings = parser.add_argument_group("other settings of the ranks (docs/settings.md)")
    of_modes = {entry.name for entry in dataclasses.fields(ModeSettings)}
    for entry in dataclasses.fields(Settings):
        _add_setting(modes if entry.name in of_modes else settings, entry)
    rare.update(
        (action, action.help)
        for action in parser._actions
        if not _COMMON.intersection(action.option_strings)
    )
    # argcomplete, which asks through this variable, leaves out what has no help.
    if "_ARGCOMPLETE" not in os.environ:
        for action in rare:
            action.help = argparse.SUPPRESS
    add_horovod_flags(parser)


class _HelpAll(argparse.Action):
    """Prints the help with the options that ``--help`` leaves out."""

    def __init__(self, *, rare: Mapping[argparse.Action, str | None], **others: Any) -> None:
        super().__init__(nargs=0, **others)
        self._rare = rare

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self._rare.items():
            action.help = text
        parser.print_help()
        parser.exit()


def job_of(arguments: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """Make the job that ``arguments`` describe, and the environment that its ranks get.

    Raises:
        ConfigurationError: A setting can't be used, no program was named, or hosts don't fit.
    """
    environ = _environment(arguments, environ)
    # Every rank would fail at the same value; say it once instead.
    settings = read_settings(environ)
    configure_log(
        settings.log_level, prefix="hvdtrain run: ", with_time=settings.log_with_timestamp
    )
    hang_s = arguments.hang_timeout_s
    if hang_s is None:
        hang_s = HANG_SHARE * settings.timeout_s
    cluster = named_cluster(arguments, settings, environ)
    if cluster is not None:
        # It would tell every rank that it is this process's task.
        environ.pop(TF_CONFIG, None)
    job = Job(
        program=tuple(program_of(arguments)),
        ranks=arguments.num_proc,
        hosts=arguments.hosts,
        hostfile=arguments.hostfile,
        cluster=cluster,
        oversubscribe=arguments.oversubscribe,
        settings=settings,
        ssh=(*arguments.ssh_port, *arguments.ssh_identity_file),
        mpi_args=arguments.mpi_args,
        extra=tuple(name for name, _ in arguments.env),
        output_dir=arguments.output_dir,
        chief_only=arguments.chief_only,
        timestamps=arguments.timestamps,
        collapse=arguments.collapse,
        time_limits=TimeLimits(
            start_s=arguments.start_timeout_s,
            grace_s=arguments.grace_s,
            preempt_grace_s=arguments.preempt_grace_s,
            hang_s=hang_s,
        ),
        max_restarts=arguments.max_restarts,
        dry_run=arguments.dry_run,
        verbose=arguments.verbose,
    )
    for line in note_on(arguments.unneeded).splitlines():
        logger.info(line)
    return job, environ


def with_files(options: Sequence[str]) -> list[str]:
    """Replace ``--config-file`` and ``--config`` by the options in those files, which come first.

    Raises:
        ConfigurationError: A file can't be read.
    """
    if not any(option.startswith("--config") for option in options):
        return list(options)
    from hvdtrain.launch import option_files

    return option_files.with_files(options)


def program_of(arguments: argparse.Namespace) -> list[str]:
    """Return the program that was named, with its arguments.

    Raises:
        ConfigurationError: None was, or it would read its code from standard input.
    """
    words: list[str] = arguments.program
    program = words[1:] if words[:1] == ["--"] else words
    if not program:
        raise ConfigurationError(
            "No program was named; expected one after the options: "
            "hvdtrain run -np 2 -- python train.py"
        )
    if reads_code_from_stdin(program):
        raise ConfigurationError(
            "The program reads its code from standard input, which is empty on every rank, got "
            f"{shlex.join(program)}; save the code in a file that every host has, and give its "
            f"name: hvdtrain run -- {shlex.quote(program[0])} FILE"
        )
    return program


def _add_setting(group: argparse._ArgumentGroup, entry: dataclasses.Field[Any]) -> None:
    """Declare one setting as a flag; most values stay text, on their way into the environment."""
    flag = flag_name(entry.name)
    summary = entry.metadata["help"]
    if entry.metadata["is_switch"]:
        if entry.default is False:
            group.add_argument(flag, action="store_const", const="1", help=summary)
        else:
            text = f"{summary}; default {'on' if entry.default else 'auto'}"
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=None, help=text)
        return

    def checked(text: str) -> str:
        entry.metadata["parse"](text)
        return text

    shown = f"{summary}; default {written_default(entry)}"
    # The type of the default doesn't tell, as it may be None.
    kind = str(entry.type).partition(" ")[0]
    metavar = {"int": "N", "float": "X"}.get(kind, "VALUE")
    group.add_argument(flag, type=argument(checked), metavar=metavar, help=shown)


def _environment(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the settings that were given as flags in it."""
    network = network_variables(arguments.interfaces, over_tcp=arguments.over_tcp)
    merged = {**environ, **network}
    for name, given in arguments.env:
        if given is not None:
            merged[name] = given
        elif name not in merged:
            raise ConfigurationError(f"-x {name}: there is no such variable; give -x {name}=VALUE.")
    if arguments.no_bind:
        merged[BIND] = "0"
    for entry in dataclasses.fields(Settings):
        value = getattr(arguments, entry.name)
        if value is not None:
            merged[variable_name(entry.name)] = value if isinstance(value, str) else str(int(value))
    return merged


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME or NAME=VALUE")
    return name, value if equals else None


def _seconds(text: str) -> float:
    try:
        return non_negative_float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 or more") from None


_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]*")
_SHELL = re.compile(r"(ba|da|k|z)?sh")
_LONG_WITH_VALUE = {"--check-hash-based-pycs", "--rcfile", "--init-file"}
_STDIN = {"-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"}


def reads_code_from_stdin(program: Sequence[str]) -> bool:
    """Return whether a command is a Python or a shell without a script of its own."""
    name, words = PurePath(program[0]).name, list(program[1:])
    is_shell = _SHELL.fullmatch(name) is not None
    if not is_shell and not _PYTHON.fullmatch(name):
        return False
    # Option letters that replace the script or print something, and option letters with a value.
    without_script, with_value = ("c", "oO") if is_shell else ("cmhV?", "WX")
    reads = False
    while words and words[0] not in ("-", "--") and words[0].startswith(("-", "+")):
        option = words.pop(0)
        if option.startswith(("--help", "--version")):
            return False
        if option.startswith("--"):
            del words[: option in _LONG_WITH_VALUE]
            continue
        for end, letter in enumerate(option[1:], 2):
            if letter in without_script:
                return False
            reads |= is_shell and letter == "s"
            if letter in with_value:
                # Python takes the rest of the word as the value, unless it is empty.
                del words[: is_shell or end == len(option)]
                if not is_shell:
                    break
    if words and (words[0] == "--" or (is_shell and words[0] == "-")):
        words.pop(0)
    return reads or not words or words[0] in _STDIN
