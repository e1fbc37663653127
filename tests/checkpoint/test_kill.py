"""Writers that are killed at any moment, and power cuts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RUNNER = [sys.executable, "-m", "tests.checkpoint.killed_writer"]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(("random", "150"), marks=pytest.mark.more),
        pytest.param(("kill",), marks=pytest.mark.slow),
        pytest.param(("fail",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_an_interrupted_writer(mode: tuple[str, ...], tmp_path: Path, run_command) -> None:
    done = run_command([*RUNNER, tmp_path / "runs", *mode], timeout_s=110)
    assert done.returncode == 0, done


ORDER = """
import os, sys
from pathlib import Path
from hvdtrain.checkpoint import Store
from tests.checkpoint.samples import snapshot

directory = Path(sys.argv[1])
Store(directory).write(snapshot(0, step=1))
real = os.fsync

def fsync(descriptor):
    print("sync", os.readlink(f"/proc/self/fd/{descriptor}"))
    real(descriptor)

def hook(event, arguments):
    if event == "os.rename":
        print("rename", os.fspath(arguments[0]), os.fspath(arguments[1]))

os.fsync = fsync
sys.addaudithook(hook)
Store(directory / "new" / "deep").write(snapshot(1, step=2))
print("--")
Store(directory, keep=1).write(snapshot(1, step=1))
"""


def test_files_are_flushed_before_the_rename(tmp_path: Path, run_command) -> None:
    """A test can't cut the power, so it checks the order of these operations."""
    directory = tmp_path / "runs"
    done = run_command([sys.executable, "-c", ORDER, directory])
    assert done.returncode == 0, done
    text = done.stdout.replace(f"{directory}/", "").replace(f"{directory}", ".")
    new, again = text.split("--\n")
    lines = new.splitlines()
    draft = next(line for line in lines if ".writing-" in line).split()[1].rsplit("/", 1)[0]
    assert lines == [
        "sync .",
        "sync new",
        f"sync {draft}/state.json",
        f"sync {draft}/model.safetensors",
        f"sync {draft}/ranks.safetensors",
        f"sync {draft}/manifest.json",
        f"sync {draft}",
        f"rename {draft} new/deep/step-00000002",
        "sync new/deep",
    ]
    published, synced, removed, gone = again.splitlines()[-4:]
    assert published.startswith("rename .writing-")
    assert published.endswith(" step-00000001-2")
    assert removed.startswith("rename step-00000001 .removing-")
    assert synced == gone == "sync ."
