"""The command ``hvdtrain``: imports the module of a subcommand, parses its arguments, and runs it.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``, listed in
``COMMANDS``. A module may also have ``with_files(options)``, which replaces options that name files
with the options in those files. ``arguments.argv`` contains the words that were parsed. Only the
module of the given subcommand is imported, so that a job starts quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hvdtrain.errors import ConfigurationError, HvdtrainError
from hvdtrain.log import LOGGER, configure_log
from hvdtrain.version import __version__

__all__ = ["COMMANDS", "main"]

USAGE_ERROR = 2
FAILED = 1
INTERRUPTED = 130
# Set by a shell that completes a command line through argcomplete.
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
    "clone": ("hvdtrain.job_commands.again", "submit a copy of a job"),
    "serve": ("hvdtrain.serve.cli", "show and control jobs in a browser"),
    "check": ("hvdtrain.check.cli", "check whether this host or cluster is ready to train"),
    "migrate": ("hvdtrain.migrate.cli", "convert Horovod scripts to hvdtrain"),
    "bench": ("hvdtrain.bench.cli", "measure collectives, training and startup on this machine"),
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
        # The reader of the output (head, less) has closed the pipe, or the disk is full.
        if error.errno != errno.EPIPE:
            LOGGER.error("error: the output can't be written: %s", error.strerror)
        # Without this, Python would fail when it flushes the buffer at exit.
        with open(os.devnull, "wb") as devnull:
            os.dup2(devnull.fileno(), sys.stdout.fileno())
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
            end = len(argv) - len(arguments.program)
            argv = [argv[0], *module.with_files(argv[1:end]), *argv[end:]]
            arguments = parser.parse_args(argv)
        arguments.argv = argv[1:]
        return int(module.run(arguments))
    except SystemExit as end:
        # argparse has printed help, the version, or an error.
        return end.code if isinstance(end.code, int) else USAGE_ERROR
    except HvdtrainError as error:
        LOGGER.error("error: %s", error)
        return USAGE_ERROR if isinstance(error, ConfigurationError) else FAILED


def _complete_environment() -> None:
    """Provide standard streams and HOME, which a shell, cron or a container may omit."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            # Otherwise the next opened file, such as a socket, would become the standard output.
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
    if not os.environ.get("HOME"):
        # Open MPI does not start without HOME. Like Docker, use "/" for an unknown user.
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
    """Print completions for the shell and exit, if argcomplete is installed."""
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(_parser(words[0] if words else None))


class _CommandParser(argparse.ArgumentParser):
    """A parser that reports unknown arguments, and lists the commands if no command is given."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        if self._subparsers is not None and message.startswith("the following arguments are req"):
            self.print_help(sys.stderr)
            sys.stderr.write("\n")
            self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\n")
        super().error(message)


def _parser(command: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows all subcommands, but only the arguments of ``command``."""
    parser = _CommandParser(
        prog="hvdtrain",
        description="Train one Keras model on many processes.",
        epilog="Run 'hvdtrain COMMAND --help' for more about a command.",
    )
    parser.add_argument("--version", action="version", version=f"hvdtrain {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", required=True
    )
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == command:
            importlib.import_module(module).add_arguments(subparser)
    return parser
