"""Damaged checkpoints, which are reported while an older one is used."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from hvdtrain import CheckpointError
from hvdtrain.checkpoint import Store
from tests.checkpoint.samples import check, files, flip, snapshot

NAMES = ("model.safetensors", "ranks.safetensors", "state.json", "manifest.json")


def _each(facts: dict) -> dict:
    return dict.fromkeys(NAMES[:3], facts)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = Store(tmp_path)
    for write in (10, 20):
        store.write(snapshot(write, step=write, floats=50))
    return tmp_path


def _newest(directory: Path) -> tuple[int, list[str]]:
    notices: list[str] = []
    return check(Store(directory, notice=notices.append).newest()), notices


def _replace(path: Path, **changes) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_file(name: str, directory: Path) -> None:
    path = directory / "step-00000020" / name
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:size])
        write, (notice,) = _newest(directory)
        assert write == 10
        assert name in notice, notice
        assert str(path.parent) in notice, notice
        assert "Step 10 is used instead" in notice, notice
    path.write_bytes(whole)
    assert _newest(directory) == (20, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit(name: str, directory: Path) -> None:
    path = directory / "step-00000020" / name
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flip(path, position)
        write, notices = _newest(directory)
        # White space in the manifest may change.
        if name != "manifest.json" or notices:
            assert write == 10, position
            assert name in notices[0] or name == "manifest.json", notices
        else:
            assert write == 20
            assert whole[position] in b" \n", position
        path.write_bytes(whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["missing", "longer", "folder", "link", "pipe"])
def test_a_file_of_another_kind(name: str, kind: str, directory: Path) -> None:
    path = directory / "step-00000020" / name
    if kind == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        content = path.read_bytes()
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (directory / "other").write_bytes(content)
        path.symlink_to(directory / "other")
    elif kind == "pipe":
        os.mkfifo(path)
    write, notices = _newest(directory)
    assert write == 10
    if (name, kind) == ("manifest.json", "missing"):
        assert notices == []  # without a manifest, it looks like the remains of a killed writer
    else:
        assert len(notices) == 1
        assert name in notices[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"format": 0}, "lacks a format version"),
        ({"format": "1"}, "lacks a format version"),
        ({"step": 10}, "belongs to step 10, not 20"),
        ({"step": "20"}, "belongs to step '20', not 20"),
        ({"files": {}}, "lacks the size or checksum"),
        ({"files": _each({"bytes": 1})}, "lacks the size or checksum"),
        ({"files": _each({"bytes": "1", "sha256": "0" * 64})}, "bytes, expected"),
        ({"files": _each({"bytes": 2**70, "sha256": "0" * 64})}, "bytes, expected"),
        ({"padding": " " * 100_000}, "more than 65536 bytes"),
        ("[]", "lacks a format version"),
        ("null", "lacks a format version"),
        ("[" * 60_000, "is not valid JSON"),
        ('"\udcff"', "is not valid JSON"),
        ("{", "is not valid JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_manifest(content: dict | str, text: str, directory: Path) -> None:
    path = directory / "step-00000020" / "manifest.json"
    if isinstance(content, dict):
        _replace(path, **content)
    else:
        path.write_bytes(content.encode(errors="surrogateescape"))
    write, (notice,) = _newest(directory)
    assert write == 10
    assert text in notice, notice


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", b"[]"),
        ("state.json", b'{"a": {"$float": ["inf"]}}'),
        ("state.json", b"[" * 100_000),
        ("model.safetensors", b"\xff" * 100),
        ("model.safetensors", b"\xff" * 7 + b"\x7f"),
        (
            "ranks.safetensors",
            b'\x40\0\0\0\0\0\0\0{"a":{"dtype":"F64","shape":[999999999],"data_offsets":[0,8]}} '
            + bytes(8),
        ),
        (
            "ranks.safetensors",
            b'\x58\0\0\0\0\0\0\0{"__metadata__":{"hvdtrain.dtypes":"[1]"},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(96)
            + bytes(1),
        ),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_files_with_matching_checksums(name: str, content: bytes, directory: Path) -> None:
    folder = directory / "step-00000020"
    (folder / name).write_bytes(content)
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    _replace(folder / "manifest.json", files=listed)
    write, (notice,) = _newest(directory)
    assert write == 10
    assert f"{name}: it" in notice or "could not convert" in notice, notice


def test_the_error_lists_all_checkpoints_if_none_is_intact(directory: Path) -> None:
    flip(directory / "step-00000010" / "state.json", 0)
    (directory / "step-00000020" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError) as raised:
        Store(directory).newest()
    text = str(raised.value)
    assert f"{directory}/step-00000020: model.safetensors is missing" in text
    assert f"{directory}/step-00000010: state.json has a wrong checksum" in text


def test_a_newer_format_is_an_error(directory: Path) -> None:
    _replace(directory / "step-00000020" / "manifest.json", format=2)
    with pytest.raises(CheckpointError, match=r"has format 2.*Update hvdtrain"):
        Store(directory).newest()


def test_saving_a_step_again_removes_its_damaged_checkpoint(directory: Path) -> None:
    folder = directory / "step-00000020"
    for name in NAMES:
        flip(folder / name, 0)
        folder = Store(directory).write(snapshot(21, step=20))
        assert _newest(directory) == (21, [])
        assert files(directory) == ["step-00000010", folder.name]
