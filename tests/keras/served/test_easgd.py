"""Elastic averaging: workers and the servers' center move towards each other, as the paper says."""

import numpy as np
import pytest

from tests.keras.served.programs import facts, program, servers

# One worker's training is arithmetic that can be done by hand.
ALONE = program("""
    keras.config.set_floatx("float64")
    ROWS, EPOCHS, EVERY, RATE = 52, 3, int(os.environ["EVERY"]), 0.4


    def make(optimizer):
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(optimizer, LOSS)
        return model


    def by_hand(model):
        # Weights of the worker are the model's.
        center = [v.numpy() for v in model.trainable_variables]
        steps, centers, average = 0, [], None
        accumulates = model.optimizer.gradient_accumulation_steps or 1
        for epoch in range(EPOCHS):
            for start in range(0, ROWS, 8):
                rows = slice(start, min(start + 8, ROWS))
                with tf.GradientTape() as tape:
                    loss = LOSS(Y[rows], model(X[rows]))
                gradients = tape.gradient(loss, model.trainable_variables)
                model.optimizer.apply(gradients, model.trainable_variables)
                steps += 1
                if steps % (EVERY * accumulates) == 0:
                    for n, variable in enumerate(model.trainable_variables):
                        move = RATE * (variable.numpy() - center[n])
                        variable.assign_sub(move)
                        center[n] = center[n] + move
                    average = center if average is None else average
                    average = [0.7 * a + 0.3 * c for a, c in zip(average, center)]
            centers.append([c.copy() for c in center])
        return centers, average if model.optimizer.use_ema else center


    CASES = {
        "sgd": lambda: keras.optimizers.SGD(0.3),
        "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.01, clipnorm=1.0),
        "decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        "accumulation": lambda: keras.optimizers.SGD(0.3, gradient_accumulation_steps=7),
        "averages": lambda: keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7),
    }
    for case in sys.argv[1:]:
        optimizer = CASES[case]
        model, other = make(optimizer()), make(optimizer())
        other.set_weights(model.get_weights())
        hvdtrain.distribute(model)
        seen = Seen()
        history = model.fit(X[:ROWS], Y[:ROWS], batch_size=8, epochs=EPOCHS, shuffle=False,
                            verbose=0, validation_data=(X[:ROWS], Y[:ROWS]), callbacks=[seen])
        if IS_SERVER:
            continue
        centers, at_the_end = by_hand(other)
        losses = []
        for center in centers:
            for variable, value in zip(other.trainable_variables, center):
                variable.assign(value)
            losses.append(other.evaluate(X[:ROWS], Y[:ROWS], verbose=0))
        last = [v.numpy() for v in model.trainable_variables]
        apart = max(
            float(np.abs(a - b).max())
            for found, wanted in zip([*seen.weights, last], [*centers, at_the_end])
            for a, b in zip(found, wanted)
        )
        tell("case", case=case, apart=apart, val_loss=history.history["val_loss"], losses=losses)
""")


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("every", "cases"),
    [
        (1, ["momentum", "accumulation"]),
        (3, ["sgd", "momentum", "adam", "decay", "accumulation", "averages"]),
    ],
    ids=["each step", "every third"],
)
def test_one_worker_does_what_the_paper_says(launch, every, cases):
    """Validation, callbacks at the end of an epoch, and the result have the center's weights."""
    env = {**servers("easgd", push_every=every, moving_rate=0.4), "EVERY": str(every)}
    done = launch(2, ALONE, *cases, env=env, timeout_s=100)
    told = facts(done, "case")
    assert [entry["case"] for entry in told] == cases
    for entry in told:
        assert entry["apart"] < 1e-12, entry
        np.testing.assert_allclose(entry["val_loss"], entry["losses"], rtol=1e-6)


TOGETHER = program("""
    model = classifier(keras.optimizers.SGD(0.1, momentum=0.9))
    before = model.evaluate(X, Y, verbose=0)[1]
    model.fit(X, Y, batch_size=8, epochs=6, verbose=0)
    after = model.evaluate(X, Y, verbose=0)[1]
    tell("end", before=before, after=after, as_chief=like_chief(model))
""")


@pytest.mark.mpi
@pytest.mark.parametrize("count", [1, 2])
def test_workers_learn_together(launch, count):
    """And end with the same weights; all that was sent has come."""
    done = launch(2 + count, TOGETHER, env=servers("easgd", count, push_every=4))
    for entry in facts(done, "end"):
        assert entry["as_chief"]
        assert entry["after"] > max(0.85, entry["before"])
    # Two workers, six epochs of 30 steps each, every fourth of which sends something.
    assert "2 workers sent 90 differences; staleness" in done.stderr


SAVES = program("""
    import sys

    folder, saves = sys.argv[1], sys.argv[2] == "saves"
    keras.config.set_floatx("float64")
    model = classifier(keras.optimizers.SGD(0.1, momentum=0.9))
    callbacks = [hvdtrain.Checkpoint(folder, every_steps=7)] if saves else []
    model.fit(X, Y, batch_size=24, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    if hvdtrain.is_chief():
        tell("end", weights=[v.numpy().tolist() for v in model.trainable_variables])
""")


@pytest.mark.mpi
def test_a_checkpoint_changes_nothing(launch, tmp_path):
    """It holds the center, while the worker goes on from its own weights."""
    env = servers("easgd", push_every=3, moving_rate=0.3)
    weights = [
        facts(launch(2, SAVES, str(tmp_path / what), what, env=env), "end")[0]["weights"]
        for what in ("saves", "trains")
    ]
    for saved, plain in zip(*weights, strict=True):
        np.testing.assert_array_equal(saved, plain)


UNEVEN = program("""
    model = classifier(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1))
    moved, before = [], []

    def begin(batch):
        before[:] = [v.numpy() for v in model.trainable_variables]

    def end(batch):
        now = [v.numpy() for v in model.trainable_variables]
        moved.append(any((a != b).any() for a, b in zip(before, now)))

    # Three batches for each of two workers, and one sample.
    model.fit(X[:49], Y[:49], batch_size=8, verbose=0, callbacks=[At(begin, end)])
    tell("moved", moved=moved)
""")


@pytest.mark.mpi
def test_a_step_without_samples_moves_nothing(launch):
    done = launch(3, UNEVEN, env=servers("easgd", push_every=100))
    first, second, _ = [entry["moved"] for entry in facts(done, "moved")]
    assert first == [True] * 4
    assert second == [True] * 3 + [False]


NOT_FINITE = program("""
    model = classifier(keras.optimizers.SGD(float("inf")))
    model.fit(X, Y, batch_size=8, verbose=0)
""")


@pytest.mark.mpi
def test_weights_that_are_not_finite(launch):
    done = launch(3, NOT_FINITE, env=servers("easgd"))
    assert done.returncode != 0
    assert "A weight of this worker is not finite: " in done.stderr
