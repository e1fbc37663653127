"""Workers that make several steps by themselves before they send the sum of their gradients."""

import pytest

from tests.keras.served.programs import facts, program, servers

# The one worker trains; then the same is done without hvdtrain, and compared.
ALONE = program("""
    keras.config.set_floatx("float64")
    ROWS, EPOCHS, EVERY = 52, 3, 3
    optimizers = keras.optimizers


    def dense(optimizer, dtype="float64", **options):
        layers = [keras.layers.Dense(6, "tanh", dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
        return compiled(keras.Sequential([keras.Input((8,)), *layers]), optimizer, **options)


    def single(optimizer):
        return dense(optimizer, "float32", loss_weights=[4.0])


    def by_hand(model):
        # What the paper says, in eager steps: the servers' weights move by the optimizer, those
        # of the worker by gradient descent.
        held = [keras.Variable(v.numpy(), dtype="float64") for v in model.trainable_variables]
        model.optimizer.build(held)
        for epoch in range(EPOCHS):
            starts = list(range(0, ROWS, 8))
            for first in range(0, len(starts), EVERY):
                sums = [0.0 for _ in held]
                for start in starts[first : first + EVERY]:
                    rows = slice(start, min(start + 8, ROWS))
                    with tf.GradientTape() as tape:
                        loss = LOSS(Y[rows], model(X[rows]))
                    gradients = tape.gradient(loss, model.trainable_variables)
                    sums = [s + g for s, g in zip(sums, gradients)]
                    for variable, gradient in zip(model.trainable_variables, gradients):
                        variable.assign_sub(float(model.optimizer.learning_rate) * gradient)
                model.optimizer.apply(sums, held)
                for variable, value in zip(model.trainable_variables, held):
                    variable.assign(value)


    def by_keras(model):
        model.fit(x, Y[:ROWS], batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0,
                  callbacks=callbacks())


    def rates():
        return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.3 / (epoch + 1))]


    # Adding up is all that SGD does: one worker's training is that of plain Keras.
    plain = lambda: optimizers.SGD(0.3)
    overflows = lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=2.0**127)
    CASES = {
        "sgd": (dense, plain, by_keras, list),
        "rates": (dense, plain, by_keras, rates),
        "rows": (embedding, plain, by_keras, list),
        "accumulation": (
            dense, lambda: optimizers.SGD(0.3, gradient_accumulation_steps=2), by_keras, list
        ),
        "overflows": (single, overflows, by_keras, list),
        "adam": (dense, lambda: optimizers.Adam(0.01), by_hand, list),
    }
    for case in sys.argv[1:]:
        make, optimizer, expect, callbacks = CASES[case]
        x = rng.integers(0, 9, (ROWS, 8)) if make is embedding else X[:ROWS]
        model, other = make(optimizer()), make(optimizer())
        other.set_weights(model.get_weights())
        hvdtrain.distribute(model)
        by_keras(model)
        expect(other)
        pairs = zip(model.get_weights(), other.get_weights())
        off = max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)
        tell(case, off=off, alike=like_chief(model))
""")


# How many pushes each makes: seven batches an epoch in pushes of three, the last of one.
PUSHES = {
    "sgd": 9,
    "rates": 9,
    "rows": 9,
    "accumulation": 3 + 1,  # of 3 or 4 updates an epoch
    "overflows": 9,
    "adam": 9,
}


@pytest.mark.parametrize(
    ("count", "cases"), [(1, list(PUSHES)), (2, ["rows", "adam"])], ids=["one", "two"]
)
def test_one_worker_against_one_process(launch, count, cases):
    """With so many servers."""
    env = servers("async-ps", count, push_every=3)
    done = launch(1 + count, ALONE, *cases, env=env, timeout_s=150)
    assert done.returncode == 0
    sent = [line for line in done.stderr.splitlines() if " workers sent " in line]
    for line, case in zip(sent, cases, strict=True):
        told = facts(done, case)
        assert [entry["alike"] for entry in told] == [True] * (1 + count), case
        assert told[0]["off"] < (1e-6 if case == "overflows" else 1e-12), case
        assert f" 1 workers sent {PUSHES[case]} gradients" in line, case


# Each gradient is 1, and so is the learning rate until the chief says 0.5; with pushes of two.
TWO = program("""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(1.0), lambda y, predicted: predicted)
    hvdtrain.distribute(model, presharded=True)
    went = []

    def chief(batch):
        if batch == 0:
            wait_for("worker has weights")
            model.optimizer.learning_rate = 0.5

    def other(batch):
        if batch == 0:
            Path("worker has weights").touch()
        if batch == 1:
            wait_for("chief has pushed")

    def end(batch):
        went.append(model.get_weights()[0].item())
        if RANK == 0 and batch == 1:
            Path("chief has pushed").touch()

    batches = 2 if RANK == 0 else 5
    data = np.ones((2 * batches, 1))
    at = At(begin=chief if RANK == 0 else other, end=end)
    model.fit(data, data, batch_size=2, verbose=0, callbacks=[at])
    tell("done", went=went, weight=model.get_weights()[0].item())
""")


def test_rates_and_the_rest(launch):
    """The chief's learning rate holds for steps of others, and the last gradient is sent, too."""
    done = launch(3, TWO, env=servers("async-ps", push_every=2))
    assert done.returncode == 0
    chief, worker, server = facts(done, "done")
    assert chief["went"] == [-0.5, -1.0]
    assert worker["went"] == [-1.0, -2.0, -2.5, -3.0, -3.5]
    assert [entry["weight"] for entry in (chief, worker, server)] == [-3.5] * 3
    assert "2 workers sent 4 gradients; staleness " in done.stderr
