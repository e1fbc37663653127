"""The Dockerfiles name what there is; Docker is not needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.harness.jobs import REPOSITORY

DOCKERFILES = sorted((REPOSITORY / "docker").glob("Dockerfile*"))


def _steps(path: Path) -> list[tuple[str, str]]:
    """Instructions and what stands behind them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_extras_are_those_of_the_package(path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extras,) = [
        rest.removeprefix("EXTRAS=")
        for step, rest in _steps(path)
        if step == "ARG" and rest.startswith("EXTRAS=")
    ]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert "kubernetes" in extras, "the launcher asks its cluster"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_containers_do_not_run_as_root(path: Path) -> None:
    users = [rest for step, rest in _steps(path) if step == "USER"]
    assert users == ["1000:1000"], "a number: Kubernetes does not know what a name stands for"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_is_not_ignored(path: Path) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    named = [
        source
        for step, rest in _steps(path)
        if step == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert named
    for source in named:
        assert (REPOSITORY / source).exists(), source
        kept = (f"!{source}", f"!{Path(source).parent}/*{Path(source).suffix}")
        assert set(kept) & set(ignored), f".dockerignore keeps {source} out"


def test_both_are_the_same_but_for_the_gpus() -> None:
    cpu, gpu = (_steps(path) for path in DOCKERFILES)
    assert [step for step in cpu if step not in gpu] == [("ARG", "EXTRAS=cpu,openmpi,kubernetes")]
    assert [step for step in gpu if step not in cpu] == [
        ("ARG", "EXTRAS=gpu,openmpi,kubernetes"),
        ("ENV", "NVIDIA_VISIBLE_DEVICES=void"),
        ("ENV", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    ]
