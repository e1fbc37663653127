"""Checks that the documentation matches the code."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.bench.options import BENCHMARKS
from hvdtrain.cli import COMMANDS
from hvdtrain.config import Settings, variable_name, written_default
from hvdtrain.launch.horovodrun import HOROVOD_FLAGS
from tests.harness.jobs import REPOSITORY

DOCUMENTS = [
    *(REPOSITORY / "README.md", REPOSITORY / "benchmarks" / "README.md"),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text().splitlines()) < 170


def _settings_rows() -> list[str]:
    """Return a row for each setting, without the help's mode, parentheses and special values."""
    rows = []
    for entry in dataclasses.fields(Settings):
        flag = "--" + entry.name.replace("_", "-")
        assert variable_name(entry.name) == "HVDTRAIN_" + entry.name.upper()
        default = written_default(entry)
        meaning = re.sub(
            r"^[a-z, -]*(?:towers|sgd|ps): | \([^)]*\)|;.*", "", entry.metadata["help"]
        )
        rows.append(f"| `{flag}` | `{default}` | {meaning} |")
    return rows


def test_the_settings_tables() -> None:
    text = (REPOSITORY / "docs" / "settings.md").read_text()
    rows = sorted(_settings_rows())
    documented = sorted(re.findall(r"^\| `--.*\|$", text, re.MULTILINE))
    assert documented == rows, "docs/settings.md should have these rows:\n" + "\n".join(rows)


def _horovod_flags_lists() -> list[str]:
    """Return an item for each effect and reason of horovodrun's flags, grouped by effect."""
    flags: dict[tuple[str, str], list[str]] = {}
    for flag in HOROVOD_FLAGS:
        effect = f" becomes `{flag.becomes.removesuffix('={}')}`" if flag.fate == "becomes" else ""
        reason = flag.reason.replace("{}", "SCRIPT").rstrip(".")
        key = flag.fate, effect + (f": {reason}" if reason else "")
        flags.setdefault(key, []).extend(f"`{name}`" for name in flag.names)
    return [
        f"- {', '.join(names)}{text}"
        for fate in ("same", "becomes", "unneeded", "refused")
        for (found, text), names in flags.items()
        if found == fate
    ]


def test_the_lists_of_horovodruns_flags() -> None:
    text = (REPOSITORY / "docs" / "horovodrun.md").read_text().split("## All flags")[1]
    items = [" ".join(item.split()) for item in re.findall(r"^- (?:.|\n +)+", text, re.MULTILINE)]
    expected = [" ".join(item.split()) for item in _horovod_flags_lists()]
    assert items == expected, "docs/horovodrun.md should list:\n" + "\n".join(expected)


def _anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings on GitHub."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" not in target:
            file = path.parent / target if target else path
            assert file.exists(), f"{path.name} links to {target}"
            if anchor:
                assert anchor in _anchors(file), f"{path.name} links to {target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_python_code(path: Path) -> None:
    if path.name == "api.md":
        return  # generated signatures
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        ast.parse(textwrap.dedent(block))
    for name in re.findall(r"\bhvdtrain\.([a-zA-Z]\w+)\(", path.read_text()):
        assert name in hvdtrain.__all__, f"{path.name} calls hvdtrain.{name}()"


def test_the_table_of_errors() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
    table = {
        name
        for row in re.findall(r"^\| (`\w+Error`.*?) \|", text, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    errors = {name for name in hvdtrain.__all__ if name.endswith("Error")}
    # Base classes, and errors whose messages need no explanation.
    unexplained = {"HvdtrainError", "CollectiveError", "ConfigurationError", "NotInitializedError"}
    assert table == errors - unexplained


@functools.cache
def _commands() -> dict[str, dict[str, argparse.Action]]:
    """Return the actions by flag of each command, such as ``run`` or ``bench startup``."""
    commands = {}
    for name, (module, _) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        commands |= _flags(name, parser)
    # These also accept options of the job.
    for name in ("restart", "clone"):
        commands[name] = {**commands["run"], **commands[name]}
    return commands


def _flags(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, dict[str, argparse.Action]]]:
    """Yield the flags of a command and of its subcommands."""
    yield name, {flag: action for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subcommand, subparser in action.choices.items():
                yield from _flags(f"{name} {subcommand}", subparser)


def _flags_of_program(path: Path) -> set[str]:
    """Return the flags that a program in examples/ or benchmarks/ declares."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return {
        str(argument.value)
        for call in calls
        if ast.unparse(call.func).endswith(".add_argument")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def test_flags_of_commands() -> None:
    names = sorted(_commands(), key=len, reverse=True)
    shown = 0
    for path in DOCUMENTS:
        for name, rest in re.findall(
            rf"hvdtrain ({'|'.join(names)}) ([^`#|\n]+)", path.read_text()
        ):
            own = re.split(r" -- | python ", f" {rest} ")[0]
            for flag in re.findall(r"(?<!\S)--?[a-zA-Z][a-z-]*", own):
                assert flag in _commands()[name], f"{path.name} shows hvdtrain {name} {flag}"
                shown += 1
    assert shown > 50


def test_flags_of_programs() -> None:
    shown = 0
    for path in DOCUMENTS:
        pattern = r"((?:examples|benchmarks)/\w+\.py) ([^`#]+?)(?:[`#]|\n\$|\n```)"
        for program, rest in re.findall(pattern, path.read_text()):
            for flag in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
                known = _flags_of_program(REPOSITORY / program)
                assert flag in known, f"{path.name} shows {program} {flag}"
                shown += 1
    assert shown > 10


def test_defaults_of_flags() -> None:
    settings = {field.name: written_default(field) for field in dataclasses.fields(Settings)}
    count = 0
    for path in DOCUMENTS:
        pattern = r"`(--[a-z-]+)`(?:(?: \w+)? \((?:default\s)?|: the default is )([\d.]+\d|\d)\b"
        for flag, documented in re.findall(pattern, path.read_text()):
            action = _commands()["run"][flag]
            default = settings.get(action.dest, action.default)
            assert float(default) == float(documented), f"{path.name}: {flag} is {default}"
            count += 1
    assert count >= 4


# Flags of sbatch, srun, mpirun, docker, pip, TensorBoard and kubectl.
FOREIGN_FLAGS = {
    *("--batch", "--cpus-per-task", "--gpus-per-task", "--mem", "--mem-per-cpu", "--nodes"),
    *(
        "--het-group",
        "--ntasks",
        "--partition",
        "--signal",
        "--allow-run-as-root",
        "--bind-to",
        "--map-by",
        "--with-ft",
    ),
    *("--gpu-bind", "--gpus", "--gpus-per-node", "--ntasks-per-node", "--ulimit"),
    *("--build-arg", "--shm-size", "--no-deps", "--logdir", "--replicas"),
}


def test_flags_variables_and_files_exist() -> None:
    folders = [REPOSITORY / name for name in ("hvdtrain", "examples", "benchmarks", "slurm")]
    files = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".sh")
    ]
    identifiers = set(re.findall(r"[\w-]+", "\n".join(path.read_text() for path in files)))
    programs = [path for path in files if path.parent.name in ("examples", "benchmarks")]
    flags = {flag for command in _commands().values() for flag in command}
    programs.append(REPOSITORY / "tests" / "gpu" / "__main__.py")
    flags |= {flag for path in programs for flag in _flags_of_program(path)}
    documented: set[str] = set()
    for path in DOCUMENTS:
        text = path.read_text()
        own_flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
        documented |= own_flags
        unknown = own_flags - flags - FOREIGN_FLAGS
        assert not unknown, f"{path.name}: {unknown}"
        for variable in set(re.findall(r"\bHVDTRAIN_[A-Z_]+[A-Z]\b", text)):
            known = identifiers | {
                variable_name(field.name) for field in dataclasses.fields(Settings)
            }
            assert variable in known or variable.startswith("HVDTRAIN_TEST_"), (
                f"{path.name}: {variable}"
            )
        for name in re.findall(r"\b(?:examples|benchmarks|slurm|hostfiles)/\w[\w./-]*\.\w+", text):
            assert (REPOSITORY / name).exists(), f"{path.name}: {name}"
    assert documented >= FOREIGN_FLAGS


def test_the_lists_of_benchmarks() -> None:
    text = (REPOSITORY / "docs" / "performance.md").read_text()
    assert set(re.findall(r"^\$ hvdtrain bench (\w+)", text, re.MULTILINE)) == set(BENCHMARKS)
    folder = REPOSITORY / "benchmarks"
    listed = set(re.findall(r"\w+\.py", (folder / "README.md").read_text()))
    # Programs that users start have their command in the docstring.
    programs = {
        path.name
        for path in folder.glob("*.py")
        if f"benchmarks/{path.name}" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }
    assert listed == programs


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        for command in re.findall(r"(?:^\$ |`)make ([a-z]+)", path.read_text(), re.MULTILINE):
            assert command in targets, f"{path.name} shows make {command}"


def test_names_in_the_glossary_exist() -> None:
    text = (REPOSITORY / "docs" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` `([^`]+)` \|$", text, re.MULTILINE)
    assert len(rows) >= 40
    assert len(rows) == len(re.findall(r"^\| (?!term|-)", text, re.MULTILINE))
    for term, path, name in rows:
        tree = ast.parse((REPOSITORY / "hvdtrain" / path).read_text())
        defined = {getattr(node, "name", None) for node in tree.body}
        defined |= {
            ast.unparse(t) for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
        }
        assert name in defined, f"{term}: {name} is not in hvdtrain/{path}"


def test_the_architecture_lists_every_package() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    shown = set(re.findall(r"`([a-z_]+)(?:/|\.py)`", text.split("## Paths through the code")[0]))
    entries = (REPOSITORY / "hvdtrain").iterdir()
    there = {entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py"}
    assert there - {"__init__", "__main__", "__pycache__", "lazy", "version"} <= shown
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text):
        below = REPOSITORY if path.startswith("tests/") else REPOSITORY / "hvdtrain"
        assert (below / path).exists(), path
    for path, name in re.findall(r"`((?:\w+/)*\w+\.py)` `(\w+)[`.]", text):
        assert re.search(
            rf"^(class|def) {name}\b", (REPOSITORY / "hvdtrain" / path).read_text(), re.M
        )
