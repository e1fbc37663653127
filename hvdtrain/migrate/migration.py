"""A script that uses Horovod, turned into one that uses hvdtrain; touches no file."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.migrate.gone_names import OFFERED_MODULES, why_gone
from hvdtrain.migrate.import_moves import NEW, OLD, move_imports
from hvdtrain.migrate.keras_calls import judge_calls
from hvdtrain.migrate.script_names import Names
from hvdtrain.migrate.script_source import Finding, read_source

__all__ = ["Migration", "migrate"]

_NO_LINE_END = b"\\ No newline at end of file\n"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A script as it is and as it is to be, with remarks on its lines.

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
        """The number of lines that change; none comes or goes."""
        return sum(old != new for old, new in zip(_lines(self.old), _lines(self.new)))

    @property
    def left(self) -> int:
        """The number of edits that are left to do by hand."""
        return sum(not finding.note for finding in self.findings)

    def diff(self, name: bytes) -> bytes:
        """The changes in the unified format, for a file of this name."""
        old, new = _lines(self.old), _lines(self.new)
        lines = difflib.diff_bytes(difflib.unified_diff, old, new, name, name)
        return b"".join(
            line if line.endswith(b"\n") else line + b"\n" + _NO_LINE_END for line in lines
        )


def migrate(raw: bytes) -> Migration:
    """Move a script over, as far as that is certain.

    Raises:
        ConfigurationError: It isn't Python 3.
    """
    source = read_source(raw)
    names = Names(source.tree)
    places, findings = move_imports(source, names)
    findings += _gone_imports(source.tree)
    findings += _gone_names(names)
    findings += judge_calls(source.tree, names)
    return Migration(
        old=raw,
        new=source.replaced(places, OLD, NEW),
        findings=tuple(sorted(set(findings))),
    )


def _gone_imports(tree: ast.Module) -> Iterator[Finding]:
    """Imports of what is gone; of Horovod, names in modules that hvdtrain offers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parts = [(alias.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module.partition(".")[0] == "horovod" and module not in OFFERED_MODULES:
                continue
            parts = [(alias.lineno, f"{module}.{alias.name}") for alias in node.names]
        else:
            continue
        for line, name in parts:
            why = why_gone(name)
            if why is not None:
                yield Finding(line, f"{name} {why}")


def _gone_names(names: Names) -> Iterator[Finding]:
    """Uses of what is gone. What is gone already as it is imported was told of there."""
    for use in names.uses:
        roots = names.roots(use.root.id)
        whys = [why_gone(meaning) for meaning in names.meanings_of(use)]
        if not use.attributes or any(why_gone(root) for root in roots):
            continue
        # Where it may be one of several, the script has a way out if any of them is there.
        if whys and all(whys):
            yield Finding(use.line, f"{use.written} {whys[0]}")


def _lines(raw: bytes) -> list[bytes]:
    """Lines as diff and patch count them: a carriage return belongs to its line."""
    lines = raw.split(b"\n")
    last = lines.pop()
    return [line + b"\n" for line in lines] + ([last] if last else [])
