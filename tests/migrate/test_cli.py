from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.migrate import cli
from tests.harness.jobs import REPOSITORY

OLD = "import horovod.keras as hvd\nhvd.init()\n"
NEW = "import hvdtrain.keras as hvd\nhvd.init()\n"
REMOVED = "import tensorflow as tf\nopt = tf.train.AdamOptimizer(0.1)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_dry_run_shows_the_changes(folder: Path, capfdbinary) -> None:
    (folder / "train.py").write_text(OLD)
    assert main(["migrate", "train.py"]) == 0
    shown = capfdbinary.readouterr()
    assert shown.out.decode().splitlines() == [
        "--- train.py",
        "+++ train.py",
        "@@ -1,2 +1,2 @@",
        "-import horovod.keras as hvd",
        "+import hvdtrain.keras as hvd",
        " hvd.init()",
    ]
    assert shown.err == b"lines to change: 1, remaining edits: 0\n"
    assert (folder / "train.py").read_text() == OLD
    assert names(folder) == ["train.py"]


def test_remaining_edits_are_shown(folder: Path, capfdbinary) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "model.py").write_text(REMOVED)
    assert main(["migrate", "train.py", "model.py", str(folder / "train.py")]) == 1
    shown = capfdbinary.readouterr()
    assert shown.out.count(b"--- ") == 1
    assert shown.err.decode().splitlines() == [
        "model.py:2: tf.train.AdamOptimizer was removed in TensorFlow 2; use tf.compat.v1 "
        "(tf_upgrade_v2 changes it), or Keras",
        "lines to change: 1, remaining edits: 1",
    ]


def test_the_example_in_the_documentation(folder: Path, run_command) -> None:
    text = (REPOSITORY / "docs" / "horovod.md").read_text()
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    output = re.findall(r"```console\n\$ hvdtrain migrate train.py\n(.*?)```", text, re.DOTALL)[0]
    (folder / "train.py").write_text(script)
    done = run_command([sys.executable, "-m", "hvdtrain", "migrate", "train.py"])
    assert done.stdout + done.stderr == output


def test_write_keeps_originals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "train.py").chmod(0o750)
    (folder / "model.py").write_text(REMOVED)
    assert main(["migrate", "--write", "train.py", "model.py"]) == 1
    assert "lines changed: 1, remaining edits: 1" in capsys.readouterr().err
    assert names(folder) == ["model.py", "train.py", "train.py.orig"]
    assert (folder / "train.py").read_text() == NEW
    assert (folder / "train.py.orig").read_text() == OLD
    for name in ("train.py", "train.py.orig"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o750
    # The second time there is nothing to write.
    assert main(["migrate", "--write", "train.py"]) == 0
    assert (folder / "train.py.orig").read_text() == OLD


def test_write_follows_links(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / "scripts" / "real.py").write_text(OLD)
    (folder / "train.py").symlink_to("scripts/real.py")
    assert main(["migrate", "--write", "train.py"]) == 0
    assert os.readlink("train.py") == "scripts/real.py"
    assert (folder / "train.py").read_text() == NEW
    assert names(folder / "scripts") == ["real.py", "real.py.orig"]


def test_an_existing_original_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first.py", "train.py"):
        (folder / name).write_text(OLD)
    (folder / "train.py.orig").write_text("mine")
    assert main(["migrate", "--write", "first.py", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "train.py can't be changed: " in error
    assert "train.py.orig already exists; move or remove it" in error
    assert names(folder) == ["first.py", "train.py", "train.py.orig"]
    assert (folder / "first.py").read_text() == OLD
    assert (folder / "train.py.orig").read_text() == "mine"


def test_unusable_files_are_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "old.py").write_text("x = 1\nprint 'x'\n")
    assert main(["migrate", "--write", "train.py", "old.py", "none.py", "."]) == 2
    shown = capsys.readouterr()
    assert "old.py is not valid Python 3: " in shown.err
    assert "none.py can't be read: No such file or directory" in shown.err
    assert ". can't be read: Is a directory" in shown.err
    assert shown.out == ""
    assert names(folder) == ["old.py", "train.py"]
    assert (folder / "train.py").read_text() == OLD


def test_a_notebook_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my model.ipynb").write_text(OLD)
    assert main(["migrate", "--write", "my model.ipynb"]) == 2
    shown = capsys.readouterr()
    assert "is a notebook" in shown.err
    assert "jupyter nbconvert --to script 'my model.ipynb'" in shown.err
    assert shown.out == ""
    assert (folder / "my model.ipynb").read_text() == OLD


def test_a_full_disk_leaves_the_file_unchanged(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(OLD)

    def full(*names: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.os, "replace", full)
    assert main(["migrate", "--write", "train.py"]) == 2
    assert "train.py can't be written: No space left on device" in capsys.readouterr().err
    assert names(folder) == ["train.py"]
    assert (folder / "train.py").read_text() == OLD
