"""Rewrites a Horovod script's imports, and finds the edits that remain for the user."""

from __future__ import annotations

import ast
import codecs
import collections
import difflib
import io
import re
import warnings
from dataclasses import dataclass

from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate.missing_names import advice_on

__all__ = ["Migration", "migrate"]

# The line ends that Python's tokenizer knows. str.splitlines() would split at more characters.
_LINE_END = re.compile(rb"\r\n|\r|\n")
# The syntax tree lacks the position of the module in `from ... import`.
_FROM = re.compile(rb"from(?:[ \t\f]|\\(?:\r\n|\r|\n))+(?=horovod\b)")
# Scripts that call these functions may have names of modules in strings.
_IMPORTER = re.compile(rb"\b(?:__import__|find_spec|import_module|importorskip)\b")
_MODULE = re.compile(r"horovod(?:\.\w*)*")
_IMPORT_LINE = re.compile(r"^\s*(?:import|from)\s+horovod\b", re.MULTILINE)

# Attributes that Keras 3 lacks, and arguments that calls no longer accept.
_ATTRIBUTES = {f"{name}_generator": f"use {name}" for name in ("evaluate", "fit", "predict")}
_ARGUMENTS = {("compile", "experimental_run_tf_function"): "remove it"}
for _optimizer in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD"):
    _ARGUMENTS[_optimizer, "lr"] = "write learning_rate"
    _ARGUMENTS[_optimizer, "decay"] = "pass a schedule as learning_rate"


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A rewritten script."""

    old: bytes  # the original bytes
    new: bytes  # the rewritten bytes
    findings: tuple[tuple[int, str], ...]  # line number and description of each edit that remains

    @property
    def changed_lines(self) -> int:
        """Number of changed lines. No lines are added or removed."""
        return sum(a != b for a, b in zip(self.old.split(b"\n"), self.new.split(b"\n")))

    def diff(self, name: bytes) -> bytes:
        """Return a unified diff for a file of this name."""
        # Like diff and patch, treat a carriage return as part of its line.
        old, new = (io.BytesIO(code).readlines() for code in (self.old, self.new))
        lines = difflib.diff_bytes(difflib.unified_diff, old, new, name, name)
        no_end = b"\n\\ No newline at end of file\n"
        return b"".join(line if line.endswith(b"\n") else line + no_end for line in lines)


def migrate(raw: bytes) -> Migration:
    """Rewrite a script and list the edits that can't be automated.

    Raises:
        ConfigurationError: If the script isn't valid Python 3.
    """
    script = _Script(raw, _parse(raw))
    script.check_imports()
    script.check_names()
    script.check_calls()
    script.check_strings()
    new = script.renamed()
    _parse(new)
    return Migration(old=raw, new=new, findings=tuple(sorted(script.findings)))


class _Script:
    """A script, with the places to rename and the findings so far."""

    def __init__(self, code: bytes, tree: ast.Module) -> None:
        self.code = code
        self.nodes = [*ast.walk(tree)]
        begin = len(codecs.BOM_UTF8) if code.startswith(codecs.BOM_UTF8) else 0
        self.line_starts = [begin, *(match.end() for match in _LINE_END.finditer(code))]
        # The dotted names that each imported name may stand for. There may be several, because
        # `try` and `except` may import a name from different modules.
        self.origins: dict[str, list[str]] = collections.defaultdict(list)
        self.places: set[int] = set()
        self.findings: set[tuple[int, str]] = set()

    def renamed(self) -> bytes:
        """Return the code with ``horovod`` replaced by ``hvdtrain`` at all collected places."""
        code = self.code
        for place in sorted(self.places, reverse=True):
            code = code[:place] + b"hvdtrain" + code[place + len(b"horovod") :]
        return code

    def check_imports(self) -> None:
        """Rename imports of modules that hvdtrain offers, and report missing names."""
        for node in self.nodes:
            for alias in node.names if isinstance(node, ast.Import) else ():
                package = alias.name.partition(".")[0]
                self.origins[alias.asname or package].append(
                    alias.name if alias.asname else package
                )
                if not self._report_missing(alias, alias.name) and package == "horovod":
                    self._rename(alias, self._place(alias))
            if isinstance(node, ast.ImportFrom) and not node.level:
                missing = []
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    self.origins[alias.asname or alias.name].append(name)
                    missing.append(self._report_missing(node, name))
                match = _FROM.match(self.code, self._place(node))
                if match and not all(missing):
                    self._rename(node, match.end())

    def check_names(self) -> None:
        """Rename uses of the name ``horovod``, and report missing names."""
        inner = {node.value for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            root, *attributes = _parts(node) or [""]
            origins = self.origins.get(root, [])
            if node in inner or not origins:
                continue
            advice = [advice_on(".".join((origin, *attributes))) for origin in origins]
            # A name that is imported from several modules is only missing if all of these modules
            # lack it.
            if not all(advice):
                if root == "horovod":
                    self._rename(node, self._place(node))
            elif not any(map(advice_on, origins)):
                self._report(node, f"{'.'.join((root, *attributes))} {advice[0]}")

    def check_calls(self) -> None:
        """Report attributes and arguments that Keras 3 rejects."""
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
                self._report(node, f"{node.attr} was removed in Keras 3; {_ATTRIBUTES[node.attr]}")
            if not isinstance(node, ast.Call):
                continue
            parts = _parts(node.func) or [""]
            for keyword in node.keywords:
                advice = _ARGUMENTS.get((parts[-1], keyword.arg or ""))
                if advice is not None:
                    self._report(keyword, f"{keyword.arg} was removed in Keras 3; {advice}")
            if parts[-1] == "variables":
                name = ".".join(parts)
                self._report(node, f"{name} is a property since Keras 3; remove the parentheses")

    def check_strings(self) -> None:
        """Report code in strings, and module names in scripts that import dynamically."""
        docstrings = {node.value for node in self.nodes if isinstance(node, ast.Expr)}
        for node in self.nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if not isinstance(text, str) or node in docstrings:
                continue
            if _MODULE.fullmatch(text) and _IMPORTER.search(self.code):
                new = text.replace("horovod", "hvdtrain", 1)
                advice = f"is a string; if it names a module, change it to {new!r}"
                self._report(node, f"{text!r} {advice_on(text.strip('.')) or advice}")
            elif _IMPORT_LINE.search(text):
                self._report(node, "a string imports horovod; change it to hvdtrain")

    def _place(self, node: ast.AST) -> int:
        """Return the offset of a node in the code."""
        line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
        return self.line_starts[line - 1] + int(column)

    def _rename(self, node: ast.AST, place: int) -> None:
        # Columns count bytes of UTF-8, and Python 3.11 reports wrong columns for some nodes in
        # f-strings.
        if self.code.startswith(b"horovod", place):
            self.places.add(place)
        else:
            self._report(node, "horovod could not be located in this line; change it to hvdtrain")

    def _report_missing(self, node: ast.AST, name: str) -> bool:
        """Report a name if it is missing, and return whether it is missing."""
        if advice := advice_on(name):
            self._report(node, f"{name} {advice}")
        return advice is not None

    def _report(self, node: ast.AST, text: str) -> None:
        self.findings.add((node.lineno, text))  # type: ignore[attr-defined]


def _parse(code: bytes) -> ast.Module:
    try:
        # Warnings, for example about invalid escapes, don't concern the migration.
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code, "script")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigurationError(f"is not valid Python 3: {error or 'nested too deeply'}") from None


def _parts(node: ast.AST) -> list[str]:
    """Return the parts of a dotted name; an empty list for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []
