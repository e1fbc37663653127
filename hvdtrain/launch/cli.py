"""``hvdtrain run``: its arguments, and what they turn into."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config import Settings, read_settings, variable_name
from hvdtrain.errors import ConfigurationError

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  hvdtrain run -np 2 -- python train.py --epochs 3
  hvdtrain run -np 8 --share-gpus -- python train.py

The ranks are started on this host, through the mpirun beside this Python or else the first on
PATH. They get this environment; `python` is the Python that hvdtrain is installed in. Unless the
environment says otherwise, each rank computes with its share of the cores
(TF_NUM_INTRAOP_THREADS, OMP_NUM_THREADS).

exit codes:
  0 when every rank ended well; the failing rank's own code otherwise; 128 + n after signal n;
  1 when the job can't be started; 2 for arguments that can't be used.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain run``."""
    parser.usage = "hvdtrain run -np N [options] [--] program [argument ...]"
    parser.epilog = _EPILOG
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        help="what every rank runs, usually python train.py, with its arguments",
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "-np",
        "--num-proc",
        type=_rank_count,
        required=True,
        metavar="N",
        help="number of ranks; may be more than there are cores",
    )
    job.add_argument(
        "--grace-s",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds between Ctrl-C or SIGTERM and the end by force; default %(default)s",
    )
    settings = parser.add_argument_group(
        "settings of the ranks", "Flag over environment (HVDTRAIN_...) over default."
    )
    for entry in dataclasses.fields(Settings):
        _add_setting(settings, entry)


def run(arguments: argparse.Namespace) -> int:
    """Start the job that ``arguments`` describe and return its exit code.

    Raises:
        ConfigurationError: A setting can't be used, or no program was named.
        LaunchError: The job can't be started.
    """
    from hvdtrain.launch.local import run_local

    return run_local(
        _program(arguments.program),
        ranks=arguments.num_proc,
        environ=_environment(arguments, os.environ),
        grace_s=arguments.grace_s,
    )


def _add_setting(group: argparse._ArgumentGroup, entry: dataclasses.Field[Any]) -> None:
    """One setting as a flag; its value stays text, on its way into the environment."""
    flag = "--" + entry.name.replace("_", "-")
    summary = entry.metadata["help"]
    if isinstance(entry.default, bool):
        summary = summary.removeprefix("1 ")
        group.add_argument(flag, action="store_const", const="1", help=summary)
        return

    def checked(text: str) -> str:
        try:
            entry.metadata["parse"](text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}: {error}") from None
        return text

    shown = f"{summary}; default {entry.default}"
    group.add_argument(flag, type=checked, metavar="VALUE", help=shown)


def _environment(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the settings that were given as flags in it."""
    merged = dict(environ)
    for entry in dataclasses.fields(Settings):
        value = getattr(arguments, entry.name)
        if value is not None:
            merged[variable_name(entry.name)] = value
    # Every rank would fail at the same value; say it once instead.
    read_settings(merged)
    return merged


def _program(words: Sequence[str]) -> list[str]:
    program = list(words[1:] if words[:1] == ["--"] else words)
    if not program:
        raise ConfigurationError(
            "No program was named; expected one after the options: "
            "hvdtrain run -np 2 -- python train.py"
        )
    return program


def _rank_count(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number above 0")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 or more")
    return seconds
