"""Meanings of the names in a script, as far as its imports tell."""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Names", "Use", "as_use"]


@dataclass(frozen=True, kw_only=True)
class Use:
    """A name with the attributes that are asked of it, such as ``tf.train.AdamOptimizer``."""

    root: ast.Name
    attributes: tuple[str, ...]

    @property
    def line(self) -> int:
        """The line where it begins."""
        return self.root.lineno

    @property
    def written(self) -> str:
        """The text with which the script names it."""
        return ".".join((self.root.id, *self.attributes))


class Names:
    """The imported names of a script, and where it uses them.

    A name that the script also binds in another way stands for nothing that is sure, and is left
    out; None, which stands for a package that isn't there, makes no difference. One that is
    imported in several ways, as in ``try`` and ``except``, may stand for each.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.uses = list(_uses(tree))
        nothing = _set_to_none(tree)
        others = set(_bound_otherwise(tree, but=nothing))
        self.rebound = others | {name.id for name in nothing}
        self._imported: dict[str, list[str]] = collections.defaultdict(list)
        for name, meaning in _imported(tree):
            if name not in others:
                self._imported[name].append(meaning)

    def imports_from(self, *packages: str) -> bool:
        """Whether anything comes from one of these packages."""
        meanings = [meaning for each in self._imported.values() for meaning in each]
        return any(meaning.partition(".")[0] in packages for meaning in meanings)

    def roots(self, name: str) -> list[str]:
        """Return what an imported name may stand for; empty if that isn't sure."""
        return self._imported.get(name, [])

    def meanings(self, node: ast.expr) -> list[str]:
        """The dotted names, as imported, that an expression may stand for."""
        use = as_use(node)
        return [] if use is None else self.meanings_of(use)

    def meanings_of(self, use: Use) -> list[str]:
        """The meanings of a use."""
        return [".".join((root, *use.attributes)) for root in self.roots(use.root.id)]


def as_use(node: ast.AST) -> Use | None:
    """``a.b.c`` as a use of ``a``; None for what doesn't begin with a name."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return Use(root=node, attributes=(*reversed(attributes),))


def _uses(tree: ast.Module) -> Iterator[Use]:
    """Every name, each with as many attributes as follow it, in the order of the text."""
    # Without recursion: sums of a thousand terms are as deep.
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        use = as_use(node)
        if use is None:
            waiting += reversed([*ast.iter_child_nodes(node)])
        else:
            yield use


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each name that an import binds, and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is None:
                    package = alias.name.partition(".")[0]
                    yield package, package
                else:
                    yield alias.asname, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _set_to_none(tree: ast.Module) -> set[ast.Name]:
    """The places where names become None."""
    return {
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _bound_otherwise(tree: ast.Module, *, but: set[ast.Name]) -> Iterator[str]:
    """Each name bound or deleted elsewhere than in ``but`` and imports of known modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load) and node not in but:
                yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            if node.name is not None:
                yield node.name
        elif isinstance(node, ast.MatchMapping):
            if node.rest is not None:
                yield node.rest
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from (alias.asname or alias.name for alias in node.names)
