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
from hvdtrain.launch.horovodrun import add_horovod_flags, explain_unneeded
from hvdtrain.launch.hosts import (
    TF_CONFIG,
    add_cluster_arguments,
    add_host_arguments,
    named_cluster,
)
from hvdtrain.launch.plan import Job
from hvdtrain.launch.supervisor import TimeLimits
from hvdtrain.log import configure_log

__all__ = ["add_arguments", "get_program", "make_job", "reads_code_from_stdin", "with_files"]

logger = logging.getLogger(__package__)

# A hang is reported shortly before ranks time out, so that all of them can print their stacks.
HANG_SHARE = 0.9
# The options that --help shows; --help-all shows all.
_COMMON = {
    *("--help", "--help-all", "--config", "--num-proc", "--hosts", "--hostfile", "--env"),
    *("--dry-run", "--output-dir", "--chief-only", "--max-restarts", "--hang-timeout-s"),
    *("--mode", "--elastic", "--share-gpus", "--log-level"),
}
_EPILOG = """\
examples:
  hvdtrain run -np 2 -- python train.py --epochs 3
  hvdtrain run -np 8 -H a:4,b:4 -- python train.py
  hvdtrain run -- python train.py               in a Slurm job: on all its tasks

exit codes: 0 if all ranks succeed; otherwise the code of the rank that failed first, or 128 + N
after signal N. 2: invalid arguments; 75: preempted by SIGUSR1 or SIGUSR2; 124: a rank hangs;
125: the job can't be started. With --max-restarts, the code of the last attempt.

The flags of horovodrun, such as --check-build, work too; see docs/horovodrun.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain run``."""
    parser.usage = "hvdtrain run [-np N] [-H a:4,b:4] [options] [--] program [argument ...]"
    parser.epilog = _EPILOG
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rare: dict[argparse.Action, str | None] = {}
    parser.add_argument("--help-all", action=_HelpAll, rare=rare, help="show all options and exit")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with options; the command line overrides it"
    )
    _add_placement(parser.add_argument_group("ranks and hosts"))
    _add_output(parser.add_argument_group("output"))
    _add_failures(parser.add_argument_group("failures and time limits"))
    modes = parser.add_argument_group(
        "training modes (docs/parameter-servers.md, docs/towers.md, docs/local-sgd.md)"
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
    # argcomplete sets this variable. It ignores options without help.
    if "_ARGCOMPLETE" not in os.environ:
        for action in rare:
            action.help = argparse.SUPPRESS
    add_horovod_flags(parser)


def _add_placement(group: argparse._ArgumentGroup) -> None:
    exclusive = add_host_arguments(group)
    group.add_argument(
        *("-x", "--env"),
        action="append",
        default=[],
        type=_variable,
        metavar="NAME[=VALUE]",
        help="environment variable for all ranks; may be repeated",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the plan and the command, and start nothing"
    )
    add_cluster_arguments(group, exclusive)
    group.add_argument("--oversubscribe", action="store_true", help="allow more ranks than slots")
    group.add_argument(
        "--no-bind", action="store_true", help="let each rank use all cores of its host"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output-dir", metavar="DIR", help="also write each rank's output to DIR/rank-N.log"
    )
    group.add_argument(
        "--chief-only", action="store_true", help="show only the output of rank 0, without tags"
    )
    group.add_argument(
        "--no-collapse",
        dest="collapse",
        action="store_false",
        help="repeat lines that several ranks print, instead of showing them once",
    )
    group.add_argument(
        "--jobs-dir",
        metavar="DIR",
        help="folder for the records of jobs; default ~/.local/state/hvdtrain/jobs",
    )


def _add_failures(group: argparse._ArgumentGroup) -> None:
    seconds = argument(non_negative_float)
    group.add_argument(
        "--max-restarts",
        type=argument(count),
        default=0,
        metavar="N",
        help="restart the job up to N times after a recoverable failure; default 0",
    )
    group.add_argument(
        "--hang-timeout-s",
        type=seconds,
        metavar="S",
        help="seconds without a step before a stop; 0: no limit; default 0.9 x --timeout-s",
    )
    for flag, default, what in (
        ("--start-timeout-s", 120.0, "seconds until all ranks must have started"),
        ("--grace-s", 5.0, "seconds between SIGTERM and SIGKILL"),
        ("--preempt-grace-s", 60.0, "seconds between SIGUSR1 or SIGUSR2 and SIGKILL"),
    ):
        text = f"{what}; default %(default)g"
        group.add_argument(flag, type=seconds, default=default, metavar="S", help=text)


def _add_setting(group: argparse._ArgumentGroup, entry: dataclasses.Field[Any]) -> None:
    """Declare a setting as a flag, whose value usually stays text for an environment variable."""
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

    text = f"{summary}; default {written_default(entry)}"
    # The default may be None, so the annotation determines the type.
    kind = str(entry.type).partition(" ")[0]
    metavar = {"int": "N", "float": "X"}.get(kind, "VALUE")
    group.add_argument(flag, type=argument(checked), metavar=metavar, help=text)


class _HelpAll(argparse.Action):
    """Prints the help including the options that ``--help`` omits."""

    def __init__(self, *, rare: Mapping[argparse.Action, str | None], **options: Any) -> None:
        super().__init__(nargs=0, **options)
        self._rare = rare

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self._rare.items():
            action.help = text
        parser.print_help()
        parser.exit()


def make_job(
    arguments: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Job, dict[str, str]]:
    """Return the job that ``arguments`` describe, and the environment of its ranks.

    Raises:
        ConfigurationError: If a setting is invalid, no program is given, or the hosts of a
            parameter-server cluster are invalid or contradict other arguments.
    """
    environ = _environment(arguments, environ)
    # The settings are checked once here. Otherwise every rank would fail at an invalid value.
    settings = read_settings(environ)
    configure_log(
        settings.log_level, prefix="hvdtrain run: ", with_time=settings.log_with_timestamp
    )
    hang_s = arguments.hang_timeout_s
    if hang_s is None:
        hang_s = HANG_SHARE * settings.timeout_s
    cluster = named_cluster(arguments, settings, environ)
    if cluster is not None:
        # With this variable, every rank would take over the task of this process.
        environ.pop(TF_CONFIG, None)
    job = Job(
        program=tuple(get_program(arguments)),
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
    for line in explain_unneeded(arguments.unneeded):
        logger.info(line)
    return job, environ


def with_files(options: Sequence[str]) -> list[str]:
    """Replace ``--config-file`` and ``--config`` with the options in those files.

    The options from files go first, so that the command line overrides them.

    Raises:
        ConfigurationError: If a file can't be read.
    """
    if not any(option.startswith("--config") for option in options):
        return list(options)
    from hvdtrain.launch import option_files

    return option_files.with_files(options)


def get_program(arguments: argparse.Namespace) -> list[str]:
    """Return the program with its arguments.

    Raises:
        ConfigurationError: If no program is given, or the program would read its code from standard
            input.
    """
    words: list[str] = arguments.program
    program = words[1:] if words[:1] == ["--"] else words
    if not program:
        raise ConfigurationError(
            "The program is missing; give it after the options: hvdtrain run -np 2 -- python "
            "train.py"
        )
    if reads_code_from_stdin(program):
        raise ConfigurationError(
            "The program reads its code from standard input, which is empty on every rank, got "
            f"{shlex.join(program)}; save the code in a file that every host can read: "
            f"hvdtrain run -- {shlex.quote(program[0])} FILE"
        )
    return program


def _environment(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables and settings that are given as flags."""
    network = network_variables(arguments.interfaces, over_tcp=arguments.over_tcp)
    merged = {**environ, **network}
    for name, value in arguments.env:
        if value is not None:
            merged[name] = value
        elif name not in merged:
            raise ConfigurationError(f"-x {name}: the variable is not set; give -x {name}=VALUE.")
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
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, got {text!r}")
    return name, value if equals else None


_INTERPRETER = re.compile(r"(python|pypy)[\d.]*[a-z]*|(?P<shell>(ba|da|k|z)?sh)")
# The letters after -W and -X are a value.
_WITHOUT_SCRIPT = re.compile(r"-[^\WWX]*[cmhV?]|--(help|version)")
# Options whose value is the next word.
_PYTHON_VALUE = re.compile(r"-[^\WWX]*[WX]|--check-hash-based-pycs")
_SHELL_VALUE = re.compile(r"[-+]\w*[oO]|--(rcfile|init-file)")
_STDIN = {"/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"}


def reads_code_from_stdin(program: Sequence[str]) -> bool:
    """Return whether a command starts Python or a shell without a script, as in ``python -``."""
    interpreter = _INTERPRETER.fullmatch(PurePath(program[0]).name)
    if interpreter is None:
        return False
    is_shell = interpreter["shell"] is not None
    takes_value = _SHELL_VALUE if is_shell else _PYTHON_VALUE
    words = iter(program[1:])
    for word in words:
        if _WITHOUT_SCRIPT.match(word):
            return False
        # For a shell, "-" only ends the options. With -s, a shell reads code from its standard
        # input.
        if re.fullmatch(r"-\w*s\w*", word) if is_shell else word == "-":
            return True
        if takes_value.fullmatch(word):
            next(words, None)
        elif not word.startswith(("-", "+")):
            return word in _STDIN
    return True
