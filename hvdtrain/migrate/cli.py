"""``hvdtrain migrate``: what a script for Horovod needs to run with hvdtrain."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate import script_files
from hvdtrain.migrate.migration import Migration, migrate

__all__ = ["add_arguments", "run"]

DONE, LEFT = 0, 1

_EPILOG = """\
examples:
  hvdtrain migrate train.py            show what would change, and what is left to do
  hvdtrain migrate --write *.py        change the files; train.py.orig is the original
  hvdtrain migrate train.py | patch -p0
                                       the same without the original

exit codes: 0 nothing is left to do by hand, 1 something is, 2 unusable arguments or files.
docs/horovod.md tells more.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain migrate``."""
    parser.usage = "hvdtrain migrate [--write] FILE [FILE ...]"
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="a script that uses Horovod")
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the files; without it nothing is written. FILE.orig keeps the original",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show what becomes of the files, write them if asked to, and return the exit code.

    Raises:
        ConfigurationError: A file can't be read, isn't Python, or can't be written.
    """
    scripts = _migrations([Path(name) for name in arguments.files])
    changed = {path: script for path, script in scripts.items() if script.old != script.new}
    if arguments.write:
        script_files.refuse_to_lose_originals(changed)
    for path, script in changed.items():
        sys.stdout.flush()
        sys.stdout.buffer.write(script.diff(os.fsencode(path)))
        sys.stdout.buffer.flush()
    if arguments.write:
        for path, script in changed.items():
            script_files.write(path, script.old, script.new)
    print(_report(scripts, written=arguments.write), file=sys.stderr)
    return LEFT if any(script.left for script in scripts.values()) else DONE


def _migrations(paths: Sequence[Path]) -> dict[Path, Migration]:
    """Migrate each file in memory, and write nothing; a file that is named twice is one.

    Raises:
        ConfigurationError: Some can't be used; all of those are named.
    """
    scripts: dict[Path, Migration] = {}
    unusable: list[str] = []
    seen: set[str] = set()
    for path in paths:
        if os.path.realpath(path) in seen:
            continue
        seen.add(os.path.realpath(path))
        try:
            scripts[path] = migrate(script_files.read(path))
        except ConfigurationError as error:
            unusable.append(f"{path}: {error}")
    if unusable:
        raise ConfigurationError("\n".join([*unusable, "Nothing was written."]))
    return scripts


def _report(scripts: Mapping[Path, Migration], *, written: bool) -> str:
    """A line for each finding, and one that counts."""
    lines = [
        f"{path}:{finding.line}: {'note: ' if finding.note else ''}{finding.text}"
        for path, script in scripts.items()
        for finding in script.findings
    ]
    changed = sum(script.changed_lines for script in scripts.values())
    left = sum(script.left for script in scripts.values())
    verb = "changed" if written else "to change"
    lines.append(f"{_count(changed, 'line')} {verb}, {_count(left, 'edit')} left for you")
    return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
