"""The command ``hvdtrain migrate``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate.script import Migration, migrate

__all__ = ["add_arguments", "run"]

DONE, EDITS_REMAIN = 0, 1

_EPILOG = """\
examples:
  hvdtrain migrate train.py            show the changes and the remaining edits
  hvdtrain migrate --write *.py        change the files, and keep originals as train.py.orig

exit codes: 0 no edits remain, 1 edits remain, 2 invalid arguments or files.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``hvdtrain migrate``."""
    parser.usage = "hvdtrain migrate [--write] FILE [FILE ...]"
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="a script that uses Horovod")
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the files and keep the originals as FILE.orig; default: only show the changes",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the changes, write them if requested, and return the exit code.

    Raises:
        ConfigurationError: If a file can't be read or written, or isn't valid Python 3.
    """
    scripts: dict[Path, Migration] = {}
    problems: list[str] = []
    for path in {os.path.realpath(name): Path(name) for name in arguments.files}.values():
        try:
            scripts[path] = migrate(_read(path))
            changes = scripts[path].old != scripts[path].new
            if arguments.write and changes and os.path.lexists(_original(path)):
                raise ConfigurationError(
                    f"can't be changed: {_original(path)} already exists; move or remove it"
                )
        except ConfigurationError as error:
            problems.append(f"{path} {error}")
    if problems:
        raise ConfigurationError("\n".join([*problems, "Nothing was written."]))
    for path, script in scripts.items():
        sys.stdout.flush()
        sys.stdout.buffer.write(script.diff(os.fsencode(path)))
        sys.stdout.buffer.flush()
        if arguments.write and script.old != script.new:
            _write(path, script)
    findings = [(path, finding) for path, script in scripts.items() for finding in script.findings]
    for path, (line, text) in findings:
        print(f"{path}:{line}: {text}", file=sys.stderr)
    lines = sum(script.changed_lines for script in scripts.values())
    verb = "changed" if arguments.write else "to change"
    print(f"lines {verb}: {lines}, remaining edits: {len(findings)}", file=sys.stderr)
    return EDITS_REMAIN if findings else DONE


def _read(path: Path) -> bytes:
    if path.suffix.lower() == ".ipynb":
        command = f"jupyter nbconvert --to script {shlex.quote(str(path))}"
        raise ConfigurationError(f"is a notebook; convert it to a script first: {command}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"can't be read: {error.strerror}") from None


def _original(path: Path) -> Path:
    """Return the path of the backup. For a symbolic link, it is next to the link's target."""
    return Path(os.path.realpath(path) + ".orig")


def _write(path: Path, script: Migration) -> None:
    """Replace a file atomically, with a backup, or raise an error and leave it unchanged."""
    target = os.path.realpath(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".migrate-", dir=os.path.dirname(target)) as folder:
            copies = [os.path.join(folder, name) for name in ("old", "new")]
            for copy, code in zip(copies, (script.old, script.new)):
                shutil.copy(target, copy)
                with open(copy, "wb") as file:
                    file.write(code)
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(copies[0], _original(path))
            os.replace(copies[1], target)
    except OSError as error:
        raise ConfigurationError(
            f"{path} can't be written: {error.strerror}. The file is unchanged."
        ) from None
