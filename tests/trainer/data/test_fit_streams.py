"""Training on generators and other streams, the same on all ranks or different on each rank."""

import sys

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.errors import DataError
from tests.environments import folder_of
from tests.harness.required import skip_or_fail
from tests.trainer.equivalence import alike, distance, weights
from tests.trainer.features import ROWS, X, Y, classifier
from tests.trainer.saving.runs import Stop, StopAfter

SIZE = 4

every_backend = pytest.mark.backends("tensorflow", "torch", "jax")


def batches(rank, ranks, rows=ROWS):
    """Yield every N-th batch. The first ranks may have one batch more than other ranks."""
    for first in range(rank * SIZE, rows, ranks * SIZE):
        yield X[first : min(first + SIZE, rows)], Y[first : min(first + SIZE, rows)]


def distributed(world, **options):
    model = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"], **options)
    world.distribute(model, presharded=True)
    return model


def skip_unless_supported(backend, steps_per_execution):
    if backend == "torch" and steps_per_execution > 1:
        pytest.skip("not supported by Keras on torch")


def same_on_all(rows=ROWS):
    return batches(0, 1, rows)


class Samples:
    """The first ``rows`` samples, for torch and Grain."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return X[index], Y[index]


@pytest.fixture
def streams(keras_backend, monkeypatch):
    """Functions that make streams of the same batches, for a number of rows."""
    if keras_backend == "tensorflow":
        return [same_on_all]
    for name in ("torch", "optional"):
        folder = folder_of(name)
        if not folder.exists():
            skip_or_fail(name, f"{folder} does not exist")
        packages = map(str, folder.glob("lib/python3*/site-packages"))
        # This environment's own packages come first.
        monkeypatch.setattr(sys, "path", [*sys.path, *packages])
    import grain
    import torch

    return [
        same_on_all,
        lambda rows: torch.utils.data.DataLoader(Samples(rows), batch_size=SIZE),
        lambda rows: grain.MapDataset.source(Samples(rows)).batch(SIZE),
    ]


@every_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [1, 2])
def test_all_loops_accept_a_stream(world, keras_backend, streams, block):
    """The seventh and last batch has a single row, so other ranks are idle in the last step."""
    skip_unless_supported(keras_backend, block)
    rows, ranks = 6 * SIZE + 1, world.size()
    x, y = X[:rows], Y[:rows]
    model = classifier(metrics=["accuracy"], steps_per_execution=block)
    world.distribute(model)
    reference = classifier(metrics=["accuracy"])
    whole = {"batch_size": ranks * SIZE, "shuffle": False, "validation_data": (x, y), "verbose": 0}
    # Streams differ in how batches are read, which several steps per execution don't change.
    for make in streams[:1] if block > 1 else streams:
        history = model.fit(make(rows), validation_data=make(rows), verbose=0).history
        for name, values in reference.fit(x, y, **whole).history.items():
            assert history[name] == pytest.approx(values, rel=1e-5), name
        assert distance(model, weights(reference)) <= 1e-5
        results = model.evaluate(make(rows), verbose=0)
        assert results == pytest.approx(reference.evaluate(x, y, verbose=0), rel=1e-5)
        predictions = model.predict(make(rows), verbose=0)
        np.testing.assert_allclose(predictions, reference.predict(x, verbose=0), atol=1e-6)
    predictions = model.predict((x for x, _ in same_on_all(rows)), verbose=0)
    np.testing.assert_allclose(predictions, reference.predict(x, verbose=0), atol=1e-6)


@every_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize("presharded", [False, True])
def test_epochs_and_validations_share_the_batches_of_a_generator(world, presharded):
    def make():
        return batches(world.rank(), 2) if presharded else same_on_all()

    model, reference = classifier(), classifier()
    world.distribute(model, presharded=presharded)
    losses = model.fit(
        make(),
        steps_per_epoch=2,
        epochs=3,
        validation_data=make(),
        validation_steps=1,
        verbose=0,
    ).history["val_loss"]
    for epoch in range(3):
        first = epoch * 4 * SIZE
        reference.fit(
            X[first : first + 4 * SIZE],
            Y[first : first + 4 * SIZE],
            batch_size=2 * SIZE,
            shuffle=False,
            verbose=0,
        )
        held_out = slice(epoch * 2 * SIZE, (epoch + 1) * 2 * SIZE)
        expected = reference.evaluate(X[held_out], Y[held_out], verbose=0)
        assert losses[epoch] == pytest.approx(expected, rel=1e-5)
    assert distance(model, weights(reference)) <= 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("presharded", [False, True])
def test_an_epoch_without_batches_is_an_error_on_all_ranks(world, presharded):
    model = classifier()
    world.distribute(model, presharded=presharded)
    with pytest.raises(DataError, match="ended before another epoch"):
        model.fit(same_on_all(4 * SIZE), epochs=2, verbose=0)


@every_backend
@pytest.mark.ranks(2)
@pytest.mark.parametrize("block", [1, 2])
def test_an_epoch_lasts_as_long_as_the_longest_generator(world, keras_backend, block):
    """Rank 0 has three batches, the last of which has a single row, and rank 1 has two."""
    skip_unless_supported(keras_backend, block)
    rows = 4 * SIZE + 1
    model = distributed(world, steps_per_execution=block)
    history = model.fit(batches(world.rank(), 2, rows), verbose=0).history
    reference = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
    expected = reference.fit(
        X[:rows], Y[:rows], batch_size=2 * SIZE, shuffle=False, verbose=0
    ).history
    assert int(model.optimizer.iterations) == 3
    assert alike(model)
    assert distance(model, weights(reference)) <= 1e-5
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.ranks(2)
def test_steps_of_evaluate_and_predict(world):
    model = distributed(world)
    results = model.evaluate(batches(world.rank(), 2, 5 * SIZE), steps=3, verbose=0)
    reference = classifier(metrics=["accuracy"])
    assert results == pytest.approx(reference.evaluate(X[: 5 * SIZE], Y[: 5 * SIZE], verbose=0))
    rows = model.predict(batches(world.rank(), 2, 5 * SIZE), steps=3, verbose=0)
    assert np.shape(rows) == (5 * SIZE, 3)
    with pytest.raises(DataError, match="Pass validation_steps"):
        model.evaluate(batches(world.rank(), 2), verbose=0)


@every_backend
@pytest.mark.ranks(2)
def test_an_empty_generator_is_an_error_on_all_ranks(world):
    model = distributed(world)
    rows = ROWS if world.rank() == 0 else 0
    with pytest.raises(DataError, match="no batches"):
        model.fit(batches(world.rank(), 2, rows), verbose=0)


@every_backend
@pytest.mark.ranks(2)
def test_training_resumes_within_an_epoch_of_a_generator(world, tmp_path_factory):
    folder = job.collectives().broadcast_object(str(tmp_path_factory.mktemp("saved")), name="test")
    whole = distributed(world)
    whole.fit(batches(world.rank(), 2), verbose=0)
    checkpoint = world.Checkpoint(folder, every_steps=1)
    stopped = distributed(world)
    with pytest.raises(Stop):
        stopped.fit(batches(world.rank(), 2), callbacks=[checkpoint, StopAfter(4)], verbose=0)
    resumed = distributed(world)
    resumed.fit(batches(world.rank(), 2), callbacks=[checkpoint], verbose=0)
    assert distance(resumed, weights(whole)) == 0.0


def test_an_error_in_the_generator_of_one_rank_ends_the_job(launch):
    done = launch(
        2,
        """
        import hvdtrain
        from tests.trainer.data.test_fit_streams import SIZE, X, Y
        from tests.trainer.features import classifier

        hvdtrain.init()

        def batches():
            yield X[:SIZE], Y[:SIZE]
            if hvdtrain.rank() == 1:
                raise ValueError("file 3 is damaged")
            yield X[:SIZE], Y[:SIZE]

        model = classifier()
        hvdtrain.distribute(model, presharded=True)
        model.fit(batches(), verbose=0)
        """,
    )
    assert done.returncode != 0
    assert "rank 1 of 2 failed: ValueError: file 3 is damaged" in done.stderr, done
