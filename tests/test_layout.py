"""The shape of the package: who imports whom, what is public, what importing costs."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdtrain
from tests.harness.jobs import REPOSITORY

PACKAGE = REPOSITORY / "hvdtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))

_BASE = {"config", "errors", "log", "version"}
_RANKS = {"cluster", "collectives", "world", *_BASE}

# Which parts of hvdtrain a part may import, beside itself. `launch` and the training side never
# meet; `errors` knows nobody.
ALLOWED = {
    "errors": set(),
    "lazy": set(),
    "log": set(),
    "version": set(),
    "config": {"errors"},
    "cluster": _BASE,
    "launch": {"cluster", *_BASE},
    "collectives": {"cluster", *_BASE},
    "world": {"collectives", "cluster", "monitor", "tensorflow", *_BASE},
    "monitor": _RANKS,
    "checkpoint": {"errors"},
    "tensorflow": {"lazy", *_RANKS},
    "parameter_server": {"monitor", *_RANKS},
    "keras": {"parameter_server", "tensorflow", "checkpoint", "monitor", "lazy", *_RANKS},
    "migrate": {"errors"},
    "bench": {"keras", "parameter_server", "tensorflow", "launch", *_RANKS},
    "__main__": {"cli"},
    "cli": {"launch", "cluster", "bench", "migrate", *_BASE},
}

# Heavy packages, and the only parts that may import them.
THIRD_PARTY = {
    "tensorflow": {"tensorflow", "keras", "parameter_server", "monitor", "bench"},
    "keras": {"tensorflow", "keras", "parameter_server", "monitor", "bench"},
    "mpi4py": {"collectives"},
}


def _part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, at any depth of its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import with its full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_go_one_way(path: Path) -> None:
    part = _part(path)
    if part == "__init__":
        return
    assert part in ALLOWED, f"say in ALLOWED what hvdtrain.{part} may import"
    for name in _imports(path):
        package, _, rest = name.partition(".")
        if package == "hvdtrain" and rest:
            other = rest.split(".")[0]
            allowed = ALLOWED[part] | {part}
            assert other in allowed, f"hvdtrain.{part} must not import {name}"
        elif package in THIRD_PARTY:
            assert part in THIRD_PARTY[package], f"hvdtrain.{part} must not import {name}"


def test_one_module_starts_mpi() -> None:
    found = [_name(path) for path in MODULES if "mpi4py.MPI" in set(_imports(path))]
    assert found == ["hvdtrain/collectives/start.py"]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_all_names_what_is_public(path: Path) -> None:
    tree = ast.parse(path.read_text())
    public = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    declared = _declared_all(tree)
    if declared is None:
        assert not public, f"{_name(path)} defines {sorted(public)} but has no __all__"
        return
    assert len(declared) == len(set(declared))
    assert not [name for name in declared if name.startswith("_") and name != "__version__"]
    if path.name != "__init__.py":
        defined = public | _assigned(tree)
        assert set(declared) <= defined, f"{sorted(set(declared) - defined)} is defined elsewhere"


def _declared_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            try:
                return list(ast.literal_eval(node.value))
            except ValueError:
                return None
    return None


def _assigned(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_every_public_name_of_the_package_is_there() -> None:
    for name in hvdtrain.__all__:
        assert getattr(hvdtrain, name) is not None, name
    assert set(hvdtrain.__all__) <= set(dir(hvdtrain))
    with pytest.raises(AttributeError):
        hvdtrain.no_such_name  # noqa: B018


def test_modules_hold_their_all() -> None:
    for path in MODULES:
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.__all__ names {public}"


@pytest.mark.parametrize("module", ["hvdtrain", "hvdtrain.cli"])
def test_importing_loads_neither_tensorflow_nor_mpi(module: str, run_command) -> None:
    program = (
        f"import sys, {module}\n"
        "heavy = {'tensorflow', 'keras', 'mpi4py.MPI', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "[]\n"), done


@pytest.mark.slow
def test_importing_leaves_environment_and_signals_alone(run_command) -> None:
    program = """
import os, signal
before = dict(os.environ), [signal.getsignal(n) for n in signal.valid_signals()]
import hvdtrain, hvdtrain.keras, hvdtrain.tensorflow
hvdtrain.distribute
after = dict(os.environ), [signal.getsignal(n) for n in signal.valid_signals()]
changed = {k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k)}
# TensorFlow and Keras write theirs.
print([name for name in sorted(changed) if not name.startswith(("TF_", "TF2_", "KERAS_"))])
print(before[1] == after[1])
"""
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\n"), done
