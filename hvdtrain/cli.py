"""The command ``hvdtrain``: finds the subcommand's module, lets it declare its arguments, runs it.

A subcommand is a module with ``add_arguments(parser)`` and ``run(arguments) -> int``, named in
``COMMANDS``; with ``arguments_of_file(arguments)`` it takes more of them from a file. Only the one
that was asked for is imported, so that starting a job loads nothing that it doesn't need.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from hvdtrain.errors import ConfigurationError, HvdtrainError
from hvdtrain.log import LOGGER, show
from hvdtrain.version import __version__

__all__ = ["COMMANDS", "main"]

USAGE_ERROR = 2
FAILED = 1

# Name: (module, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("hvdtrain.launch.cli", "start a training program on several ranks"),
    "check": ("hvdtrain.check.cli", "tell whether this host or cluster is fit to train"),
    "migrate": ("hvdtrain.migrate.cli", "move scripts that use Horovod over to hvdtrain"),
    "bench": ("hvdtrain.bench.cli", "measure collectives, training and starting on this machine"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hvdtrain`` with ``argv`` (by default the process's own) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = _parser(argv[0] if argv else None)
        arguments = parser.parse_args(argv)
        show("info", who=f"hvdtrain {arguments.command}: ")
        module = importlib.import_module(COMMANDS[arguments.command][0])
        if hasattr(module, "arguments_of_file"):
            from_file = module.arguments_of_file(arguments)
            arguments = parser.parse_args([argv[0], *from_file, *argv[1:]])
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


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all subcommands, of which only ``chosen`` knows its arguments."""
    parser = argparse.ArgumentParser(
        prog="hvdtrain",
        description="Train one Keras model on many processes.",
        epilog="hvdtrain COMMAND --help tells more about each.",
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
        if name == chosen:
            importlib.import_module(module).add_arguments(subparser)
    return parser
