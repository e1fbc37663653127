"""Places where ``horovod`` becomes ``hvdtrain``: imports, and dotted names that begin with it."""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdtrain.migrate.gone_names import OFFERED_MODULES, why_gone
from hvdtrain.migrate.script_names import Names, Use
from hvdtrain.migrate.script_source import Finding, ScriptSource

__all__ = ["NEW", "OLD", "move_imports"]

OLD = "horovod"
NEW = "hvdtrain"

# The module of `from ... import` has no place in the tree; only blanks can stand before it.
_FROM = re.compile(r"from(?:[ \t\f]|\\(?:\r\n|\r|\n))+(?=horovod\b)")
# Functions that take the name of a module as a string.
_IMPORTERS = {"__import__", "find_spec", "import_module", "importorskip"}
_MODULE = re.compile(r"horovod(?:\.\w*)*")
_IMPORT_LINE = re.compile(r"^\s*(?:import|from)\s+horovod\b", re.MULTILINE)


@dataclass
class _Moves:
    """Places of the text where the word is replaced, and what is left to do by hand."""

    source: ScriptSource
    places: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def move(self, node: ast.alias | ast.Name) -> None:
        """Replace the word with which this begins."""
        self.places.add(self.source.offset(node.lineno, node.col_offset))

    def leave(self, line: int, text: str) -> None:
        self.findings.append(Finding(line, text))


def move_imports(source: ScriptSource, names: Names) -> tuple[set[int], list[Finding]]:
    """Find what moves to hvdtrain for certain, and what can't.

    Returns:
        The places in the text at which ``horovod`` becomes ``hvdtrain``, and what is left.
    """
    moves = _Moves(source)
    # Imports that bind the package itself, by the name they bind.
    whole: dict[str, list[ast.alias]] = collections.defaultdict(list)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_old(node.module or ""):
            _move_from(moves, node)
        for alias in node.names if isinstance(node, ast.Import) else ():
            if _is_old(alias.name) and (alias.asname is None or alias.name == OLD):
                whole[alias.asname or OLD].append(alias)
            elif _is_old(alias.name):
                _move_alias(moves, alias)
    for bound, aliases in whole.items():
        _move_whole(moves, names, bound, aliases)
    _leave_strings(moves, names)
    return moves.places, moves.findings


def _move_from(moves: _Moves, node: ast.ImportFrom) -> None:
    """``from horovod.tensorflow import keras as hvd`` and the like."""
    module = node.module or ""
    parts = [module] if module != OLD else [f"{OLD}.{alias.name}" for alias in node.names]
    unknown = [part for part in parts if part not in OFFERED_MODULES]
    for part in unknown:
        moves.leave(node.lineno, _not_offered(part))
    if not unknown:
        found = _FROM.match(moves.source.text, moves.source.offset(node.lineno, node.col_offset))
        assert found is not None, "nothing else can stand there"
        moves.places.add(found.end())
    elif len(unknown) < len(parts):
        moves.leave(node.lineno, f"give what hvdtrain offers an import of its own, from {NEW}")


def _move_alias(moves: _Moves, alias: ast.alias) -> None:
    """``import horovod.tensorflow as hvd``, or the import of ``horovod.tensorflow`` itself."""
    if alias.name in OFFERED_MODULES:
        moves.move(alias)
    else:
        moves.leave(alias.lineno, _not_offered(alias.name))


def _move_whole(moves: _Moves, names: Names, bound: str, imports: Sequence[ast.alias]) -> None:
    """Imports that bind the package itself to a name, and what the script then takes from it."""
    if bound in names.rebound:
        for alias in imports:
            moves.leave(
                alias.lineno,
                f"{bound} is bound to something else, too: write {NEW} for {OLD} by hand",
            )
        return
    uses = [use for use in names.uses if use.root.id == bound]
    left = [use for use in uses if not _is_offered(_dotted(use))]
    for use in left:
        if why_gone(_dotted(use)) is None:
            moves.leave(use.line, _not_offered(_dotted(use)))
    for alias in imports:
        if alias.name != OLD:
            _move_alias(moves, alias)
        elif not left:
            moves.move(alias)
        else:
            moves.leave(
                alias.lineno,
                f"import {OLD} stays because of {left[0].written} in line {left[0].line}; "
                "remove both together",
            )
    if bound == OLD:
        for use in uses:
            if use not in left:
                moves.move(use.root)


def _leave_strings(moves: _Moves, names: Names) -> None:
    """Report ``importlib.import_module("horovod.keras")``, and code in strings."""
    called = {name for use in names.uses for name in (use.written, *names.meanings_of(use))}
    imports_by_name = any(name.rpartition(".")[2] in _IMPORTERS for name in called)
    tree = moves.source.tree
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        name = node.value
        if imports_by_name and _MODULE.fullmatch(name):
            moves.leave(node.lineno, _by_hand(name))
        elif _IMPORT_LINE.search(name) and node not in docstrings:
            moves.leave(node.lineno, f"a string imports {OLD}; write {NEW} in it by hand")


def _by_hand(name: str) -> str:
    if name.strip(".") != OLD and not _is_offered(name):
        return _not_offered(name)
    new = name.replace(OLD, NEW, 1)
    return f"{name!r} is a string and stays; where it names a module write {new!r} by hand"


def _is_old(module: str) -> bool:
    return module == OLD or module.startswith(f"{OLD}.")


def _is_offered(name: str) -> bool:
    """Return whether a dotted name begins with a module that hvdtrain has, too."""
    return any(f"{name}.".startswith(f"{module}.") for module in OFFERED_MODULES)


def _dotted(use: Use) -> str:
    return ".".join((OLD, *use.attributes))


def _not_offered(name: str) -> str:
    return f"{name} {why_gone(name) or 'is not offered by hvdtrain'}"
