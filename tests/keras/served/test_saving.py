"""Checkpoints with parameter servers: one consistent state, and training that goes on from it."""

import shutil

import pytest

from tests.keras.served.programs import facts, program, servers

PRELUDE = """
    import signal

    from hvdtrain.checkpoint import Store

    PIDS = world.collectives().allgather_object(os.getpid(), name="processes")


    def at_step(step, call):
        \"\"\"A callback that calls after so many steps.\"\"\"
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
        \"\"\"What came of a training; the number of the signal where one ended it.\"\"\"
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        model = hvdtrain.distribute(make())
        options = {"x": X[:101], "y": Y[:101], "batch_size": 4, "epochs": 3, **options}
        try:
            history = model.fit(verbose=0, callbacks=callbacks, **options)
        except hvdtrain.Preempted as ended:
            return ended.signal
        return outcome(model, history)
"""

EXACT = program(
    PRELUDE
    + """
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


    last = len(PIDS) - 1
    for make, victims in ((deep, range(len(PIDS))), (momentum, [last]), (accumulating, [last])):
        for victim in victims:
            folder = f"{make.__name__} {victim}"
            kill = lambda: RANK == 0 and os.kill(PIDS[victim], signal.SIGUSR1)
            whole = run(1, make, [hvdtrain.Checkpoint(folder + " whole", every_steps=4)])
            stopped = run(1, make, [at_step(5, kill), hvdtrain.Checkpoint(folder, every_steps=1)])
            resumed = run(9, make, [hvdtrain.Checkpoint(folder, every_steps=4)])
            parts = whole if hvdtrain.is_chief() else ["weights"]
            off = [name for name in parts if whole[name] != resumed[name]]
            tell("exact", case=folder, stopped=stopped, off=off)
"""
)


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        pytest.param(3, servers("sync-ps"), id="sync-ps"),
        pytest.param(4, servers("async-ps", 2, staleness_bound=0), id="bound 0, 2 servers"),
        pytest.param(2, servers("async-ps"), id="one worker"),
    ],
)
def test_resuming_is_exact_where_training_is(launch, ranks, environment):
    """A signal to any rank, a server too, saves and ends all."""
    done = launch(ranks, EXACT, timeout_s=300, env=environment)
    assert done.returncode == 0
    told = facts(done, "exact")
    assert len(told) == ranks * (ranks + 2)
    for entry in told:
        assert (entry["stopped"], entry["off"]) == (10, []), entry


# Every gradient adds 1 to all elements, and one server is slower than the other.
MOMENTS = program(
    PRELUDE
    + """
    import glob

    from hvdtrain.parameter_server.holding import Holding


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


    apply = Holding.apply


    def slowly(*args, **options):
        time.sleep(0.004)
        apply(*args, **options)


    if RANK == world.roles().servers[-1]:
        Holding.apply = slowly
    model = Counts()
    model(X[:1])
    model.compile(keras.optimizers.SGD(1.0), LOSS)
    hvdtrain.distribute(model)
    lag = At(begin=lambda n: time.sleep(0.01 * (hvdtrain.rank() == 1)))
    saving = hvdtrain.Checkpoint("runs", every_steps=3, keep=100)
    model.fit(X[:240], Y[:240], batch_size=4, epochs=2, verbose=0, callbacks=[lag, saving])
    if hvdtrain.is_chief():
        for folder in sorted(glob.glob("runs/step-*")):
            # Only what is newest can be read as a whole.
            found = Store("runs").newest()
            arrays = [a for key, a in found.model.items() if key.startswith("weights/")]
            values = np.unique(np.concatenate([array.reshape(-1) for array in arrays]))
            places = [(found.state["epoch"], found.state["place"])]
            places += [(other["epoch"], other["place"]) for other in found.state["others"]]
            steps = [epoch * 30 + place["epoch_step"] for epoch, place in places]
            iterations = [int(a) for key, a in found.model.items() if key.endswith("/iteration")]
            tell("moment", values=values.tolist(), steps=steps, iterations=iterations)
            os.rename(f"runs/step-{found.step:08d}", f"read-{found.step}")
"""
)


@pytest.mark.parametrize("bound", [None, 2])
def test_a_checkpoint_is_one_moment_on_all_servers(launch, bound):
    settings = {} if bound is None else {"staleness_bound": bound}
    done = launch(4, MOMENTS, timeout_s=200, env=servers("async-ps", 2, **settings))
    assert done.returncode == 0
    moments = facts(done, "moment")
    assert len(moments) >= 20
    for moment in moments:
        # All gradients of all workers that are in it, and no other.
        assert moment["values"] == [sum(moment["steps"])]
        assert moment["iterations"] == [sum(moment["steps"])]
    assert any(len(set(moment["steps"])) > 1 for moment in moments)


VISITS = program(
    PRELUDE
    + """
    ROWS, EPOCHS = 97, 6


    class Visits(keras.Model):
        \"\"\"Its weights count how often each sample was trained on.\"\"\"

        def __init__(self):
            super().__init__()
            self.seen = self.add_weight(shape=(ROWS,), initializer="zeros", name="seen")

        def call(self, x):
            return x * 0.0

        def train_step(self, data):
            x, _ = keras.utils.unpack_x_y_sample_weight(data)[:2]
            ones = tf.one_hot(tf.cast(x[:, 0], tf.int32), ROWS)
            self.optimizer.apply([-tf.reduce_sum(ones, axis=0)], [self.seen])
            return {"loss": tf.zeros([])}


    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-ROWS // 4)

        def __getitem__(self, index):
            return ids[index * 4 : index * 4 + 4], ids[index * 4 : index * 4 + 4]


    ids = np.arange(ROWS, dtype="float32")[:, None]
    stream = tf.data.Dataset.from_tensor_slices((ids, ids)).batch(4)
    inputs = {
        "arrays": {"x": ids, "y": ids, "batch_size": 4},
        "PyDataset": {"x": Batches()},
        "tf.data": {"x": stream},
        "part of a pass": {"x": stream.repeat(), "steps_per_epoch": 5},
    }
    first = not Path("arrays").exists()
    world.collectives().barrier(name="all have looked")
    for name, data in inputs.items():
        model = Visits()
        model(ids)
        model.compile(keras.optimizers.SGD(1.0), "mse")
        hvdtrain.distribute(model)
        callbacks = [hvdtrain.Checkpoint(name, every_steps=2)]
        if first:
            # Worker 1 is behind, by epochs where these are short; then it gets the signal.
            end = lambda: os.kill(os.getpid(), signal.SIGTERM)
            pause = 0.3 if hvdtrain.rank() == 1 else 0.01
            callbacks.append(At(begin=lambda n: time.sleep(pause)))
            callbacks += [at_step(5, end)] if hvdtrain.rank() == 1 else []
        try:
            model.fit(**data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
            tell("seen", data=name, counts=np.unique(model.seen.numpy()).tolist())
        except hvdtrain.Preempted as ended:
            tell("preempted", data=name, signal=ended.signal)
        if hvdtrain.is_chief():
            state = Store(name).newest().state
            epochs = [state["epoch"], *(other["epoch"] for other in state["others"])]
            tell("saved", data=name, samples=state["samples"], epochs=epochs)
"""
)
DATA = ("arrays", "PyDataset", "tf.data", "part of a pass")
_stopped = []


@pytest.fixture
def stopped(launch, tmp_path_factory, tmp_path):
    """A folder with trainings by two workers that were stopped when one was epochs behind."""
    if not _stopped:
        done = launch(3, VISITS, timeout_s=200, env=servers("async-ps"))
        assert done.returncode == 0
        told = facts(done, "preempted")
        assert [(t["data"], t["signal"]) for t in told] == [(d, 15) for _ in "012" for d in DATA]
        saved = {entry["data"]: entry["epochs"] for entry in facts(done, "saved")}
        assert all(saved[data][0] > saved[data][1] for data in DATA), saved
        _stopped.append(tmp_path_factory.mktemp("stopped"))
        for data in DATA:
            shutil.copytree(tmp_path / data, _stopped[0] / data)
    return _stopped[0]


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (4, 1), (4, 2)])
def test_any_number_of_workers_sees_each_sample_once(launch, stopped, tmp_path, ranks, count):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    done = launch(ranks, VISITS, timeout_s=200, env=servers("async-ps", count))
    assert done.returncode == 0
    seen = {(t["data"], t["rank"]): t["counts"] for t in facts(done, "seen")}
    once = {(data, rank): [6.0] for data in DATA[:3] for rank in range(ranks)}
    assert {key: seen[key] for key in once} == once
    part = [counts for (data, _), counts in seen.items() if data == DATA[3]]
    assert all(max(counts) - min(counts) <= 1 for counts in part)
    for saved in facts(done, "saved"):
        assert saved["epochs"] == [6] * (ranks - count)
        assert saved["data"] == DATA[3] or saved["samples"] == 6 * 97
