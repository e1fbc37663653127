"""The structure of the package: imports, public names and module-level state."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdtrain
from tests.harness.jobs import REPOSITORY

PACKAGE = REPOSITORY / "hvdtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The parts of hvdtrain, and the parts above it that each may import. The launching side (agent,
# remote, launch) and the training side (from collectives on) are independent; bench, check and cli
# use both.
_BASE = {"config", "errors", "exit_codes", "log", "text", "version"}
_RANKS = {"private_api", "cluster", "collectives", "monitor", "frameworks", "world", *_BASE}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "exit_codes": set(),
    "lazy": set(),
    "text": set(),
    "version": set(),
    "log": set(),
    "config": {"errors"},
    "cluster": _BASE,
    "private_api": {"errors"},
    "agent": {"cluster", *_BASE},
    "remote": {"agent", "cluster", *_BASE},
    "launch": {"remote", "agent", "cluster", *_BASE},
    "pods": {"agent", "cluster", *_BASE},
    "jobs": {"launch", "pods", "remote", "agent", "cluster", *_BASE},
    "job_commands": {"launch", "jobs", "agent", "cluster", *_BASE},
    "collectives": {"cluster", *_BASE},
    "monitor": {"collectives", *_BASE},
    "data": {"collectives", "errors"},
    "frameworks": {"private_api", "collectives", "cluster", *_BASE},
    "job_entry": {"frameworks", "monitor", "collectives", "cluster", *_BASE},
    "world": {"job_entry", "frameworks", "monitor", "collectives", "cluster", *_BASE},
    "checkpoint": {"errors"},
    "gradients": _RANKS,
    "parameter_server": _RANKS,
    "trainer": {"parameter_server", "gradients", "checkpoint", "data", *_RANKS},
    "compat": {"trainer", "gradients", "job_entry", *_RANKS},
    "migrate": {"errors"},
    "serve": {"job_commands", "launch", "jobs", "agent", "cluster", *_BASE},
    "bench": {"trainer", "gradients", "parameter_server", "launch", "jobs", "agent", *_RANKS},
    "check": {"bench", "launch", "jobs", "pods", "remote", "agent", *_RANKS},
    "cli": {"check", "launch", "job_commands", "serve", "bench", "migrate", *_BASE},
    "__main__": {"cli"},
    "faces": {"compat", "trainer", "gradients", "lazy", *_RANKS},
}

# Modules without code, which offer names of other modules under the paths that users import.
FACES = {
    "hvdtrain",
    "hvdtrain.keras",
    "hvdtrain.keras.callbacks",
    "hvdtrain.keras.elastic",
    "hvdtrain.tensorflow",
    "hvdtrain.tensorflow.compression",
    "hvdtrain.tensorflow.elastic",
    "hvdtrain.tensorflow.keras",
    "hvdtrain.tensorflow.keras.callbacks",
    "hvdtrain.tensorflow.keras.elastic",
    "hvdtrain.torch",
    "hvdtrain.torch.elastic",
}

# Heavy packages, and the only parts that may import them.
_OF_TENSORFLOW = {
    "private_api",
    "frameworks",
    "trainer",
    "compat",
    "parameter_server",
    "bench",
}
THIRD_PARTY = {
    "tensorflow": _OF_TENSORFLOW,
    "keras": _OF_TENSORFLOW,
    "mpi4py": {"collectives"},
    "torch": {"frameworks", "trainer", "compat"},
    "jax": {"private_api", "frameworks", "trainer", "bench"},
}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a module, cached for many tests."""
    return tuple(ast.walk(_tree(path)))


def _dotted(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


NAMES = {_dotted(path): path for path in MODULES}


def _part(module: str) -> str:
    return "faces" if module in FACES else module.split(".")[1]


@functools.cache
def _known_modules(module: str) -> frozenset[str]:
    """Return the modules of hvdtrain that a module imports, also late, or names in strings.

    An f-string that starts like the names of modules in a package counts for all of them.
    """
    path = NAMES[module]
    names = set(_imports(path))
    for node in _nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            start = str(node.values[0].value)
            if start.startswith("hvdtrain.") and start != "hvdtrain.":
                names |= {name for name in NAMES if name.startswith(start)}
    # An import names a module or an attribute of one.
    modules = (name if name in NAMES else name.rpartition(".")[0] for name in names)
    return frozenset(module for module in modules if module in NAMES)


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, including in functions."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: use an absolute import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("module", NAMES)
def test_imports_are_allowed(module: str) -> None:
    part = _part(module)
    assert part in ALLOWED, f"list in ALLOWED what hvdtrain.{part} may import"
    for name in _known_modules(module):
        other = _part(name)
        # The package itself imports nothing else.
        if name != "hvdtrain":
            assert other in ALLOWED[part] | {part}, f"{module} must not import {name}"
    for name in _imports(NAMES[module]):
        package = name.partition(".")[0]
        if package in THIRD_PARTY:
            assert part in THIRD_PARTY[package], f"{module} must not import {name}"


@pytest.mark.parametrize("module", [name for name in NAMES if _part(name) in ("gradients", "data")])
def test_shared_parts_know_no_framework(module: str) -> None:
    """Reductions and the division of data get a framework as an object."""
    special = tuple(f"hvdtrain.frameworks.{name}." for name in ("tensorflow", "torch", "jax"))
    assert not [name for name in _known_modules(module) if name.startswith(special)]


# The only modules that may import a framework, also in functions.
_HOMES = {
    "tensorflow": (
        *("private_api.tensorflow", "private_api.keras_tensorflow", "frameworks.tensorflow"),
        *("trainer.backends.tensorflow", "trainer.data.tensorflow"),
        *("trainer.local_sgd", "trainer.served", "trainer.step_variables", "trainer.model_parts"),
        *("parameter_server.variable_table", "compat.horovod", "bench"),
    ),
    "torch": ("frameworks.torch", "trainer.backends.torch", "compat.horovod.torch"),
    "jax": ("private_api.jax", "frameworks.jax", "trainer.backends.jax", "bench"),
}


@pytest.mark.parametrize("framework", _HOMES)
def test_frameworks_are_imported_in_their_modules_only(framework: str) -> None:
    homes = tuple(f"hvdtrain.{home}." for home in _HOMES[framework])
    users = {
        module
        for module in NAMES
        if any(name.partition(".")[0] == framework for name in _imports(NAMES[module]))
    }
    assert not [module for module in users if not f"{module}.".startswith(homes)]
    assert all(any(f"{module}.".startswith(home) for module in users) for home in homes)


def test_allowed_imports_are_above() -> None:
    order = list(ALLOWED)
    for part, others in ALLOWED.items():
        below = [other for other in others if order.index(other) > order.index(part)]
        assert not below, f"{part} is above {below}"


def test_imports_have_no_cycles() -> None:
    known = {module: sorted(_known_modules(module) - {"hvdtrain", module}) for module in NAMES}
    done: set[str] = set()

    def follow(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in known[module]:
                follow(other, (*path, module))
            done.add(module)

    for module in NAMES:
        follow(module, ())


def test_one_module_starts_mpi() -> None:
    modules = [_name(path) for path in MODULES if "mpi4py.MPI" in set(_imports(path))]
    assert modules == ["hvdtrain/collectives/mpi_start.py"]


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_all_lists_public_names(path: Path) -> None:
    tree = _tree(path)
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
    tried = [inner for node in tree.body if isinstance(node, ast.Try) for inner in node.body]
    for node in [*tree.body, *tried]:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_public_names_of_the_package() -> None:
    for name in hvdtrain.__all__:
        assert getattr(hvdtrain, name) is not None, name
    assert set(hvdtrain.__all__) <= set(dir(hvdtrain))
    with pytest.raises(AttributeError):
        hvdtrain.no_such_name  # noqa: B018


def test_names_in_all_exist() -> None:
    for path in MODULES:
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        if {"torch", "jax"} & set(name.split(".")):
            continue  # in environments of their own, see tests/frameworks and tests/compat
        module = importlib.import_module(name.removesuffix(".__init__"))
        for public in getattr(module, "__all__", []):
            assert hasattr(module, public), f"{name}.__all__ lists {public}"


@pytest.mark.parametrize(
    ("module", "allowed"), [("hvdtrain", []), ("hvdtrain.cli", []), ("hvdtrain.world", ["numpy"])]
)
def test_importing_loads_neither_tensorflow_nor_mpi(
    module: str, allowed: list[str], run_command
) -> None:
    program = (
        f"import sys, {module}\n"
        "heavy = {'tensorflow', 'keras', 'mpi4py.MPI', 'numpy'} & set(sys.modules)\n"
        "print(sorted(heavy))"
    )
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, f"{allowed}\n"), done


# Maximum number of modules that `hvdtrain run` loads for a recorded job of two local ranks, without
# packages whose __init__ contains only a docstring.
MAX_LAUNCHER_MODULES = 40


def test_hvdtrain_run_loads_few_modules(run_command, tmp_path: Path) -> None:
    program = f"""
import sys
from hvdtrain.cli import main
code = main(["run", "-np", "2", "--jobs-dir", {str(tmp_path / "jobs")!r}, "--", "true"])
print(code, *sorted(sys.modules))
"""
    done = run_command([sys.executable, "-c", program])
    code, *loaded = done.stdout.split()
    assert code == "0", done
    modules = [name for name in loaded if name in NAMES and len(_tree(NAMES[name]).body) > 1]
    assert len(modules) <= MAX_LAUNCHER_MODULES, modules
    packages = {name.partition(".")[0] for name in loaded}
    assert not packages & {"yaml", "psutil", "kubernetes", "tensorflow", "keras", "numpy"}
    assert not [name for name in modules if name.startswith("hvdtrain.jobs.kubernetes")]
    assert (tmp_path / "jobs").exists(), "the job was not recorded"


def test_started_pythons_ignore_the_working_directory() -> None:
    count = 0
    for path in MODULES:
        for node in _nodes(path):
            if not isinstance(node, (ast.List, ast.Tuple)):
                continue
            argv = [entry.value if isinstance(entry, ast.Constant) else "" for entry in node.elts]
            for before, option in itertools.pairwise(argv):
                if option in ("-m", "-c"):
                    count += 1
                    assert before == "-P", f"{_name(path)}:{node.lineno}: python -P {option}"
    assert count > 10
    script = (REPOSITORY / "slurm" / "train.sh").read_text()
    assert set(re.findall(r'"\$PYTHON" (-\w.*?) ', script)) == {"-P"}


@pytest.mark.slow
def test_importing_changes_neither_environment_nor_signals(run_command) -> None:
    program = """
import os, signal
before = dict(os.environ), [signal.getsignal(n) for n in signal.valid_signals()]
import hvdtrain, hvdtrain.keras, hvdtrain.tensorflow
hvdtrain.distribute
after = dict(os.environ), [signal.getsignal(n) for n in signal.valid_signals()]
changed = {k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k)}
# TensorFlow and Keras set their own.
print([name for name in sorted(changed) if not name.startswith(("TF_", "TF2_", "KERAS_"))])
print(before[1] == after[1])
"""
    done = run_command([sys.executable, "-c", program])
    assert (done.returncode, done.stdout) == (0, "[]\nTrue\n"), done


# Functions whose results are not state: a logger, and functions made of other functions.
_MAKE_NO_STATE = ("logging.getLogger", "in_place", "waiting")


def _state(module: str) -> Iterator[str]:
    """Yield the variables of a module, without constants and aliases."""
    tree = _tree(NAMES[module])
    modified = set(_modified(tree))
    for node in tree.body:
        value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        fixed = isinstance(value, (ast.Attribute, ast.Name, ast.Subscript)) or (
            isinstance(value, ast.Call) and ast.unparse(value.func) in _MAKE_NO_STATE
        )
        for name in names:
            is_constant = name != name.lower() or name.startswith("__")
            if value is not None and (name in modified or not (fixed or is_constant)):
                yield f"{module.removeprefix('hvdtrain.')}.{name}"


# Methods that modify a list, set or dict.
_MODIFYING = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update"),
}


def _modified(tree: ast.Module) -> Iterator[str]:
    """Yield module-level names that functions assign or modify."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        inside = list(ast.walk(function))
        own = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        own |= {node.arg for node in inside if isinstance(node, ast.arg)}
        for node in inside:
            if isinstance(node, ast.Global):
                yield from node.names
            container: ast.expr | None = None
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                container = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                container = node.func.value if node.func.attr in _MODIFYING else None
            if isinstance(container, ast.Name) and container.id not in own:
                yield container.id


def _listed_in_architecture(heading: str) -> set[str]:
    """Return the names in the first column of the table under a heading."""
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    table = text.split(f"## {heading}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_architecture_lists_module_level_state() -> None:
    state = {name for module in NAMES for name in _state(module)}
    assert _listed_in_architecture("Module-level state") == state


def _replaced(module: str) -> Iterator[str]:
    """Yield the attributes of other packages that a module assigns."""
    tree = _tree(NAMES[module])
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("hvdtrain"):
            foreign |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            target = ast.unparse(node)
            # The result of a call is a separate object.
            if "(" not in target and target.partition(".")[0] in foreign:
                yield target


def test_the_architecture_lists_changes_of_other_packages() -> None:
    replaced = {name for module in NAMES for name in _replaced(module)}
    assert _listed_in_architecture("Changes to other modules") == replaced


# Private names of Python that code may use.
_PYTHON_NAMES = {"_asdict", "_exit", "_make", "_replace"}


def _is_private(name: object) -> bool:
    return isinstance(name, str) and bool(re.fullmatch(r"_(?!_|hvdtrain)[a-z]\w*", name))


def _defined(module: str) -> Iterator[str]:
    """Yield the functions, classes, variables, and attributes of ``self`` in a module."""
    for node in _nodes(NAMES[module]):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) == "self" else []


def _private_uses(tree: ast.AST, within: str = "") -> Iterator[tuple[int, str, str]]:
    """Yield line, private name, and "own" for ``self``, "other" for other objects, or "text".

    Args:
        tree: The tree to search.
        within: Name of the innermost function around it.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            owner = ast.unparse(node.value)
            # An override may call the original.
            if owner != "super()" or node.attr != within:
                yield node.lineno, node.attr, "own" if owner in ("self", "cls") else "other"
        elif isinstance(node, ast.Constant) and _is_private(node.value):
            yield node.lineno, str(node.value), "text"
        inner = node.name if isinstance(node, ast.FunctionDef) else within
        yield from _private_uses(node, inner)


def _uses_in(modules: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield module and line, private name, and kind, as ``_private_uses`` does."""
    for module in modules:
        for line, name, where in _private_uses(_tree(NAMES[module])):
            yield f"{module}:{line}", name, where


def test_private_names_of_keras_and_tensorflow_are_in_private_api() -> None:
    """Check by name, because the code doesn't show the type of an object.

    A private name is foreign if ``private_api`` uses it without defining it, or if nothing in
    hvdtrain defines it. Elsewhere it may be an overridden method, also called through ``super()``,
    or an attribute of ``self`` in a mixin; but not an attribute of another object or a string.
    """
    api = [module for module in NAMES if module.startswith("hvdtrain.private_api.")]
    foreign = {name for _, name, _ in _uses_in(api)} - {n for m in api for n in _defined(m)}
    own = {n for m in NAMES for n in _defined(m)} - foreign | _PYTHON_NAMES
    users = [
        module
        for module in NAMES
        if module not in FACES and _part(module) in _OF_TENSORFLOW - {"private_api"}
    ]
    uses = [
        f"{place} {name}"
        for place, name, kind in _uses_in(users)
        if (name in foreign if kind == "text" else name not in own)
        and not (kind == "own" and name in foreign)
    ]
    assert not uses, "use private names of Keras and TensorFlow through hvdtrain.private_api"
