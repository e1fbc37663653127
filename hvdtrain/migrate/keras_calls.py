"""Calls and attributes that Keras 3 refuses, and lines that hvdtrain makes needless."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hvdtrain.migrate.script_names import Names, as_use
from hvdtrain.migrate.script_source import Finding

__all__ = ["judge_calls"]

_OPTIMIZERS = ("keras.optimizers.", "tensorflow.keras.optimizers.", "tensorflow.optimizers.")
_WRAPPERS = ("DistributedOptimizer", "PartialDistributedOptimizer")
_OPTIMIZER_ATTRIBUTES = {"lr": "learning_rate", "weights": "variables"}
_GENERATORS = {
    "evaluate_generator": "evaluate",
    "fit_generator": "fit",
    "predict_generator": "predict",
}
_READING = ("max_queue_size", "use_multiprocessing", "workers")
_PINNING = {
    "tensorflow.config.experimental.set_visible_devices",
    "tensorflow.config.set_visible_devices",
}


@dataclass(frozen=True)
class _Script:
    """The whole script, as far as the checks know it.

    Args:
        names: The meanings of its names.
        optimizers: Variables that hold a Keras optimizer, and nothing else.
    """

    names: Names
    optimizers: frozenset[str]


# Each looks at one node, and says what is the matter with it.
_Check = Callable[[ast.AST, _Script], Iterator[Finding]]


def judge_calls(tree: ast.Module, names: Names) -> list[Finding]:
    """Find calls of Keras and TensorFlow that are known to be wrong, or needless."""
    if not names.imports_from("keras", "tensorflow", "horovod", "hvdtrain"):
        return []
    script = _Script(names, frozenset(_optimizers(tree, names)))
    return [
        finding for node in ast.walk(tree) for check in _CHECKS for finding in check(node, script)
    ]


def _keywords(node: ast.AST, script: _Script) -> Iterator[Finding]:
    """Arguments that Keras 3 refuses, or does without."""
    if not isinstance(node, ast.Call):
        return
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    for keyword in node.keywords:
        if _makes_optimizer(node, script.names):
            if keyword.arg == "lr":
                yield Finding(keyword.lineno, "lr is gone since Keras 3; write learning_rate")
            elif keyword.arg == "decay":
                yield Finding(
                    keyword.lineno,
                    "decay has no effect since Keras 3; give learning_rate a "
                    "keras.optimizers.schedules.InverseTimeDecay",
                )
        elif called == "compile" and keyword.arg == "experimental_run_tf_function":
            yield Finding(keyword.lineno, f"{keyword.arg} is gone since Keras 3; drop it")
        elif keyword.arg in _READING and called in (*_GENERATORS, *_GENERATORS.values()):
            yield Finding(
                keyword.lineno,
                f"{keyword.arg} is gone from {called} since Keras 3; "
                "give it to your keras.utils.PyDataset",
            )


def _generators(node: ast.AST, script: _Script) -> Iterator[Finding]:
    """``model.fit_generator`` and its kind."""
    if isinstance(node, ast.Attribute) and node.attr in _GENERATORS:
        use = as_use(node)
        yield Finding(
            node.lineno,
            f"{use.written if use else node.attr} is gone since Keras 3; "
            f"use {_GENERATORS[node.attr]}, which takes generators",
        )


def _files(node: ast.AST, script: _Script) -> Iterator[Finding]:
    """Names of files that Keras 3 refuses to write to, where they are written out."""
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(called, (ast.Attribute, ast.Name)):
        return
    name = called.attr if isinstance(called, ast.Attribute) else called.id
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    file = node.args[0] if node.args else keywords.get("filepath")
    weights_only = keywords.get("save_weights_only", ast.Constant(False))
    if not isinstance(file, ast.Constant) or not isinstance(file.value, str):
        return
    if name == "save_weights":
        ends: tuple[str, ...] = (".weights.h5", ".weights.json")
    elif name == "ModelCheckpoint" and isinstance(weights_only, ast.Constant):
        ends = (".weights.h5",) if weights_only.value else (".keras", ".h5")
    else:
        return
    if not file.value.endswith(ends):
        yield Finding(
            file.lineno,
            f"{name} refuses {file.value!r} since Keras 3; let the name end with {ends[0]}",
        )


def _optimizer_attributes(node: ast.AST, script: _Script) -> Iterator[Finding]:
    """``opt.variables()`` and ``opt.lr``."""
    called = isinstance(node, ast.Call)
    attribute = node.func if isinstance(node, ast.Call) else node
    if not isinstance(attribute, ast.Attribute) or not _is_optimizer(attribute.value, script):
        return
    written = ast.unparse(attribute)
    if called and attribute.attr == "variables":
        yield Finding(
            attribute.lineno, f"{written} is a property since Keras 3; write it without ()"
        )
    elif not called and attribute.attr in _OPTIMIZER_ATTRIBUTES:
        new = f"{ast.unparse(attribute.value)}.{_OPTIMIZER_ATTRIBUTES[attribute.attr]}"
        yield Finding(attribute.lineno, f"{written} is gone since Keras 3; write {new}")


def _pinning(node: ast.AST, script: _Script) -> Iterator[Finding]:
    """``set_visible_devices(gpus[hvd.local_rank()], "GPU")``.

    After ``init()`` it changes nothing where each rank of a host has a GPU of its own and sees
    all of them: TensorFlow lists them all, whichever it uses.
    """
    if (
        isinstance(node, ast.Call)
        and _PINNING.intersection(script.names.meanings(node.func))
        and any(_asks_local_rank(argument) for argument in node.args)
    ):
        yield Finding(
            node.lineno,
            "hvdtrain.init() has bound the GPU, so this may go; it raises IndexError where a rank "
            "sees fewer GPUs than its host has ranks",
            note=True,
        )


_CHECKS: tuple[_Check, ...] = (_keywords, _generators, _files, _optimizer_attributes, _pinning)


def _asks_local_rank(argument: ast.expr) -> bool:
    nodes = ast.walk(argument)
    return any(isinstance(node, ast.Attribute) and node.attr == "local_rank" for node in nodes)


def _optimizers(tree: ast.Module, names: Names) -> set[str]:
    """Variables that hold a Keras optimizer, and nothing else."""
    held: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and all(isinstance(at, ast.Name) for at in node.targets):
            variables = {at.id for at in node.targets if isinstance(at, ast.Name)}
            if _makes_optimizer(node.value, names) or _wraps_optimizer(node.value, names):
                held |= variables
            else:
                others |= variables
    return held - others


def _makes_optimizer(node: ast.AST, names: Names) -> bool:
    meanings = names.meanings(node.func) if isinstance(node, ast.Call) else []
    return any(
        meaning.startswith(_OPTIMIZERS) and meaning.rpartition(".")[2][0].isupper()
        for meaning in meanings
    )


def _wraps_optimizer(node: ast.AST, names: Names) -> bool:
    meanings = names.meanings(node.func) if isinstance(node, ast.Call) else []
    return any(meaning.rpartition(".")[2] in _WRAPPERS for meaning in meanings)


def _is_optimizer(node: ast.expr, script: _Script) -> bool:
    """A variable that holds one, or the ``optimizer`` of a model."""
    if isinstance(node, ast.Name):
        return node.id in script.optimizers
    return isinstance(node, ast.Attribute) and node.attr == "optimizer"
