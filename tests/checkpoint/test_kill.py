"""SIGKILL at any moment leaves the newest complete checkpoint; a power cut would as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RUNNER = [sys.executable, "-m", "tests.checkpoint.killed_writer"]


@pytest.mark.more
def test_killed_at_random_moments(tmp_path: Path, run_command) -> None:
    done = run_command([*RUNNER, "random", tmp_path / "runs", "300"], timeout_s=110)
    assert done.returncode == 0, done


@pytest.mark.slow
def test_killed_before_each_operation(tmp_path: Path, run_command) -> None:
    done = run_command([*RUNNER, "everywhere", tmp_path / "runs"], timeout_s=110)
    assert done.returncode == 0, done


@pytest.mark.slow
def test_each_operation_fails(tmp_path: Path, run_command) -> None:
    done = run_command([*RUNNER, "failing", tmp_path / "runs"], timeout_s=110)
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


def test_all_is_on_the_disk_before_the_next_step(tmp_path: Path, run_command) -> None:
    """What a power cut would show, were there one to have: the order of fsync and rename."""
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
