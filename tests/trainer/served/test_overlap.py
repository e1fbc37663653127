"""Workers that compute their next gradient while the last one is in flight."""

import re

import numpy as np
import pytest

from tests.trainer.served.programs import program, reports, servers

# The training of a single worker is deterministic, and is repeated by hand.
ALONE = program("""
    keras.config.set_floatx("float64")
    ROWS, EPOCHS = 56, 2
    optimizers = keras.optimizers


    def dense(optimizer, **options):
        layers = [keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)]
        return compiled(keras.Sequential([keras.Input((8,)), *layers]), optimizer, **options)


    def by_hand(model, x, optimizer, accumulates=1):
        # The server's weights are separate; the model has the worker's.
        variables = model.trainable_variables
        held = [keras.Variable(v.numpy(), dtype="float64") for v in variables]
        optimizer.build(held)
        waiting, of_epochs, pushes = [], [], 0

        def assign(values):
            for variable, value in zip(variables, values):
                variable.assign(value)

        for epoch in range(EPOCHS):
            received = None
            for start in range(0, ROWS, 8):
                with tf.GradientTape() as tape:
                    loss = LOSS(Y[start : start + 8], model(x[start : start + 8]))
                gradients = tape.gradient(loss, variables)
                waiting.append([tf.convert_to_tensor(gradient) for gradient in gradients])
                if len(waiting) < accumulates:
                    continue
                optimizer.apply([sum(each) / accumulates for each in zip(*waiting)], held)
                waiting.clear()
                pushes += 1
                if received is not None:
                    assign(received)
                received = [v.numpy() for v in held]
            assign(held)
            of_epochs.append([v.numpy() for v in variables])
        return of_epochs, pushes


    def sgd(**options):
        return optimizers.SGD(0.3, **options)


    CASES = {
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
        expected, pushes = by_hand(other, x, optimizer(), *accumulation.values())
        losses = []
        for weights in expected:
            other.set_weights(weights)
            losses.append(other.evaluate(*data, verbose=0))
        last = [v.numpy() for v in model.trainable_variables]
        error = max(
            float(np.abs(a - b).max())
            for got, wanted in zip([*seen.weights, last], [*expected, expected[-1]], strict=True)
            for a, b in zip(got, wanted)
        )
        report("case", case=case, error=error, val_loss=history["val_loss"], losses=losses,
             pushes=pushes)
""")


@pytest.mark.parametrize(
    ("count", "cases"),
    [
        (1, ["eager", "several", "jit", "accumulation"]),
        (2, ["adam", "rows"]),
    ],
    ids=["one server", "two servers"],
)
def test_each_step_uses_weights_without_the_previous_gradient(launch, count, cases):
    """Validations, callbacks at the end of an epoch and the final weights include all gradients."""
    env = servers("async-ps", count, overlap=1)
    done = launch(1 + count, ALONE, *cases, env=env, timeout_s=150)
    assert done.returncode == 0
    results = reports(done, "case")
    assert [entry["case"] for entry in results] == cases
    for entry in results:
        # XLA's tanh differs.
        assert entry["error"] < (1e-6 if entry["case"] == "jit" else 1e-12), entry
        np.testing.assert_allclose(entry["val_loss"], entry["losses"], rtol=1e-6)
    sent = re.findall(r" 1 workers sent (\d+) gradients", done.stderr)
    assert list(map(int, sent)) == [entry["pushes"] for entry in results]


# The server receives the first gradient during the worker's second step, which calls no MPI.
PROGRESS = program("""
    from hvdtrain.parameter_server.server import Server

    def begin(batch):
        if batch == 1:
            Path("second step").touch()
            wait_for("gradient received")

    receive = Server._receive_gradients

    def receive_late(self, worker):
        wait_for("second step")
        gradients = receive(self, worker)
        Path("gradient received").touch()
        return gradients

    Server._receive_gradients = receive_late
    model = classifier("sgd", keras.layers.Dense(1 << 16), keras.layers.Dense(3))
    model.fit(X[:32], Y[:32], batch_size=8, verbose=0, callbacks=[At(begin)])
    report("done", same=like_chief(model))
""")


@pytest.mark.parametrize("transport", [{}, {"OMPI_MCA_btl": "self,tcp"}])
def test_gradients_are_sent_while_the_worker_computes(launch, transport):
    """This works even if MPI makes progress only within its calls, as over TCP."""
    done = launch(2, PROGRESS, env=servers("async-ps", overlap=1) | transport)
    assert done.returncode == 0
    assert [entry["same"] for entry in reports(done, "done")] == [True] * 2


# Worker 1 ends its first step once the chief is as far ahead as it may be.
BOUND = program("""
    BOUND = int(os.environ["HVDTRAIN_STALENESS_BOUND"])
    started = []

    def begin(batch):
        started.append(batch)
        Path(f"chief starts {batch}").touch() if RANK == 0 else None
        if RANK == 1 and batch == 0:
            wait_for(f"chief starts {BOUND}")
            time.sleep(0.5)
            report("ahead", further=Path(f"chief starts {BOUND + 1}").exists())

    model = classifier("sgd")
    model.fit(X[:160], Y[:160], batch_size=8, verbose=0, callbacks=[At(begin)])
    report("done", steps=len(started))
""")


@pytest.mark.parametrize(("bound", "overlap"), [(1, 0), (3, 1)])
def test_the_staleness_bound_limits_the_steps_that_are_started(launch, bound, overlap):
    env = servers("async-ps", staleness_bound=bound, overlap=overlap)
    done = launch(3, BOUND, env=env)
    assert done.returncode == 0
    assert [entry["further"] for entry in reports(done, "ahead")] == [False]
    assert [entry["steps"] for entry in reports(done, "done")] == [10, 10, 0]


# The reply to the chief's gradient is withheld, because worker 1 never makes a step.
ERROR = program("""
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
def test_an_error_while_a_gradient_is_in_flight_ends_the_job(launch, case):
    env = servers("async-ps", staleness_bound=1, overlap=1) | {"CASE": case}
    done = launch(3, ERROR, env=env, timeout_s=60)
    assert done.returncode != 0
    assert "here" in done.stderr


REFUSED = program("""
    from hvdtrain.parameter_server import server

    receive = server.Server._receive_gradients
    pushes = []

    def refuse_third(self, worker):
        gradients = receive(self, worker)
        pushes.append(worker)
        if worker == 1 and pushes.count(1) == 3:
            raise server.MismatchError("no such weights")
        return gradients

    server.Server._receive_gradients = refuse_third
    started = []
    model = classifier("sgd")
    rows = 16 * int(os.environ["STEPS"])
    try:
        model.fit(X[:rows], Y[:rows], batch_size=8, verbose=0, callbacks=[At(started.append)])
    except hvdtrain.HvdtrainError as error:
        if RANK == 1:
            report("refused", error=str(error), started=len(started))
            Path("reported").touch()
        # mpirun kills all ranks when the first one ends with an error.
        wait_for("reported")
        raise
""")


@pytest.mark.parametrize(("steps", "started"), [(3, 3), (5, 4)])
def test_a_refusal_is_raised_at_the_next_exchange(launch, steps, started):
    """It is raised in the next step or, after an epoch's last step, by the next request."""
    env = servers("async-ps", overlap=1) | {"STEPS": str(steps)}
    done = launch(3, REFUSED, env=env, timeout_s=100)
    assert done.returncode != 0
    (refused,) = reports(done, "refused")
    assert "rank 2: no such weights" in refused["error"]
    assert refused["started"] == started
