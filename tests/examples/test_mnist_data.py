"""Reading of digits in each file format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.examples.digits import load_mnist_data

mnist_data = load_mnist_data()

# Sum of the pixels of the bundled test digits.
TEST_SUM = 25825445

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits():
    return mnist_data.load_digits()


@pytest.fixture(scope="module")
def few(digits):
    """Fifty training digits and ten test digits."""
    return mnist_data.Digits(
        train_images=digits.train_images[::80],
        train_labels=digits.train_labels[::80],
        test_images=digits.test_images[::100],
        test_labels=digits.test_labels[::100],
    )


def _assert_equal(result, expected) -> None:
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name), err_msg=name)
    assert result.train_images.dtype == np.uint8


def test_bundled_digits_are_split_evenly_by_class(digits) -> None:
    assert digits.train_images.shape == (4000, 28, 28)
    assert digits.test_images.shape == (1000, 28, 28)
    assert np.bincount(digits.train_labels).tolist() == [400] * 10
    assert np.bincount(digits.test_labels).tolist() == [100] * 10
    assert digits.train_images.max() == 255
    images = np.concatenate([digits.train_images, digits.test_images]).reshape(5000, -1)
    assert len(np.unique(images, axis=0)) == 5000


def test_the_split_is_fixed(digits) -> None:
    _assert_equal(mnist_data.load_digits(), digits)
    # Accuracies are comparable between versions only with the same test digits.
    assert int(digits.test_images.astype(np.int64).sum()) == TEST_SUM


def _idx(array: np.ndarray) -> bytes:
    head = (0x800 + array.ndim).to_bytes(4, "big")
    return head + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.mark.parametrize("pattern", ["{}-idx{}-ubyte", "{}-idx{}-ubyte.gz", "{}.idx{}-ubyte"])
def test_idx_files(few, tmp_path: Path, pattern: str) -> None:
    arrays = {
        "train-images": few.train_images,
        "train-labels": few.train_labels,
        "t10k-images": few.test_images,
        "t10k-labels": few.test_labels,
    }
    for name, array in arrays.items():
        data = _idx(array)
        path = tmp_path / pattern.format(name, array.ndim)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    _assert_equal(mnist_data.load_digits(tmp_path), few)


def test_broken_idx_files_are_named(few, tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(_idx(few.train_images)[:-1])
    with pytest.raises(ValueError, match=r"must hold 39200 bytes for shape .*, got 39199"):
        mnist_data.load_digits(tmp_path)
    path.write_bytes(b"not an IDX file")
    with pytest.raises(ValueError, match="train-images-idx3-ubyte must start with 2051 or 2049"):
        mnist_data.load_digits(tmp_path)
    path.write_bytes(_idx(few.train_images))
    with pytest.raises(FileNotFoundError, match="expected four IDX files"):
        mnist_data.load_digits(tmp_path)


@pytest.mark.parametrize("as_file", [True, False])
def test_npz(few, tmp_path: Path, as_file: bool) -> None:
    path = tmp_path / "mnist.npz"
    np.savez_compressed(
        path,
        x_train=few.train_images,
        y_train=few.train_labels,
        x_test=few.test_images,
        y_test=few.test_labels,
    )
    _assert_equal(mnist_data.load_digits(path if as_file else tmp_path), few)


def test_npz_without_the_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", images=np.zeros(1))
    with pytest.raises(ValueError, match=r"lacks .*x_test.*, got .*images"):
        mnist_data.load_digits(tmp_path)


def _write_tfrecords(path: Path, images: np.ndarray, labels: np.ndarray, layout: str) -> None:
    """Write a file as TensorFlow's convert_to_records does, or with the number of pixels."""
    import tensorflow as tf

    def integer(value: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value)]))

    other_features = {
        "convert_to_records": {"height": integer(28), "width": integer(28), "depth": integer(1)},
        "pixels": {"pixels": integer(784)},
    }[layout]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for image, label in zip(images, labels):
            raw = tf.train.Feature(bytes_list=tf.train.BytesList(value=[image.tobytes()]))
            features = tf.train.Features(
                feature={"image_raw": raw, "label": integer(label), **other_features}
            )
            writer.write(tf.train.Example(features=features).SerializeToString())


@pytest.mark.parametrize("layout", ["convert_to_records", "pixels"])
def test_tfrecord_files_in_parts(few, tmp_path: Path, layout: str) -> None:
    for part, rows in enumerate((slice(0, 30), slice(30, None))):
        _write_tfrecords(
            tmp_path / f"train-{part:05d}-of-00002.tfrecords",
            few.train_images[rows],
            few.train_labels[rows],
            layout,
        )
    _write_tfrecords(tmp_path / "test.tfrecords", few.test_images, few.test_labels, layout)
    _assert_equal(mnist_data.load_digits(tmp_path), few)


def test_one_tfrecord_file_is_split(digits, tmp_path: Path) -> None:
    images, labels = digits.train_images[:500], digits.train_labels[:500]
    _write_tfrecords(tmp_path / "output.tfrecords", images, labels, "pixels")
    _assert_equal(mnist_data.load_digits(tmp_path), mnist_data.split_by_class(images, labels))


def test_tfrecords_of_floats_are_an_error(few, tmp_path: Path) -> None:
    images = few.train_images.astype(np.float32)
    _write_tfrecords(tmp_path / "all.tfrecords", images, few.train_labels, "pixels")
    with pytest.raises(ValueError, match=r"image_raw must hold 784 bytes, got \[3136\]"):
        mnist_data.load_digits(tmp_path)


def test_a_folder_without_digits_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no MNIST in .*found \['notes.txt'\]"):
        mnist_data.load_digits(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mnist_data.load_digits(tmp_path / "absent")
