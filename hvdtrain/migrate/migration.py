"""A script that uses Horovod, turned into one that uses hvdtrain; touches no file."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.migrate.finding import Finding
from hvdtrain.migrate.import_moves import NEW, OLD, move_imports
from hvdtrain.migrate.keras_calls import judge_calls
from hvdtrain.migrate.review import gone_imports, gone_names
from hvdtrain.migrate.script_names import Names
from hvdtrain.migrate.script_source import read_source

__all__ = ["Migration", "migrate"]

_NO_LINE_END = b"\\ No newline at end of file\n"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What becomes of a script.

    Args:
        old: The script's bytes.
        new: Those of the script as it is to be.
        findings: Remarks on its lines, in their order.
    """

    old: bytes
    new: bytes
    findings: tuple[Finding, ...]

    @property
    def changed_lines(self) -> int:
        """How many lines are to be others; none comes or goes."""
        return sum(old != new for old, new in zip(_lines(self.old), _lines(self.new)))

    @property
    def left(self) -> int:
        """How many edits are left to do by hand."""
        return sum(not finding.note for finding in self.findings)

    def diff(self, name: bytes) -> bytes:
        """The changes in the unified format, for a file of this name."""
        return b"".join(self._diff(name))

    def _diff(self, name: bytes) -> Iterator[bytes]:
        old, new = _lines(self.old), _lines(self.new)
        for line in difflib.diff_bytes(difflib.unified_diff, old, new, name, name):
            yield line
            if not line.endswith(b"\n"):
                yield b"\n" + _NO_LINE_END


def migrate(raw: bytes) -> Migration:
    """Move a script over, as far as that is certain.

    Raises:
        ConfigurationError: It isn't Python 3.
    """
    source = read_source(raw)
    names = Names(source.tree)
    places, findings = move_imports(source, names)
    findings += gone_imports(source.tree)
    findings += gone_names(names)
    findings += judge_calls(source.tree, names)
    return Migration(
        old=raw,
        new=source.replaced(places, OLD, NEW),
        findings=tuple(sorted(set(findings))),
    )


def _lines(raw: bytes) -> list[bytes]:
    """Lines as diff and patch count them: a carriage return belongs to its line."""
    lines = raw.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])
