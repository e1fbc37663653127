"""The Dockerfile names what exists; Docker is not needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.harness.jobs import REPOSITORY


def _steps() -> list[tuple[str, str]]:
    """Instructions and what stands behind them."""
    text = (REPOSITORY / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def test_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.whl\)\[(.*?)\]", "\n".join(rest for _, rest in _steps()))
    devices, *others = extras.split(",")
    assert devices == "$DEVICES"
    assert ("ARG", "DEVICES=cpu") in _steps()
    assert {"cpu", "gpu", *others} <= set(project["optional-dependencies"])
    assert "kubernetes" in others, "the launcher asks its cluster"


def test_containers_do_not_run_as_root() -> None:
    users = [rest for step, rest in _steps() if step == "USER"]
    assert users == ["1000:1000"], "a number: Kubernetes does not know what a name stands for"


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    named = [
        source
        for step, rest in _steps()
        if step == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert named
    for source in named:
        assert (REPOSITORY / source).exists(), source
        kept = (f"!{source}", f"!{Path(source).parent}/*{Path(source).suffix}")
        assert set(kept) & set(ignored), f".dockerignore keeps {source} out"


def test_the_image_has_the_command() -> None:
    """Its wheel is built of what is copied, so the command must come from the package itself."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["hvdtrain"].partition(":")[0] == "hvdtrain.__main__"
    assert "shared-scripts" not in project["tool"]["hatch"]["build"]["targets"]["wheel"]
