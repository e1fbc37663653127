"""Names in a script that are gone from TensorFlow 2 or Keras 3, or that hvdtrain doesn't offer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain.migrate.finding import Finding
from hvdtrain.migrate.gone_names import OFFERED_MODULES, why_gone
from hvdtrain.migrate.script_names import Names

__all__ = ["gone_imports", "gone_names"]


def gone_imports(tree: ast.Module) -> Iterator[Finding]:
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


def gone_names(names: Names) -> Iterator[Finding]:
    """Uses of what is gone. What is gone already as it is imported was told of there."""
    for use in names.uses:
        roots = names.roots(use.root.id)
        whys = [why_gone(meaning) for meaning in names.meanings_of(use)]
        if not use.attributes or any(why_gone(root) for root in roots):
            continue
        # Where it may be one of several, the script has a way out if any of them is there.
        if whys and all(whys):
            yield Finding(use.line, f"{use.written} {whys[0]}")
