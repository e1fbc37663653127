"""Programs that read their code from standard input, which is empty on every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

__all__ = ["reads_code_from_stdin"]

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
