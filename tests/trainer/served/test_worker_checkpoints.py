import pytest

from tests.trainer.served.programs import program, reports, servers

PRELUDE = """
    import signal

    from hvdtrain.checkpoint import Store

    PIDS = world.collectives().allgather_object(os.getpid(), name="processes")


    def at_step(step, call):
        \"\"\"Return a callback that calls a function after a number of steps.\"\"\"
        left = [step]

        def count(batch):
            left[0] -= 1
            if left[0] == 0:
                call()

        return At(end=count)


    def outcome(model, history):
        return {
            "weights": [v.numpy().tobytes().hex() for v in model.weights],
            "optimizer": [v.numpy().tobytes().hex() for v in model.optimizer.variables],
            "epochs": history.epoch,
            "logs": {name: [float(v) for v in values] for name, values in history.history.items()},
            "drawn": float(np.random.rand()),
        }


    def run(seed, make, callbacks, **options):
        \"\"\"Return the outcome of a training, or the number of the signal that ended it.\"\"\"
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        model = hvdtrain.distribute(make())
        options = {"x": X[:61], "y": Y[:61], "batch_size": 4, "epochs": 2, **options}
        if model.optimizer.use_ema:
            options["validation_data"] = X[61:101], Y[61:101]
            callbacks = [keras.callbacks.SwapEMAWeights(), *callbacks]
        try:
            history = model.fit(verbose=0, callbacks=callbacks, **options)
        except hvdtrain.Preempted as preempted:
            return preempted.signal
        return outcome(model, history)
"""

MODELS = """
    def deep():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.4), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
        return model


    def momentum():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS, steps_per_execution=3)
        return model


    def accumulating():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(optimizer, LOSS)
        return model


    def averaging():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.9), LOSS)
        return model

"""

EXACT = program(
    PRELUDE
    + MODELS
    + """
    def save(folder, every_steps):
        checkpoint = hvdtrain.Checkpoint(folder, every_steps=every_steps)
        # Otherwise a checkpoint may be delayed while the last one is being written.
        return [checkpoint, At(begin=lambda batch: checkpoint.session.writer.wait())]


    # With overlap a checkpoint gets the newest weights, so that all runs must take it at the same
    # steps to be equal.
    step, first, every = (12, 6, 6) if os.environ.get("HVDTRAIN_OVERLAP") else (5, 1, 4)
    for name, *victims in (case.split() for case in sys.argv[1:]):
        make = globals()[name]
        whole = run(1, make, save(f"{name} whole", every))
        for victim in map(int, victims):
            folder = f"{name} {victim}"
            kill = lambda: RANK == 0 and os.kill(PIDS[victim], signal.SIGUSR1)
            stopped = run(1, make, [at_step(step, kill), *save(folder, first)])
            resumed = run(9, make, save(folder, every))
            parts = whole if hvdtrain.is_chief() else ["weights"]
            different = [name for name in parts if whole[name] != resumed[name]]
            report("exact", case=folder, stopped=stopped, different=different)
"""
)
BOUND_0 = servers("async-ps", 2, staleness_bound=0)
OVERLAP = servers("async-ps", overlap=1)


@pytest.mark.parametrize(
    ("ranks", "environment", "cases"),
    [
        pytest.param(3, servers("sync-ps"), ("deep 2", "averaging 0"), id="sync-ps"),
        pytest.param(4, BOUND_0, ("accumulating 1",), id="bound 0, 2 servers"),
        pytest.param(2, servers("async-ps"), ("momentum 1",), id="one worker"),
        pytest.param(2, OVERLAP, ("accumulating 0",), id="one worker, overlap"),
    ],
)
def test_a_resumed_training_equals_an_uninterrupted_one(launch, ranks, environment, cases):
    """A worker or a server gets a signal. A case has a model and the rank that gets the signal."""
    done = launch(ranks, EXACT, *cases, timeout_s=300, env=environment)
    assert done.returncode == 0
    entries = reports(done, "exact")
    assert len(entries) == ranks * len(cases)
    for entry in entries:
        assert (entry["stopped"], entry["different"]) == (10, []), entry


# Every gradient adds 1 to all elements, and those of worker 1 reach one server late.
MOMENTS = program(
    PRELUDE
    + """
    import glob

    from hvdtrain.collectives.point_to_point import PointToPoint
    from hvdtrain.parameter_server.protocol import REQUEST


    class Counts(keras.Model):
        def __init__(self):
            super().__init__()
            self.a = self.add_weight(shape=(3, 7), initializer="zeros", name="a")
            self.b = self.add_weight(shape=(40,), initializer="zeros", name="b")

        def call(self, x):
            return x[:, :1] * 0

        def train_step(self, data):
            variables = self.trainable_variables
            self.optimizer.apply([-tf.ones(v.shape) for v in variables], variables)
            return {"loss": tf.zeros([])}


    start_send = PointToPoint.start_send


    def send_late(self, data, to, tag):
        if tag == REQUEST and to == world.roles().servers[-1]:
            time.sleep(0.02)
        return start_send(self, data, to, tag)


    if RANK == 1:
        PointToPoint.start_send = send_late
    model = Counts()
    model(X[:1])
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    hvdtrain.distribute(model)
    lag = At(begin=lambda n: time.sleep(0.02 * (RANK == 0)))
    saving = hvdtrain.Checkpoint("runs", every_steps=3, keep=100)
    model.fit(X[:120], Y[:120], batch_size=4, epochs=2, verbose=0, callbacks=[lag, saving])
    if hvdtrain.is_chief():
        for folder in sorted(glob.glob("runs/step-*")):
            # Only the newest one can be read.
            newest = Store("runs").newest()
            arrays = [a for key, a in newest.model.items() if key.startswith("weights/")]
            values = np.unique(np.concatenate([array.reshape(-1) for array in arrays]))
            workers = [newest.state, *newest.state["others"]]
            places = [(worker["epoch"], worker["place"]) for worker in workers]
            steps = [epoch * 15 + place["epoch_step"] for epoch, place in places]
            iterations = [int(a) for key, a in newest.model.items() if key.endswith("/iteration")]
            report("moment", values=values.tolist(), steps=steps, iterations=iterations)
            # The last step is saved again as the training ends.
            folder = sorted(glob.glob(f"runs/step-{newest.step:08d}*"))[-1]
            os.rename(folder, folder.replace("runs/step", "read"))
"""
)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_checkpoint_has_the_same_gradients_on_all_servers(launch, overlap):
    done = launch(4, MOMENTS, timeout_s=200, env=servers("async-ps", 2, overlap=overlap))
    assert done.returncode == 0
    moments = reports(done, "moment")
    assert len(moments) > 3
    for moment in moments:
        assert moment["values"] == [sum(moment["steps"])]
        assert moment["iterations"] == [sum(moment["steps"])]


COUNTING = """
    ROWS, EPOCHS = 97, 5


    class Visits(keras.Model):
        \"\"\"A model whose weights count how often each sample was used.\"\"\"

        def __init__(self, **options):
            super().__init__(**options)
            self.seen = self.add_weight(shape=(ROWS,), initializer="zeros", name="seen")

        def call(self, x):
            return x * 0.0

        def train_step(self, data):
            x, _ = keras.utils.unpack_x_y_sample_weight(data)[:2]
            ones = tf.one_hot(tf.cast(x[:, 0], tf.int32), ROWS)
            self.optimizer.apply([-tf.reduce_sum(ones, axis=0)], [self.seen])
            return {"loss": tf.zeros([])}


    def counting():
        keras.utils.clear_session(free_memory=False)
        model = Visits()
        model(ids)
        model.compile(keras.optimizers.SGD(1.0), "mse")
        return hvdtrain.distribute(model)


    ids = np.arange(ROWS, dtype="float32")[:, None]
    arrays = {"x": ids, "y": ids, "batch_size": 4}
"""

VISITS = program(
    PRELUDE
    + COUNTING
    + """

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // 4)

        def __getitem__(self, index):
            return ids[index * 4 : index * 4 + 4], ids[index * 4 : index * 4 + 4]


    stream = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(4)
    inputs = {
        "arrays": arrays,
        "PyDataset": {"x": Batches()},
        "tf.data": {"x": stream},
        "part of a pass": {"x": stream.repeat(), "steps_per_epoch": 5},
    }
    first = not Path("arrays").exists()
    world.collectives().barrier(name="looked")
    for name, data in inputs.items():
        model = counting()
        callbacks = [hvdtrain.Checkpoint(name, every_steps=2)]
        if first and not IS_SERVER:
            # Worker 1 gets a signal when it is some epochs behind.
            def end():
                wait_for(name + " is ahead")
                os.kill(os.getpid(), signal.SIGTERM)

            def delay(batch):
                if Path(name + " is ahead").exists():
                    time.sleep(0.3)

            ahead = lambda: Path(name + " is ahead").touch()
            behind = [at_step(5, end), At(begin=delay)]
            callbacks += behind if hvdtrain.rank() else [at_step(20, ahead)]
        try:
            model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
            report("seen", data=name, counts=np.unique(model.seen.numpy()).tolist())
        except hvdtrain.Preempted as preempted:
            report("preempted", data=name, signal=preempted.signal)
        if hvdtrain.is_chief():
            state = Store(name).newest().state
            epochs = [state["epoch"], *(other["epoch"] for other in state["others"])]
            report("saved", data=name, samples=state["samples"], epochs=epochs)
"""
)
DATA = ("arrays", "PyDataset", "tf.data", "part of a pass")


def test_a_different_number_of_workers_resumes_and_uses_each_sample_once(launch):
    """A single worker resumes after two, one of which was some epochs behind the other."""
    done = launch(3, VISITS, timeout_s=200, env=servers("async-ps"))
    assert done.returncode == 0
    entries = [(entry["data"], entry["signal"]) for entry in reports(done, "preempted")]
    assert entries == [(data, 15) for _ in range(3) for data in DATA]
    done = launch(3, VISITS, timeout_s=200, env=servers("async-ps", 2))
    assert done.returncode == 0
    seen = {(entry["data"], entry["rank"]): entry["counts"] for entry in reports(done, "seen")}
    once = {(data, rank): [5.0] for data in DATA[:3] for rank in range(3)}
    assert {key: seen[key] for key in once} == once
    part = [counts for (data, _), counts in seen.items() if data == DATA[3]]
    assert all(max(counts) - min(counts) <= 1 for counts in part)
    for saved in reports(done, "saved"):
        assert saved["epochs"] == [5]
        assert saved["data"] == DATA[3] or saved["samples"] == 5 * 97


# One of worker 1 and the chief gets a signal while the other is in a certain state.
ENDINGS = ("in validation", "the chief waits", "after the last step", "the chief is last")
ENDS = program(
    PRELUDE
    + COUNTING
    + f"""
    CASES = {ENDINGS}
"""
    + """
    def kill(number=signal.SIGUSR2):
        os.kill(os.getpid(), number)


    def fit(case, own, **options):
        # First with each worker's own callbacks, which end it, then to the end.
        for callbacks in (own.get(RANK, []), []):
            model = counting()
            saving = hvdtrain.Checkpoint(case, export=case + "/last.keras")
            try:
                model.fit(**arrays, epochs=3, verbose=0, callbacks=[*callbacks, saving], **options)
                report(case, counts=np.unique(model.seen.numpy()).tolist())
            except hvdtrain.Preempted as preempted:
                report(case, signal=preempted.signal)


    class AtTest(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            Path("validating").touch()
            time.sleep(0.05)


    class LastEpoch(keras.callbacks.Callback):
        def __init__(self, call):
            super().__init__()
            self.call = call

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 2:
                self.call()


    def when(name):
        return lambda: (wait_for(name), kill())


    own = {0: [AtTest()], 1: [at_step(5, when("validating"))]}
    fit("in validation", own, validation_data=(ids[:20], ids[:20]), validation_batch_size=1)
    ended = LastEpoch(lambda: Path("chief has ended").touch())
    fit("the chief waits", {0: [ended], 1: [at_step(20, when("chief has ended"))]})
    # The chief receives the signal with the worker's last step.
    ended = LastEpoch(lambda: Path("chief is done").touch())
    last = [at_step(38, when("chief is done")), LastEpoch(lambda: time.sleep(0.5))]
    fit("after the last step", {0: [ended], 1: last})
    ended = LastEpoch(lambda: Path("worker has ended").touch())
    fit("the chief is last", {0: [at_step(20, when("worker has ended"))], 1: [ended]})

    # The last checkpoint has all steps of worker 1, even if the chief had none left.
    if RANK == 0:
        for case in CASES:
            classes = {"Visits": Visits}
            exported = keras.models.load_model(case + "/last.keras", custom_objects=classes)
            report("exported", counts=np.unique(exported.seen.numpy()).tolist())
            newest = Store(case).newest()
            (seen,) = [v for key, v in newest.model.items() if key.endswith("seen")]
            report("saved", counts=np.unique(seen).tolist(), samples=newest.state["samples"])


    def refused(case, model, **options):
        try:
            model.fit(verbose=0, callbacks=[hvdtrain.Checkpoint("in validation")], **options)
        except hvdtrain.CheckpointError as error:
            report(case, text=str(error))


    refused("another model", classifier("sgd"), x=X, y=Y)
    world.collectives().barrier(name="tried")
    if RANK == 0:
        for path in Path("in validation").glob("step-*/state.json"):
            path.write_text("{}")
    refused("damaged", counting(), **arrays)
"""
)


def test_signals_while_another_worker_validates_or_waits(launch):
    """The test also resumes from checkpoints that can't be used."""
    done = launch(3, ENDS, timeout_s=280, env=servers("async-ps"))
    assert done.returncode == 0
    for case in ENDINGS:
        entries = reports(done, case)
        assert [entry["signal"] for entry in entries if "signal" in entry] == [12] * 3, case
        assert [entry["counts"] for entry in entries if "counts" in entry] == [[3.0]] * 3, case
    for what in ("exported", "saved"):
        assert [entry["counts"] for entry in reports(done, what)] == [[3.0]] * len(ENDINGS)
    assert [entry["samples"] for entry in reports(done, "saved")] == [3 * 97] * len(ENDINGS)
    for case, text in (("another model", "a different model"), ("damaged", "is intact")):
        assert [text in entry["text"] for entry in reports(done, case)] == [True] * 3


STOPPED_EARLY = program(
    """
    for _ in range(2):
        steps = []
        stopping = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0)
        callbacks = [hvdtrain.Checkpoint("stopped"), stopping, At(end=steps.append)]
        history = classifier("sgd").fit(
            X, Y, batch_size=60, epochs=20, verbose=0, callbacks=callbacks
        )
        report("trained", epochs=len(history.epoch), steps=len(steps))
    """
)


def test_early_stopping_on_the_chief_also_ends_a_resumed_training(launch):
    done = launch(3, STOPPED_EARLY, timeout_s=150, env=servers("sync-ps"))
    assert done.returncode == 0
    first, again, first_worker, again_worker, *_ = reports(done, "trained")
    assert (first["epochs"], again["epochs"]) == (2, 3)
    assert first["steps"] <= first_worker["steps"] <= first["steps"] + 1
    assert again["steps"] <= again_worker["steps"] <= again["steps"] + 1
