"""Workers that compute their next gradient while the last one is under way."""

import re

import numpy as np
import pytest

from tests.keras.served.programs import facts, program, servers

# One worker's training is arithmetic that can be done by hand.
ALONE = program("""
    keras.config.set_floatx("float64")
    ROWS, EPOCHS = 56, 3
    optimizers = keras.optimizers


    def dense(optimizer, **options):
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
        return compiled(keras.Sequential([keras.Input((8,)), *layers]), optimizer, **options)


    def by_hand(model, x, optimizer, accumulates=1):
        # Servers hold weights of their own; those of the model are the worker's.
        mine = model.trainable_variables
        held = [keras.Variable(v.numpy(), dtype="float64") for v in mine]
        optimizer.build(held)
        waiting, shown, pushes = [], [], 0

        def take(values):
            for variable, value in zip(mine, values):
                variable.assign(value)

        for epoch in range(EPOCHS):
            came = None
            for start in range(0, ROWS, 8):
                with tf.GradientTape() as tape:
                    loss = LOSS(Y[start : start + 8], model(x[start : start + 8]))
                gradients = tape.gradient(loss, mine)
                waiting.append([tf.convert_to_tensor(gradient) for gradient in gradients])
                if len(waiting) < accumulates:
                    continue
                optimizer.apply([sum(each) / accumulates for each in zip(*waiting)], held)
                waiting.clear()
                pushes += 1
                if came is not None:
                    take(came)
                came = [v.numpy() for v in held]
            take(held)
            shown.append([v.numpy() for v in mine])
        return shown, pushes


    def sgd(**options):
        return optimizers.SGD(0.3, **options)


    CASES = {
        "sgd": (dense, sgd, {}, {}),
        "adam": (dense, lambda: optimizers.Adam(0.01), {}, {}),
        "rows": (embedding, sgd, {}, {}),
        "eager": (dense, sgd, {}, {"run_eagerly": True}),
        "several": (dense, sgd, {}, {"steps_per_execution": 2}),
        "jit": (dense, sgd, {}, {"jit_compile": True}),
        "accumulation": (dense, sgd, {"gradient_accumulation_steps": 2}, {}),
    }
    for case in sys.argv[1:]:
        make, optimizer, accumulation, options = CASES[case]
        x = rng.integers(0, 9, (ROWS, 8)) if make is embedding else X[:ROWS]
        model, other = make(optimizer(**accumulation), **options), make(optimizer())
        other.set_weights(model.get_weights())
        hvdtrain.distribute(model)
        seen = Seen()
        data = x, Y[:ROWS]
        history = model.fit(*data, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0,
                            validation_data=data, callbacks=[seen]).history
        if IS_SERVER:
            continue
        shown, pushes = by_hand(other, x, optimizer(), *accumulation.values())
        losses = []
        for weights in shown:
            other.set_weights(weights)
            losses.append(other.evaluate(*data, verbose=0))
        last = [v.numpy() for v in model.trainable_variables]
        apart = max(
            float(np.abs(a - b).max())
            for found, wanted in zip([*seen.weights, last], [*shown, shown[-1]], strict=True)
            for a, b in zip(found, wanted)
        )
        tell("case", case=case, apart=apart, val_loss=history["val_loss"], losses=losses,
             pushes=pushes)
""")


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        (1, ["sgd", "adam", "rows", "eager", "several", "jit", "accumulation"]),
        # What is in the step's graph is the same here; what travels, and when, is not.
        (2, ["adam", "rows"]),
    ],
    ids=["one server", "two servers"],
)
def test_one_worker_is_a_gradient_behind(launch, count, cases):
    """But for validation, callbacks at the end of an epoch, and what comes out."""
    env = servers("async-ps", count, overlap=1)
    done = launch(1 + count, ALONE, *cases, env=env, timeout_s=150)
    assert done.returncode == 0
    told = facts(done, "case")
    assert [entry["case"] for entry in told] == cases
    for entry in told:
        # XLA has another tanh.
        assert entry["apart"] < (1e-6 if entry["case"] == "jit" else 1e-12), entry
        np.testing.assert_allclose(entry["val_loss"], entry["losses"], rtol=1e-6)
    sent = re.findall(r" 1 workers sent (\d+) gradients", done.stderr)
    assert list(map(int, sent)) == [entry["pushes"] for entry in told]


# The server takes the first gradient while the worker is in its second step, outside of MPI.
GOES_ON = program("""
    from hvdtrain.parameter_server.server import Server

    def begin(batch):
        if batch == 1:
            Path("second step").touch()
            wait_for("gradient has come")

    receive = Server._receive_gradients

    def late(self, worker):
        wait_for("second step")
        parts = receive(self, worker)
        Path("gradient has come").touch()
        return parts

    Server._receive_gradients = late
    model = classifier("sgd", keras.layers.Dense(1 << 16), keras.layers.Dense(3))
    model.fit(X[:32], Y[:32], batch_size=8, verbose=0, callbacks=[At(begin)])
    tell("done", alike=like_chief(model))
""")


@pytest.mark.parametrize("transport", [{}, {"OMPI_MCA_btl": "self,tcp"}])
def test_gradients_travel_while_their_worker_computes(launch, transport):
    """Also where MPI moves them in its calls alone, of which the training thread makes none."""
    done = launch(2, GOES_ON, env=servers("async-ps", overlap=1) | transport)
    assert done.returncode == 0
    assert [entry["alike"] for entry in facts(done, "done")] == [True] * 2


# Worker 1 doesn't end its first step before the chief is as far ahead as it may be.
BOUND = program("""
    BOUND = int(os.environ["HVDTRAIN_STALENESS_BOUND"])
    begun = []

    def begin(batch):
        begun.append(batch)
        Path(f"chief begins {batch}").touch() if RANK == 0 else None
        if RANK == 1 and batch == 0:
            wait_for(f"chief begins {BOUND}")
            time.sleep(1.0)
            tell("ahead", further=Path(f"chief begins {BOUND + 1}").exists())

    model = classifier("sgd")
    model.fit(X[:160], Y[:160], batch_size=8, verbose=0, callbacks=[At(begin)])
    tell("done", steps=len(begun))
""")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("bound", [1, 3])
def test_the_bound_is_that_of_steps_begun(launch, bound, overlap):
    env = servers("async-ps", staleness_bound=bound, overlap=overlap)
    done = launch(3, BOUND, env=env)
    assert done.returncode == 0
    assert [entry["further"] for entry in facts(done, "ahead")] == [False]
    assert [entry["steps"] for entry in facts(done, "done")] == [10, 10, 0]


# The chief's gradient is withheld, as worker 1 never makes a step; then something goes wrong.
ENDS = program("""
    def begin(batch):
        if RANK == 1:
            wait_for("never")

    def end(batch):
        if RANK == 0:
            raise {"interrupt": KeyboardInterrupt, "error": ValueError}[os.environ["CASE"]]("here")

    model = classifier("sgd")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[At(begin, end)])
""")


@pytest.mark.parametrize("case", ["interrupt", "error"])
def test_an_error_while_a_gradient_is_under_way(launch, case):
    env = servers("async-ps", staleness_bound=1, overlap=1) | {"CASE": case}
    done = launch(3, ENDS, env=env, timeout_s=60)
    assert done.returncode != 0
    assert "here" in done.stderr


REFUSED = program("""
    from hvdtrain.parameter_server import server

    # As if worker 1's third gradient were none for these weights.
    check = server.Server._check
    pushes = []

    def refuse(self, worker, request):
        pushes.append(worker)
        if pushes.count(1) == 3 and worker == 1:
            raise server.MismatchError("no such weights")
        check(self, worker, request)

    server.Server._check = refuse
    begun = []
    model = classifier("sgd")
    rows = 16 * int(os.environ["STEPS"])
    try:
        model.fit(X[:rows], Y[:rows], batch_size=8, verbose=0, callbacks=[At(begun.append)])
    except hvdtrain.HvdtrainError as error:
        tell("refused", error=str(error), begun=len(begun))
        raise
""")


@pytest.mark.parametrize(("steps", "begun"), [(3, 3), (5, 4)])
def test_a_refusal_is_raised_at_the_next_exchange(launch, steps, begun):
    """Which is a step's or, after the last step of an epoch, what follows that."""
    env = servers("async-ps", overlap=1) | {"STEPS": str(steps)}
    done = launch(3, REFUSED, env=env, timeout_s=100)
    assert done.returncode != 0
    (told,) = (entry for entry in facts(done, "refused") if entry["rank"] == 1)
    assert "rank 2: no such weights" in told["error"]
    assert told["begun"] == begun
