"""Generators, of which each rank passes its own: as one process on the joint batches."""

import keras
import numpy as np
import pytest

from hvdtrain import world as job
from hvdtrain.errors import DataError
from tests.keras.equivalence import alike, distance, weights
from tests.keras.features import ROWS, X, Y, classifier
from tests.keras.saving.runs import Stop, StopAfter

SIZE = 4


def batches(rank, ranks, rows=ROWS):
    """Each N-th batch; the first ranks may have one more."""
    for first in range(rank * SIZE, rows, ranks * SIZE):
        yield X[first : min(first + SIZE, rows)], Y[first : min(first + SIZE, rows)]


def distributed(world, **options):
    model = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"], **options)
    world.distribute(model, presharded=True)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rows", [5 * SIZE, 4 * SIZE + 1])
@pytest.mark.parametrize("block", [1, 2])
def test_one_epoch_ends_when_the_longest_generator_does(world, rows, block):
    """Rank 0 has three batches and rank 1 two, the last step being that of one rank."""
    model = distributed(world, steps_per_execution=block)
    history = model.fit(batches(world.rank(), 2, rows), verbose=0).history
    reference = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
    told = reference.fit(X[:rows], Y[:rows], batch_size=2 * SIZE, shuffle=False, verbose=0).history
    assert int(model.optimizer.iterations.numpy()) == 3
    assert alike(model)
    assert distance(model, weights(reference)) <= 1e-5
    for name, values in told.items():
        assert history[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.ranks(2)
def test_epochs_of_so_many_steps_with_validation(world):
    def held_out(rank, ranks):
        return batches(rank, ranks, 4 * SIZE)

    model = distributed(world)
    history = model.fit(
        batches(world.rank(), 2, 6 * SIZE),
        steps_per_epoch=1,
        epochs=3,
        validation_data=held_out(world.rank(), 2),
        validation_steps=1,
        validation_freq=2,
        verbose=0,
    ).history
    reference = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
    for step in range(3):
        rows = slice(step * 2 * SIZE, (step + 1) * 2 * SIZE)
        told = reference.fit(X[rows], Y[rows], batch_size=2 * SIZE, shuffle=False, verbose=0)
        assert history["loss"][step] == pytest.approx(told.history["loss"][0], rel=1e-5)
        if step == 1:
            loss = reference.evaluate(X[: 2 * SIZE], Y[: 2 * SIZE], verbose=0)[0]
            assert history["val_loss"] == pytest.approx([loss], rel=1e-5)
    assert distance(model, weights(reference)) <= 1e-5


@pytest.mark.ranks(2)
def test_evaluate_and_predict_take_steps(world):
    model = distributed(world)
    told = model.evaluate(batches(world.rank(), 2, 5 * SIZE), steps=3, verbose=0)
    reference = classifier(metrics=["accuracy"])
    assert told == pytest.approx(reference.evaluate(X[: 5 * SIZE], Y[: 5 * SIZE], verbose=0))
    rows = model.predict(batches(world.rank(), 2, 5 * SIZE), steps=3, verbose=0)
    assert np.shape(rows) == (5 * SIZE, 3)
    with pytest.raises(DataError, match="Pass validation_steps"):
        model.evaluate(batches(world.rank(), 2), verbose=0)


@pytest.mark.ranks(2)
def test_an_empty_generator_is_an_error_on_all_ranks(world):
    model = distributed(world)
    rows = ROWS if world.rank() == 0 else 0
    with pytest.raises(DataError, match="no batch"):
        model.fit(batches(world.rank(), 2, rows), verbose=0)


@pytest.mark.ranks(2)
def test_resumed_within_its_epoch_it_is_read_up_to_there(world, tmp_path_factory):
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


def test_one_that_fails_on_one_rank_ends_the_job_with_its_error(launch):
    done = launch(
        2,
        """
        import hvdtrain
        from tests.keras.data.test_generator import SIZE, X, Y
        from tests.keras.features import classifier

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
