"""A script's bytes, text and syntax tree, how places in them belong together, and findings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Collection
from dataclasses import dataclass

from hvdtrain.errors import ConfigurationError

__all__ = ["Finding", "ScriptSource", "read_source"]

# What Python takes for the end of a line, which is less than str.splitlines does.
_LINE_END = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, order=True)
class Finding:
    """One remark on one line of a script.

    Args:
        line: Counted from 1.
        text: A sentence on the matter, and one on what to do.
        note: Whether the script works as it is.
    """

    line: int
    text: str
    note: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptSource:
    """A script that Python can read."""

    text: str
    encoding: str
    tree: ast.Module
    line_starts: tuple[int, ...]

    def offset(self, line: int, column: int) -> int:
        """The place in ``text`` of a node; its columns count the bytes of UTF-8."""
        start = self.line_starts[line - 1]
        # A character has one byte or more, so that so many of them hold the columns.
        before = self.text[start : start + column].encode()[:column]
        return start + len(before.decode())

    def replaced(self, places: Collection[int], old: str, new: str) -> bytes:
        """The script's bytes with ``new`` in the place of ``old``, which stands at each place."""
        parts = []
        done = 0
        for place in sorted(places):
            assert self.text.startswith(old, place), "the tree says so"
            parts += [self.text[done:place], new]
            done = place + len(old)
        return "".join([*parts, self.text[done:]]).encode(self.encoding)


def read_source(raw: bytes) -> ScriptSource:
    """Read a script, with the encoding that it says it has.

    Raises:
        ConfigurationError: It isn't Python 3.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        text = raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"it can't be decoded: {error}") from None
    if text.encode(encoding) != raw:
        raise ConfigurationError(f"its encoding, {encoding}, can't be written back unchanged")
    try:
        with warnings.catch_warnings():
            # The script's own affair, such as a backslash too many.
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except SyntaxError as error:
        where = f"line {error.lineno}" if error.lineno else "it"
        raise ConfigurationError(f"{where} isn't Python 3: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"it isn't Python 3: {error or 'nested too deeply'}") from None
    starts = (0, *(match.end() for match in _LINE_END.finditer(text)))
    return ScriptSource(text=text, encoding=encoding, tree=tree, line_starts=starts)
