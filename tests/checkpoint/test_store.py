"""Writing, reading and pruning checkpoints, and snapshots that can't be stored."""

from __future__ import annotations

import math
import random
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from hvdtrain import CheckpointError, ConfigurationError
from hvdtrain.checkpoint import Snapshot, Store
from tests.checkpoint.samples import check, files, flip, same_bits, saved_steps, snapshot

PLAIN = (
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 "
    "complex128"
)
SMALL = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int4 uint4"
)
DTYPES = [np.dtype(name) for name in PLAIN.split()]
DTYPES += [np.dtype(getattr(ml_dtypes, name)) for name in SMALL.split() if hasattr(ml_dtypes, name)]


def _snapshot(**content) -> Snapshot:
    return Snapshot(**{"step": 1, "state": {}, "model": {}, "ranks": {}, **content})


def _round_trip(directory: Path, written: Snapshot) -> Snapshot:
    folder = Store(directory).write(written)
    assert folder == directory / f"step-{written.step:08d}"
    found = Store(directory).newest()
    assert found is not None
    return found


def _random(dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Return arrays of random bits, which include NaN."""
    values = np.random.default_rng(7).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    if dtype.name == "bool":
        values &= 1
    if dtype.name in ("int4", "uint4"):
        return (values[..., 0] % 8).astype(dtype)
    return values.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_restored_bitwise(dtype: np.dtype, tmp_path: Path) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5,), (4, 3), (2, 3, 4)]
    arrays = {f"of shape {shape}": _random(dtype, shape) for shape in shapes}
    whole = _random(dtype, (6, 8))
    arrays |= {"transposed": whole.T, "strided": whole[::2, 1::3], "backward": whole[::-1]}
    written = _snapshot(model=arrays, ranks=arrays)
    same_bits(_round_trip(tmp_path, written), written)


def test_big_endian_arrays_and_scalars(tmp_path: Path) -> None:
    values = np.arange(5, dtype=">i4")
    found = _round_trip(tmp_path, _snapshot(model={"values": values, "scalar": np.float32(2.5)}))
    assert found.model["values"].dtype == np.int32
    assert found.model["values"].tolist() == [0, 1, 2, 3, 4]
    assert found.model["scalar"].shape == ()
    assert found.model["scalar"] == 2.5


def test_restored_arrays_are_writable(tmp_path: Path) -> None:
    model = {"a": np.ones(3), "b": np.ones(2, ml_dtypes.int4)}
    for array in _round_trip(tmp_path, _snapshot(model=model)).model.values():
        array[...] = 0


def test_state_is_restored(tmp_path: Path) -> None:
    state = {
        "epoch": 3,
        "big": 2**200,
        "best": math.inf,
        "worst": -math.inf,
        "loss": 0.1 + 0.2,
        "none": None,
        "flag": True,
        "words": ["Grüße", "\udcff", "a\nb", ""],
        "deep": {"a": {"b": [1, [2, [3.5, {"c": []}]]]}},
        "random": random.Random(1).getstate(),
    }
    found = _round_trip(tmp_path, _snapshot(state=state)).state
    version, numbers, gauss = state.pop("random")
    assert found.pop("random") == [version, list(numbers), gauss]
    assert found == state
    found = _round_trip(tmp_path / "nan", _snapshot(state={"loss": math.nan})).state
    assert math.isnan(found["loss"])


CYCLE: dict = {}
CYCLE["self"] = CYCLE


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"state": {"a": {"b": [0, np.float32(1)]}}}, "state['a']['b'][1] must be None, bool"),
        ({"state": {"a": np.float64(1)}}, "got numpy.float64"),
        ({"state": {"a": b"text"}}, "got builtins.bytes"),
        ({"state": {"a": {1}}}, "got builtins.set"),
        ({"state": {"a": {1: 2}}}, "Keys of state['a'] must be strings"),
        ({"state": {"a": {"$float": "inf"}}}, "other than '$float'"),
        ({"state": []}, "must be a dict, got list"),
        ({"state": CYCLE}, "nested too deeply"),
        ({"model": {"names": np.array(["a"])}}, "model['names'] must have a bool"),
        ({"ranks": {"any": np.array([None])}}, "got object"),
        ({"model": {"list": [1, 2]}}, "model['list'] must be a NumPy array, got list"),
        ({"model": {"__metadata__": np.ones(1)}}, "got '__metadata__'"),
        ({"model": {3: np.ones(1)}}, "got 3"),
        ({"model": {"\udcff": np.ones(1)}}, "valid Unicode"),
        ({"step": -1}, "got -1"),
        ({"step": 1.0}, "got 1.0"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_unsupported_content_is_refused(content, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as raised:
        Store(tmp_path / "new").write(_snapshot(**content))
    assert text in str(raised.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_keep_must_be_a_positive_integer(keep, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep must be"):
        Store(tmp_path, keep=keep)


def test_a_directory_without_checkpoints(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent" / "deeper"):
        assert Store(directory).newest() is None
        assert saved_steps(directory) == []
        assert not (tmp_path / "absent").exists()


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for write in range(12):
        store.write(snapshot(write))
        assert saved_steps(tmp_path) == list(range(max(0, write * 2 // 3 - 1), write * 2 // 3 + 1))
        assert check(store.newest()) == write
    assert files(tmp_path) == ["step-00000006-2", "step-00000007"]


def test_keep_may_be_reduced(tmp_path: Path) -> None:
    for write in range(5):
        Store(tmp_path, keep=5).write(snapshot(write, step=write))
    Store(tmp_path, keep=2).write(snapshot(5, step=5))
    assert saved_steps(tmp_path) == [4, 5]


def test_a_step_that_is_saved_again_gets_a_new_name_and_counts_once(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    store.write(snapshot(100, step=5))
    for write in range(11):
        folder = store.write(snapshot(write, step=7, floats=10 * write))
        assert folder.name == ("step-00000007" if write == 0 else f"step-00000007-{write + 1}")
        assert check(Store(tmp_path).newest()) == write
        assert files(tmp_path) == ["step-00000005", folder.name]


def test_the_newest_intact_checkpoint_of_a_step_is_used(tmp_path: Path) -> None:
    """A step has two checkpoints if a writer is killed before it removes the older one."""
    store = Store(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    for write, name in enumerate(["step-00000007", "step-00000007-10", "step-00000007-9"], start=1):
        Store(tmp_path / name).write(snapshot(write, step=7)).rename(tmp_path / "runs" / name)
    assert check(store.newest()) == 2
    flip(tmp_path / "runs" / "step-00000007-10" / "state.json", 0)
    assert check(store.newest()) == 3
    assert saved_steps(tmp_path / "runs") == [7]
    store.write(snapshot(4, step=7))
    assert files(tmp_path / "runs") == ["step-00000007-11"]


@pytest.mark.parametrize("damage", ["size", "checksum"])
def test_keep_ignores_damaged_checkpoints(damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (10, 20):
        store.write(snapshot(step, step=step))
    path = tmp_path / "step-00000020" / "model.safetensors"
    if damage == "size":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, -1)
        assert check(store.newest()) == 10  # detects it
    store.write(snapshot(30, step=30))
    assert saved_steps(tmp_path) == [10, 20, 30]
    store.write(snapshot(40, step=40))
    assert saved_steps(tmp_path) == [30, 40]


def test_checkpoints_of_later_steps_are_ignored_and_kept(tmp_path: Path) -> None:
    """If training has resumed from an older step, its new checkpoints must be kept."""
    store = Store(tmp_path, keep=1)
    store.write(snapshot(1, step=500))
    flip(tmp_path / "step-00000500" / "model.safetensors", -1)
    for step in (10, 20):
        Store(tmp_path, keep=1).write(snapshot(step, step=step))
    assert saved_steps(tmp_path) == [20, 500]
    assert check(store.newest()) == 20


def test_folders_with_similar_names_are_ignored_and_kept(tmp_path: Path) -> None:
    others = ["step-1", "step-000000010", "step-00000001x", "step-00000001-1", "notes"]
    others.append(".writing-mine")
    for name in others:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("mine")
    (tmp_path / "step-00000009").write_text("a file")
    Store(tmp_path, keep=1).write(snapshot(3))
    assert saved_steps(tmp_path) == [2]
    assert files(tmp_path) == sorted([*others, "step-00000002", "step-00000009"])


def test_a_file_or_link_with_the_name_of_a_step_does_not_prevent_a_checkpoint(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "runs")
    folder = store.write(snapshot(1, step=7))
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    folder.with_name("step-00000007-2").write_text("a file")
    assert store.write(snapshot(2, step=7)).name == "step-00000007-3"
    assert check(Store(tmp_path / "runs").newest()) == 2


def test_a_relative_directory_is_resolved_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.write(snapshot(0)) == tmp_path / "runs" / "step-00000000"


def test_the_package_doesnt_use_pickle() -> None:
    for path in Path(Store.write.__code__.co_filename).parent.glob("*.py"):
        assert "pickle" not in path.read_text(), path
