"""The command ``hvdtrain``: finds the subcommand's module, lets it declare its arguments, runs it.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``, named in
``COMMANDS``; with ``with_files(options)`` it replaces options that name files by what these hold.
The words that were parsed are in ``arguments.argv``. Only the one that was asked for is imported,
so that starting a job loads nothing that it doesn't need.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from hvdtrain.errors import ConfigurationError, HvdtrainError
from hvdtrain.log import LOGGER, configure_log
from hvdtrain.version import __version__

__all__ = ["COMMANDS", "main"]

USAGE_ERROR = 2
FAILED = 1
INTERRUPTED = 130
# Set by a shell that asks through argcomplete.
COMPLETES = "_ARGCOMPLETE"

# Name: (module, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("hvdtrain.job_commands.run", "start a training program on several ranks"),
    "submit": ("hvdtrain.job_commands.submit", "queue a training program"),
    "jobs": ("hvdtrain.job_commands.list_jobs", "list jobs and their states"),
    "show": ("hvdtrain.job_commands.show", "show the details of a job"),
    "logs": ("hvdtrain.job_commands.logs", "print or follow the output of a job's ranks"),
    "stop": ("hvdtrain.job_commands.stop", "stop jobs"),
    "restart": ("hvdtrain.job_commands.again", "restart a job that has ended"),
    "clone": ("hvdtrain.job_commands.again", "submit a job like another one"),
    "serve": ("hvdtrain.serve.cli", "show and control jobs in a browser"),
    "check": ("hvdtrain.check.cli", "check whether this host or cluster is ready to train"),
    "migrate": ("hvdtrain.migrate.cli", "move scripts that use Horovod over to hvdtrain"),
    "bench": ("hvdtrain.bench.cli", "measure collectives, training and starting on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdtrain`` with ``argv`` (by default the process's own) and return the exit code."""
    _complete_environment()
    try:
        code = _run_command(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        # Whoever read the output (head, less) has seen enough, or its disk is full.
        if error.errno != errno.EPIPE:
            LOGGER.error("the output can't be written: %s", error.strerror)
        # Python would fail at what is left in the buffer when it exits.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return FAILED


def _run_command(argv: list[str]) -> int:
    if COMPLETES in os.environ:
        _complete(os.environ.get("COMP_LINE", "").split()[1:])
    try:
        parser = _parser(argv[0] if argv else None)
        arguments = parser.parse_args(argv)
        configure_log("info", prefix=f"hvdtrain {arguments.command}: ")
        _check_folder()
        module = importlib.import_module(COMMANDS[arguments.command][0])
        if hasattr(module, "with_files"):
            at = len(argv) - len(arguments.program)
            argv = [argv[0], *module.with_files(argv[1:at]), *argv[at:]]
            arguments = parser.parse_args(argv)
        arguments.argv = argv[1:]
        return int(module.run(arguments))
    except SystemExit as end:
        # argparse has printed help, the version, or what was wrong.
        return end.code if isinstance(end.code, int) else USAGE_ERROR
    except ConfigurationError as error:
        LOGGER.error("%s", error)
        return USAGE_ERROR
    except HvdtrainError as error:
        LOGGER.error("%s", error)
        return FAILED


def _complete_environment() -> None:
    """Provide what a shell, cron or a container may have left out: standard streams and HOME."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            # Else the next file that is opened, such as a socket, would be the standard output.
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if not os.environ.get("HOME"):
        # Open MPI does not start without it. A user who is in no database has the root, as in
        # Docker.
        os.environ.pop("HOME", None)
        home = os.path.expanduser("~")
        os.environ["HOME"] = home if os.path.isabs(home) else "/"


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigurationError(
            "The working folder has been removed; change to one that exists (cd)."
        ) from None


def _complete(words: Sequence[str]) -> None:
    """Tell the shell how the line may go on, and end; if the package for that is there."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(_parser(words[0] if words else None))


class _CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand, whose own usage is shown with an unknown argument."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments, unknown


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all subcommands, of which only ``chosen`` knows its arguments."""
    parser = argparse.ArgumentParser(
        prog="hvdtrain",
        description="Train one Keras model on many processes.",
        epilog="hvdtrain COMMAND --help tells more about each.",
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subparsers(
        dest="command",
        metavar="COMMAND",
        title="commands",
        required=True,
        parser_class=_CommandParser,
    )
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    return parser
