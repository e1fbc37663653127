"""Environments with other MPIs and Horovod."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import environments
from tests.environments import (
    HOROVODS_PYTHON,
    build_of,
    missing_environment,
    requirements_of,
    stamp_of,
)
from tests.harness.jobs import REPOSITORY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the environments."""
    monkeypatch.setattr(environments, "folder_of", lambda name: tmp_path / name)
    return tmp_path


def test_incomplete_and_outdated_environments(folder: Path) -> None:
    stamp, content = stamp_of("mpich")
    stamp.parent.mkdir()
    assert "does not exist" in (missing_environment("mpich") or "")
    stamp.write_text("of other requirements")
    assert "out of date; create it with: " in (missing_environment("mpich") or "")
    stamp.write_text(content)
    assert missing_environment("mpich") is None


def test_open_mpi_4_comes_from_the_system(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp, content = stamp_of("openmpi4")
    stamp.parent.mkdir()
    stamp.write_text(content)
    monkeypatch.setattr(environments, "SYSTEM_MPIRUN", "/nonexistent/mpirun")
    assert "install Debian's openmpi-bin" in (missing_environment("openmpi4") or "")


def test_an_optimised_horovod_is_a_separate_build() -> None:
    assert requirements_of("horovod-optimised") == requirements_of("horovod")
    assert build_of("horovod").keys() - build_of("horovod-optimised").keys() == {"HOROVOD_DEBUG"}
    assert stamp_of("horovod-optimised")[1] != stamp_of("horovod")[1]


def test_horovod_is_built_once_per_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, shim = (tmp_path / way / HOROVODS_PYTHON for way in ("link", "shim"))
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    shim.chmod(0o755)
    stamps = set()
    for program in (link, shim):
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.defpath}")
        environments._digest.cache_clear()
        stamps.add(stamp_of("horovod")[1])
    environments._digest.cache_clear()
    assert len(stamps) == 1


@pytest.mark.parametrize(("required", "outcome"), [("mpi", "skipped"), ("mpi,mpich", "failed")])
def test_a_missing_environment(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("HVDTRAIN_TEST_REQUIRE", required)
    pytester.makeconftest(
        """
        from pathlib import Path
        from tests import environments

        environments.folder_of = lambda name: Path("/nonexistent", name)
        pytest_plugins = ("tests.environments.plugin",)
        """
    )
    pytester.makepyfile("def test_it(environment): environment('mpich')")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-rsf")
    result.assert_outcomes(**{outcome: 1})
    result.stdout.fnmatch_lines(["*/nonexistent/mpich does not exist; create it with: *"])
