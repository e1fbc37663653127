from __future__ import annotations

import time
from pathlib import Path

import pytest

from hvdtrain.serve import event_files
from hvdtrain.serve.event_files import find_event_folder


def _event_file(folder: Path, begun_s: float) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"events.out.tfevents.{int(begun_s)}.host.1.0.v2").touch()
    return folder


def test_a_folder_that_an_argument_names_comes_first(tmp_path: Path) -> None:
    _event_file(tmp_path / "runs" / "other" / "logs", 1000.0)
    _event_file(tmp_path / "runs" / "mine" / "logs" / "train", 10.0)
    _event_file(tmp_path / "runs" / "mine" / "logs" / "validation", 20.0)
    (tmp_path / "data").mkdir()
    logs = tmp_path / "runs" / "mine" / "logs"
    for words in (["--run-dir", "runs/mine"], ["--run-dir=runs/mine"], [str(logs)]):
        program = ["python", "train.py", "--data", "data", *words, "x" * 5000, "a\0b", "/"]
        assert find_event_folder(str(tmp_path), program, 900.0, None) == logs


def test_others_are_known_by_when_they_were_begun(tmp_path: Path) -> None:
    _event_file(tmp_path / "first", 1000.0)
    second = _event_file(tmp_path / "a" / "second", 2000.0)
    program = ["python", "train.py"]
    assert find_event_folder(str(tmp_path), program, 2000.7, 2500.0) == second
    assert find_event_folder(str(tmp_path), program, 900.0, 2500.0) == tmp_path
    assert find_event_folder(str(tmp_path), program, 2100.0, None) is None
    _event_file(tmp_path / "a" / "third", time.time())
    found = find_event_folder(str(tmp_path), program, 2100.0, None)
    assert found == tmp_path / "a" / "third"
    assert find_event_folder("/nowhere", program, 0.0, None) is None


def test_not_all_of_a_large_folder_is_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*"abcdefgh")
    _event_file(deep, 1000.0)
    _event_file(tmp_path / ".hidden", 1000.0)
    (tmp_path / "link").symlink_to(deep)
    assert find_event_folder(str(tmp_path), ["a"], 0.0, None) is None
    beside = _event_file(tmp_path / "z", 1000.0)
    assert find_event_folder(str(tmp_path), ["a"], 0.0, None) == beside
    monkeypatch.setattr(event_files, "MOST_ENTRIES", 3)
    assert find_event_folder(str(tmp_path), ["a"], 0.0, None) is None
