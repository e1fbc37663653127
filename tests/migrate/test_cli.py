"""``hvdtrain migrate`` on files: what is shown, what is written, and what is refused."""

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
GONE = "import tensorflow as tf\nopt = tf.train.AdamOptimizer(0.1)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_changes_are_shown_and_nothing_is_written(folder: Path, capfdbinary) -> None:
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
    assert shown.err == b"lines to change: 1, edits left for you: 0\n"
    assert (folder / "train.py").read_text() == OLD
    assert names(folder) == ["train.py"]


def test_what_is_left_is_shown_and_exits_1(folder: Path, capfdbinary) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "model.py").write_text(GONE)
    assert main(["migrate", "train.py", "model.py", str(folder / "train.py")]) == 1
    shown = capfdbinary.readouterr()
    assert shown.out.count(b"--- ") == 1
    assert shown.err.decode().splitlines() == [
        "model.py:2: tf.train.AdamOptimizer is gone since TensorFlow 2; take it from tf.compat.v1 "
        "(tf_upgrade_v2 does so), or use Keras",
        "lines to change: 1, edits left for you: 1",
    ]


def test_the_document_shows_what_is_printed(folder: Path, run_command) -> None:
    text = (REPOSITORY / "docs" / "horovod.md").read_text()
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    command, _, shown = re.findall(r"```console\n\$ (.*?)```", text, re.DOTALL)[0].partition("\n")
    (folder / "train.py").write_text(script)
    done = run_command([sys.executable, "-m", *command.split()])
    assert done.stdout + done.stderr == shown


def test_files_are_written_and_originals_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "train.py").chmod(0o750)
    (folder / "model.py").write_text(GONE)
    assert main(["migrate", "--write", "train.py", "model.py"]) == 1
    assert "lines changed: 1, edits left for you: 1" in capsys.readouterr().err
    assert names(folder) == ["model.py", "train.py", "train.py.orig"]
    assert (folder / "train.py").read_text() == NEW
    assert (folder / "train.py.orig").read_text() == OLD
    for name in ("train.py", "train.py.orig"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o750
    # Again there is nothing to write, and so no original to lose.
    assert main(["migrate", "--write", "train.py"]) == 0
    assert (folder / "train.py.orig").read_text() == OLD


def test_a_link_stays_one(folder: Path) -> None:
    (folder / "scripts").mkdir()
    (folder / "scripts" / "real.py").write_text(OLD)
    (folder / "train.py").symlink_to("scripts/real.py")
    assert main(["migrate", "--write", "train.py"]) == 0
    assert os.readlink("train.py") == "scripts/real.py"
    assert (folder / "train.py").read_text() == NEW
    assert names(folder / "scripts") == ["real.py", "real.py.orig"]


def test_an_original_is_never_lost(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first.py", "train.py"):
        (folder / name).write_text(OLD)
    (folder / "train.py.orig").write_text("mine")
    assert main(["migrate", "--write", "first.py", "train.py"]) == 2
    assert "train.py.orig exists; move or remove it" in capsys.readouterr().err
    assert names(folder) == ["first.py", "train.py", "train.py.orig"]
    assert (folder / "first.py").read_text() == OLD
    assert (folder / "train.py.orig").read_text() == "mine"


def test_all_unusable_files_are_told_and_none_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "old.py").write_text("x = 1\nprint 'x'\n")
    assert main(["migrate", "--write", "train.py", "old.py", "none.py", "."]) == 2
    shown = capsys.readouterr()
    assert "old.py: it isn't Python 3: " in shown.err
    assert "none.py: it can't be read: No such file or directory" in shown.err
    assert ".: it can't be read: Is a directory" in shown.err
    assert shown.out == ""
    assert names(folder) == ["old.py", "train.py"]
    assert (folder / "train.py").read_text() == OLD


def test_a_notebook_is_an_error_with_the_command_that_converts_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my model.ipynb").write_text(OLD)
    assert main(["migrate", "--write", "my model.ipynb"]) == 2
    shown = capsys.readouterr()
    assert "is a notebook" in shown.err
    assert "jupyter nbconvert --to script 'my model.ipynb'" in shown.err
    assert shown.out == ""
    assert (folder / "my model.ipynb").read_text() == OLD


def test_a_full_disk_leaves_the_file_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(OLD)

    def full(*names: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli.os, "replace", full)
    assert main(["migrate", "--write", "train.py"]) == 2
    assert "train.py: it can't be written: No space left on device" in capsys.readouterr().err
    assert names(folder) == ["train.py"]
    assert (folder / "train.py").read_text() == OLD
