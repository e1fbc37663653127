"""The measurement of the time that training waits for its batches."""

from __future__ import annotations

import gc
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.trainer import fit_inputs
from hvdtrain.trainer.data import HostBatches, Share
from hvdtrain.trainer.data.tensorflow.datasets import without_autotuning
from hvdtrain.trainer.fit_inputs import InputWait
from tests.trainer.features import X, Y, classifier

STEPS, READ_S = 9, 0.1


class Report:
    """A launcher that receives reports, or none."""

    INTERVAL_S = 0.2

    def __init__(self, *, heard: bool = True) -> None:
        self.is_heard = lambda: heard
        self.waits_s: list[float] = []
        self.waited_for_input = self.waits_s.append


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Report:
    report = Report()
    monkeypatch.setattr(fit_inputs, "report", report)
    return report


def slow(tuned: bool) -> tf.data.Dataset:
    """Return a pipeline with a slow reader that prefetches one batch."""

    def read(number: np.ndarray) -> np.ndarray:
        time.sleep(READ_S)
        return number

    dataset = tf.data.Dataset.range(STEPS)
    dataset = dataset.map(lambda number: tf.numpy_function(read, [number], tf.int64)).prefetch(1)
    return dataset if tuned else without_autotuning(dataset)


@pytest.mark.parametrize("tuned", [False, True])
def test_time_spent_prefetching_is_excluded(report: Report, tuned: bool) -> None:
    wait = InputWait()
    iterator = iter(wait.timed(slow(tuned)))

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        return next(iterator) + 1

    idle_s = 0.0
    step(iterator)
    wait.report()
    for _ in range(STEPS - 1):
        # Meanwhile the next batch is prefetched.
        time.sleep(0.5 * READ_S)
        start_s = time.perf_counter()
        step(iterator)
        idle_s += time.perf_counter() - start_s
        wait.report_if_due()
    wait.report()
    first_s, *rest_s = report.waits_s
    assert first_s >= 0.9 * READ_S
    # Calling the function takes some time itself.
    assert 0.2 * READ_S * (STEPS - 1) < sum(rest_s) <= idle_s
    # About five times a second.
    assert len(rest_s) <= 2 + (STEPS - 1) * 5 * READ_S


def test_batches_made_in_python_are_timed(report: Report) -> None:
    def slow_shares() -> Iterator[Share]:
        for number in range(STEPS):
            time.sleep(READ_S)
            yield Share(np.full((2, 1), number), 2, 2)

    spec = keras.KerasTensor((2, 1))
    wait = InputWait()
    batches = HostBatches(slow_shares, spec, num_batches=STEPS, reads_ahead=False)
    timed = wait.timed(batches)
    assert wait.timed(batches) is timed
    assert timed.element_spec == batches.element_spec
    numbers = []
    for share in timed:
        numbers.append(int(share.batch[0, 0]))
        time.sleep(READ_S)  # a step of training, which is not measured
        wait.report()
    assert numbers == [*range(STEPS)]
    assert min(report.waits_s) >= READ_S
    assert min(report.waits_s) < 2 * READ_S


def test_the_timed_dataset_yields_the_same_elements(
    report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elements = [({"a": np.ones(2), "b": np.float32(3)}, np.arange(n)) for n in (1, 2)]
    spec = (
        {"a": tf.TensorSpec(2, tf.float64), "b": tf.TensorSpec((), tf.float32)},
        tf.TensorSpec(None, tf.int64),
    )
    dataset = tf.data.Dataset.from_generator(lambda: elements, output_signature=spec)
    timed = InputWait().timed(dataset)
    assert timed.element_spec == dataset.element_spec
    assert [*map(str, timed.as_numpy_iterator())] == [*map(str, dataset.as_numpy_iterator())]
    # AutoGraph would write files, which a killed rank leaves behind.
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_measured_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report(heard=False)
    monkeypatch.setattr(fit_inputs, "report", report)
    wait, dataset = InputWait(), tf.data.Dataset.range(3)
    assert wait.timed(dataset) is dataset
    wait.report()
    wait.report_if_due()
    assert report.waits_s == []


def test_the_timed_dataset_is_reused_until_it_is_released(report: Report) -> None:
    wait, dataset = InputWait(), tf.data.Dataset.range(3)
    timed = wait.timed(dataset)
    assert wait.timed(dataset) is timed
    seen = weakref.ref(dataset)
    del dataset, timed
    wait.release_dataset()
    gc.collect()
    assert seen() is None


@pytest.mark.ranks(2)
def test_fit_reports_the_time_it_waited_for_input(world, report: Report) -> None:
    model = classifier()
    world.distribute(model)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for begin in range(0, 36, 6):
            time.sleep(0.05)
            yield X[begin : begin + 6], Y[begin : begin + 6]

    signature = (tf.TensorSpec((None, *X.shape[1:])), tf.TensorSpec((None,), Y.dtype))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    model.fit(dataset, epochs=2, verbose=0)
    # Each rank reads all batches, and trains on some.
    assert len(report.waits_s) >= 2
    assert sum(report.waits_s) > 0.05
