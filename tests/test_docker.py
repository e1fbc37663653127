"""Checks of the Dockerfile that need no Docker."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.harness.jobs import REPOSITORY


def _steps() -> list[tuple[str, str]]:
    """Return the instructions and their arguments."""
    text = (REPOSITORY / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line]


def test_extras_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"\.whl\)\[(.*?)\]", "\n".join(rest for _, rest in _steps()))
    devices, *others = extras.split(",")
    assert devices == "$DEVICES"
    assert ("ARG", "DEVICES=cpu") in _steps()
    assert {"cpu", "gpu", *others} <= set(project["optional-dependencies"])
    assert "kubernetes" in others, "needed by the launcher"


def test_containers_do_not_run_as_root() -> None:
    users = [rest for step, rest in _steps() if step == "USER"]
    assert users == ["1000:1000"], "Kubernetes needs a numeric user"


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    sources = [
        source
        for step, rest in _steps()
        if step == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (REPOSITORY / source).exists(), source
        kept = (f"!{source}", f"!{Path(source).parent}/*{Path(source).suffix}")
        assert set(kept) & set(ignored), f".dockerignore excludes {source}"


def test_the_image_has_the_command() -> None:
    # The wheel is built from the copied files, so the command must be in the package.
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["hvdtrain"].partition(":")[0] == "hvdtrain.__main__"
    assert "shared-scripts" not in project["tool"]["hatch"]["build"]["targets"]["wheel"]
