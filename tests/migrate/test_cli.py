"""``hvdtrain migrate`` on files: what is shown, what is written, and what is refused."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.cli import main
from hvdtrain.errors import ConfigurationError
from hvdtrain.migrate import script_files
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
    assert shown.err == b"1 line to change, 0 edits left for you\n"
    assert (folder / "train.py").read_text() == OLD
    assert names(folder) == ["train.py"]


def test_what_is_left_is_shown_and_exits_1(folder: Path, capfdbinary) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "model.py").write_text(GONE)
    assert main(["migrate", "train.py", "model.py", str(folder / "train.py")]) == 1
    shown = capfdbinary.readouterr()
    assert shown.out.count(b"--- ") == 1
    assert shown.err.decode().splitlines() == [
        "model.py:2: tf.train.AdamOptimizer is gone since TensorFlow 2; use keras.optimizers.Adam; "
        "or take it from tf.compat.v1",
        "1 line to change, 1 edit left for you",
    ]


def test_the_document_shows_what_is_printed(folder: Path, run_command) -> None:
    text = (REPOSITORY / "docs" / "horovod.md").read_text()
    script = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    command, _, shown = re.findall(r"```console\n\$ (.*?)```", text, re.DOTALL)[0].partition("\n")
    (folder / "train.py").write_text(script)
    done = run_command([sys.executable, "-m", *command.split()])
    assert done.stdout + done.stderr == shown


def test_notes_leave_nothing_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        f"{OLD}import tensorflow as tf\ntf.config.set_visible_devices(g[hvd.local_rank()], 'GPU')\n"
    )
    (folder / "train.py").write_text(text)
    assert main(["migrate", "train.py"]) == 0
    assert "train.py:4: note: hvdtrain.init() has bound the GPU" in capsys.readouterr().err


def test_files_are_written_and_originals_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "train.py").chmod(0o750)
    (folder / "model.py").write_text(GONE)
    assert main(["migrate", "--write", "train.py", "model.py"]) == 1
    assert "1 line changed, 1 edit left for you" in capsys.readouterr().err
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
    assert "train.py.orig: there already" in capsys.readouterr().err
    assert names(folder) == ["first.py", "train.py", "train.py.orig"]
    assert (folder / "first.py").read_text() == OLD
    assert (folder / "train.py.orig").read_text() == "mine"


def test_not_even_one_that_came_meanwhile(folder: Path) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "train.py.orig").write_text("mine")
    with pytest.raises(ConfigurationError, match="File exists"):
        script_files.write(folder / "train.py", OLD.encode(), NEW.encode())
    assert (folder / "train.py.orig").read_text() == "mine"


def test_all_unusable_files_are_told_and_none_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(OLD)
    (folder / "old.py").write_text("x = 1\nprint 'x'\n")
    assert main(["migrate", "--write", "train.py", "old.py", "none.py", "."]) == 2
    shown = capsys.readouterr()
    assert "old.py: line 2 isn't Python 3: " in shown.err
    assert "none.py: it can't be read: No such file or directory" in shown.err
    assert ".: it can't be read: Is a directory; name the scripts in it" in shown.err
    assert "notebooks (.ipynb) as scripts first: jupyter nbconvert --to script" in shown.err
    assert shown.out == ""
    assert names(folder) == ["old.py", "train.py"]
    assert (folder / "train.py").read_text() == OLD


@pytest.mark.parametrize("options", [[], ["--write"]])
def test_a_notebook_is_an_error_that_names_the_way(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": [OLD]}
    text = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (folder / "my model.ipynb").write_text(text)
    assert main(["migrate", *options, "my model.ipynb"]) == 2
    shown = capsys.readouterr()
    assert "is a notebook" in shown.err
    assert "jupyter nbconvert --to script 'my model.ipynb'" in shown.err
    assert shown.out == ""
    assert (folder / "my model.ipynb").read_text() == text


def test_a_full_disk_leaves_the_file_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(OLD)

    def full(*names: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script_files.os, "replace", full)
    assert main(["migrate", "--write", "train.py"]) == 2
    assert "train.py: it can't be written: No space left on device" in capsys.readouterr().err
    assert names(folder) == ["train.py"]
    assert (folder / "train.py").read_text() == OLD


def test_help_is_one_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["migrate", "--help"]) == 0
    shown = capsys.readouterr().out
    for part in ("--write", "FILE.orig", "examples:", "exit codes:"):
        assert part in shown
    assert len(shown.splitlines()) <= 24


def test_no_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate"]) == 2
    assert "FILE" in capsys.readouterr().err


def test_it_loads_nothing_heavy(folder: Path) -> None:
    (folder / "train.py").write_text(OLD)
    code = """if True:
        import sys
        from hvdtrain.cli import main
        assert main(["migrate", sys.argv[1]]) == 0
        heavy = {"tensorflow", "keras", "numpy", "mpi4py", "importlib.metadata"}
        print("HEAVY", sorted(heavy & set(sys.modules)))
    """
    argv = [sys.executable, "-c", code, str(folder / "train.py")]
    shown = subprocess.check_output(argv, cwd=REPOSITORY, text=True, timeout=30)
    assert shown.splitlines()[-1] == "HEAVY []"
