"""Errors on one rank, which end ``fit`` on all ranks. After that, ``fit`` works again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

from hvdtrain.errors import DataError, MismatchError, PeerFailedError
from tests.trainer.equivalence import alike
from tests.trainer.features import X, Y, classifier

EXPECTED: list[float] = []


class Fails(keras.callbacks.Callback):
    """Raises an error in a hook on the last rank."""

    def __init__(self, world: Any, hook: str, error: BaseException) -> None:
        super().__init__()

        def fail(*args: Any, **options: Any) -> None:
            if world.rank() == world.size() - 1:
                raise error

        setattr(self, hook, fail)


def losses(world: Any) -> list[float]:
    """Train a new model, and return its losses."""
    model = classifier()
    world.distribute(model)
    history = model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0).history
    return history["loss"]


@pytest.fixture
def trains_afterwards(world: Any) -> Iterator[None]:
    """Check after the test that training a new model has the same losses as without errors."""
    if not EXPECTED:
        EXPECTED.extend(losses(world))
    yield
    assert losses(world) == EXPECTED


def batches() -> Iterator[Any]:
    for row in range(0, 24, 6):
        yield X[row : row + 6], Y[row : row + 6]
    raise OSError("no such file")


HOOKS = (
    *("on_train_begin", "on_epoch_begin", "on_train_batch_end", "on_test_batch_end"),
    *("on_test_end", "on_epoch_end", "on_train_end"),
)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("trains_afterwards")
def test_an_error_in_a_callback_of_fit(world: Any) -> None:
    last = world.rank() == world.size() - 1
    model = classifier()
    world.distribute(model)
    kind = ValueError if last else PeerFailedError
    for hook in HOOKS:
        fails = Fails(world, hook, ValueError(f"disk is full {hook}"))
        with pytest.raises(kind, match=f"disk is full {hook}") as error:
            model.fit(X, Y, batch_size=6, verbose=0, validation_data=(X, Y), callbacks=[fails])
        if not last:
            assert str(error.value).startswith(f"rank {world.size() - 1} failed: ValueError"), hook
        # The same model can train again, too.
        model.fit(X, Y, batch_size=6, verbose=0)
        assert alike(model), hook


OTHERS: dict[str, Callable[[Any, keras.Model], object]] = {
    "interrupt": lambda world, model: model.fit(
        X, Y, verbose=0, callbacks=[Fails(world, "on_train_batch_end", KeyboardInterrupt())]
    ),
    "evaluate": lambda world, model: model.evaluate(
        X, Y, verbose=0, callbacks=[Fails(world, "on_test_end", KeyError("a"))]
    ),
    "predict": lambda world, model: model.predict(
        X, verbose=0, callbacks=[Fails(world, "on_predict_batch_end", KeyError("a"))]
    ),
    "arguments": lambda world, model: model.fit(
        X, Y, verbose=0, **({"epoch": 2} if world.rank() == world.size() - 1 else {})
    ),
    "not compiled": lambda world, model: world.distribute(
        keras.Sequential() if world.rank() == world.size() - 1 else classifier()
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fail", OTHERS.values(), ids=OTHERS)
@pytest.mark.usefixtures("trains_afterwards")
def test_errors_in_other_methods_and_arguments_end_all_ranks(
    world: Any, fail: Callable[..., object]
) -> None:
    model = classifier()
    world.distribute(model)
    last = world.rank() == world.size() - 1
    with pytest.raises(BaseException, match="" if last else f"rank {world.size() - 1} ") as error:
        fail(world, model)
    assert last or isinstance(error.value, (PeerFailedError, MismatchError))


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("trains_afterwards")
def test_evaluate_on_one_rank_and_fit_on_another_is_an_error(world: Any) -> None:
    model = classifier()
    world.distribute(model)
    call = model.fit if world.is_chief() else model.evaluate
    with pytest.raises(MismatchError, match=r"begin\(fit\).*begin\(evaluate\)"):
        call(X, Y, verbose=0)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("trains_afterwards")
def test_a_different_model_or_more_epochs_on_one_rank_is_an_error(world: Any) -> None:
    models = [classifier(), classifier()]
    for model in models:
        world.distribute(model)
    with pytest.raises(MismatchError, match=r"with model \d+.*with model \d+"):
        models[world.rank()].fit(X, Y, verbose=0)
    with pytest.raises(MismatchError, match=r"epochs=2.*epochs=3"):
        models[0].fit(X, Y, epochs=2 + world.rank(), verbose=0)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("trains_afterwards")
def test_a_skipped_trial_on_one_rank_is_an_error(world: Any) -> None:
    # If a rank skips a trial, the ranks train on different data, or with different regularizers.
    models = [classifier() for _ in range(2)]
    for model in models:
        world.distribute(model)
    with pytest.raises(DataError, match="different input"):
        models[0].fit(X[world.rank() : world.rank() + 48], Y[:48], verbose=0)
    head = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L1(world.rank() + 1.0))
    model = keras.Sequential([keras.Input((6,)), head])
    model.compile("sgd", "mse")
    with pytest.raises(MismatchError, match=r"l1: 1\.0 on rank 0, 2\.0 on rank 1"):
        world.distribute(model)


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("trains_afterwards")
def test_an_error_in_the_data_of_one_rank(world: Any) -> None:
    model = classifier()
    world.distribute(model, presharded=True)
    data = batches() if world.rank() else ((X[:6], Y[:6]) for _ in range(8))
    with pytest.raises(Exception, match="no such file"):
        model.fit(data, steps_per_epoch=8, verbose=0)


SCRIPT = """
    import pathlib, sys, time
    import keras, numpy as np, hvdtrain
    hvdtrain.init()
    rank = hvdtrain.rank()
    rng = np.random.default_rng(0)
    x = rng.random((64, 3)).astype("float32")

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank == 1 and batch == 1:
                raise ValueError("disk is full")

    for trial in range(3):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            hvdtrain.distribute(model)
            fails = [Fails()] if trial == 1 else []
            history = model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=fails).history
            print(f"<{rank} {trial} {history['loss'][-1]:.6f}>", flush=True)
        except Exception as error:
            print(f"<{rank} {trial} {type(error).__name__} {error}>", flush=True)
    # mpirun kills all ranks when the first one exits after a failure.
    folder, ranks = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    (folder / f"done-{rank}").touch()
    deadline = time.monotonic() + 60
    while len([*folder.glob("done-*")]) < ranks and time.monotonic() < deadline:
        time.sleep(0.1)
"""


def outcomes(stdout: str, ranks: int) -> dict[int, list[str]]:
    """Return the results that each rank has printed for its trials."""
    entries = [part.split(">")[0] for part in stdout.split("<")[1:]]
    return {
        rank: [entry[4:] for entry in entries if entry.startswith(f"{rank} ")]
        for rank in range(ranks)
    }


@pytest.mark.mpi
@pytest.mark.more
def test_parameter_servers_raise_errors_on_all_ranks(launch: Any, tmp_path: Path) -> None:
    done = launch(
        3, SCRIPT, str(tmp_path), "3", env={"HVDTRAIN_MODE": "async-ps", "HVDTRAIN_NUM_PS": "1"}
    )
    trials = outcomes(done.stdout, 3)
    assert [len(texts) for texts in trials.values()] == [3, 3, 3], done.stdout + done.stderr
    for rank, texts in trials.items():
        assert ("ValueError" if rank == 1 else "PeerFailedError rank 1 failed") in texts[1]
        assert "Error" in texts[2]


@pytest.mark.mpi
@pytest.mark.more
def test_local_sgd_recovers_from_an_error(launch: Any, tmp_path: Path) -> None:
    env = {"HVDTRAIN_MODE": "local-sgd", "HVDTRAIN_SYNC_EVERY": "3"}
    done = launch(2, SCRIPT, str(tmp_path), "2", env=env)
    trials = outcomes(done.stdout, 2)
    assert "PeerFailedError rank 1 failed: ValueError: disk is full" in trials[0][1]
    assert trials[0][2] == trials[1][2] == trials[0][0] == trials[1][0]
    assert done.returncode == 0


@pytest.mark.mpi
@pytest.mark.more
def test_an_elastic_job_recovers_from_an_error(elastic: Any, tmp_path: Path) -> None:
    done = elastic(SCRIPT, arguments=[str(tmp_path), "3"])
    trials = outcomes(done.stdout, 3)
    assert "PeerFailedError rank 1 failed: ValueError: disk is full" in trials[2][1]
    assert {text for rank in range(3) for text in (trials[rank][0], trials[rank][2])} == {
        trials[0][0]
    }
    assert done.returncode == 0
