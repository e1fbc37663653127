import json
import re
from types import SimpleNamespace

import pytest

from hvdtrain.parameter_server.sharding import Spec, shard_variables
from hvdtrain.trainer.served.served_fit import _update_log
from tests.trainer.served.programs import program, reports, servers

TRAINS = program("""
    plain = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    )
    plain.compile("sgd", LOSS, metrics=["accuracy"])


    class Validates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            expected = {}
            if hvdtrain.is_chief():
                plain.set_weights(self.model.get_weights())
                expected = plain.evaluate(*VALIDATION, batch_size=7, verbose=0, return_dict=True)
            got = {name[4:]: value for name, value in logs.items() if name.startswith("val_")}
            assert got.keys() == expected.keys(), (got, expected)
            for name, value in expected.items():
                assert abs(got[name] - value) < 1e-5, (epoch, name, got[name], value)


    model = classifier(keras.optimizers.Adam(0.04))
    report("place", number=hvdtrain.rank(), size=hvdtrain.size(), chief=hvdtrain.is_chief())
    VALIDATION = X[431:], Y[431:]
    for data in ({"validation_data": VALIDATION, "x": X[:431], "y": Y[:431], "epochs": 3},
                 {"validation_split": 49 / 480, "x": X, "y": Y, "epochs": 1}):
        history = model.fit(**data, batch_size=16, verbose=0, callbacks=[Validates()])
        plain.set_weights(model.get_weights())
        evaluated = model.evaluate(X, Y, batch_size=9, verbose=0)
        assert np.allclose(evaluated, plain.evaluate(X, Y, verbose=0), atol=1e-5)
        predicted = model.predict(X, batch_size=11, verbose=0)
        assert np.allclose(predicted, plain.predict(X, verbose=0), atol=1e-5)
        report("trained", like_chief=like_chief(model), history=history.history,
               epochs=history.epoch, evaluated=evaluated)
""")


def test_the_model_learns_and_all_ranks_have_the_same_results(launch):
    done = launch(3, TRAINS, timeout_s=150, env=servers("async-ps"))
    assert done.returncode == 0
    assert reports(done, "place") == [
        {"rank": rank, "number": rank, "size": 2, "chief": rank == 0} for rank in range(3)
    ]
    trained = reports(done, "trained")
    assert len(trained) == 6
    for run, epochs in ((trained[0::2], [0, 1, 2]), (trained[1::2], [0])):
        chief, worker, server = run
        assert all(entry["like_chief"] for entry in run)
        assert all(entry["evaluated"] == chief["evaluated"] for entry in run)
        assert server["history"] == chief["history"]
        assert all(entry["epochs"] == epochs for entry in run)
        assert set(chief["history"]) == {"accuracy", "loss", "val_accuracy", "val_loss"}
        assert set(worker["history"]) == {"accuracy", "loss"}
        assert chief["evaluated"][1] > 0.9
    # Both leave 431 rows, which are 28 batches of up to 16 rows for two workers.
    assert re.findall(r"2 workers sent (\d+) gradients", done.stderr) == ["84", "28"]


INPUTS = program("""
    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return 15

        def __getitem__(self, index):
            return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


    def generate():
        for start in range(0, 15 * 8, 8):
            yield X[start : start + 8], Y[start : start + 8]


    def train(what, model, *data, **options):
        if sys.argv[1:] and what not in sys.argv[1:]:
            return
        before = model.get_weights()
        model.fit(*data, epochs=2, verbose=0, **options)
        changed = not np.array_equal(model.get_weights()[0], before[0])
        report(what, like_chief=like_chief(model), changed=changed)


    arrays = {"x": X[:120], "y": Y[:120], "batch_size": 8}
    spec = tf.TensorSpec((8, 8)), tf.TensorSpec((8,), tf.int64)
    stream = tf.data.Dataset.from_generator(generate, output_signature=spec)
    known = stream.apply(tf.data.experimental.assert_cardinality(15))
    plain = classifier("sgd")
    train("arrays", plain, **arrays)
    train("tf.data", plain, known)
    train("unknown length", plain, stream)
    train("steps", plain, known.repeat(), steps_per_epoch=3)
    train("PyDataset", plain, Sequence())
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    vector = keras.metrics.F1Score(average=None)
    one_hot = keras.losses.CategoricalCrossentropy(from_logits=True)
    model = classifier("sgd", *layers, keras.layers.Dense(3), loss=one_hot, metrics=[vector])
    train("layers and vector", model, X[:120], np.eye(3)[Y[:120]], batch_size=8)
    presharded = hvdtrain.distribute(plain, presharded=True)
    rows = 40 + 24 * RANK  # a server's rows are not used
    train("presharded", presharded, X[:rows], Y[:rows], batch_size=8)
    if not sys.argv[1:]:
        losses = [float(LOSS(Y[:rows], presharded(X[:rows]))) * rows for rows in (40, 64)]
        loss = presharded.evaluate(X[:rows], Y[:rows], batch_size=8, verbose=0)[0]
        predicted = presharded.predict(X[:rows], batch_size=8, verbose=0)
        report("evaluated", error=abs(loss - sum(losses) / 104), rows=len(predicted))
""")

# The number of pushes of two workers in two epochs of 15 batches; only one worker has the last one.
COUNTS = {
    "arrays": 32,
    "tf.data": 30,
    "unknown length": 30,
    "steps": 12,
    "PyDataset": 30,
    "layers and vector": 32,
    "presharded": 2 * (5 + 8),
}


# All modes read input in the same way. These three cases end an epoch in different ways.
ENDS = ["unknown length", "steps", "presharded"]


@pytest.mark.parametrize(
    ("mode", "overlap", "inputs"),
    [("async-ps", 0, []), ("async-ps", 1, ENDS), ("sync-ps", 0, ENDS)],
    ids=["async-ps", "overlap", "sync-ps"],
)
def test_every_batch_is_pushed_once(launch, mode, overlap, inputs):
    env = servers(mode, overlap=overlap)
    done = launch(3, INPUTS, *inputs, timeout_s=200, env=env)
    assert done.returncode == 0
    for what in inputs or COUNTS:
        entries = reports(done, what)
        assert [entry["rank"] for entry in entries] == [0, 1, 2], what
        assert all(entry["like_chief"] and entry["changed"] for entry in entries), what
    sent = re.findall(r"2 workers sent (\d+) gradients", done.stderr)
    assert list(map(int, sent)) == [COUNTS[what] for what in inputs or COUNTS]
    if not inputs:
        evaluated = reports(done, "evaluated")
        assert [entry["rows"] for entry in evaluated] == [104] * 3, "without a server's rows"
        assert max(entry["error"] for entry in evaluated) < 1e-5


CALLBACKS = program("""
    def keep(model, kept):
        return At(end=lambda batch: kept.append(model.get_weights()))


    def same(one, other):
        return all(np.array_equal(*pair) for pair in zip(one, other))


    model = classifier(keras.optimizers.SGD())
    initial = model.get_weights()


    def train(what, callbacks, epochs):
        model.set_weights(initial)
        model.optimizer.learning_rate = 0.1
        kept = []
        history = model.fit(
            X, Y, batch_size=60, epochs=epochs, verbose=0, shuffle=False,
            validation_split=0.5, callbacks=[*callbacks, keep(model, kept)],
        ).history
        final = model.get_weights()
        unchanged = [n + 1 for n, weights in enumerate(kept) if same(weights, final)]
        report(
            what, like_chief=like_chief(model), steps=len(kept), epochs=len(history["loss"]),
            unchanged_after=min(unchanged, default=None), rate=float(model.optimizer.learning_rate),
        )


    train("scheduler", [keras.callbacks.LearningRateScheduler(lambda n, lr: 0.1 * (n == 0))], 3)
    plateau = keras.callbacks.ReduceLROnPlateau(factor=0.0, patience=1, min_delta=1e9)
    train("plateau", [plateau], 4)
    stopping = keras.callbacks.EarlyStopping(
        patience=2, min_delta=1e9, restore_best_weights=True
    )
    train("stopping", [stopping], 50)


    class WorkerStops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if RANK == 1:
                self.model.stop_training = True


    train("a worker stops", [WorkerStops()], 50)
""")


def test_the_chiefs_callbacks_apply_to_all_workers(launch):
    done = launch(3, CALLBACKS, timeout_s=150, env=servers("sync-ps"))
    assert done.returncode == 0
    # The step after which the weights no longer change, and the number of steps, which the chief
    # decides; a worker may make one more. An epoch has two steps.
    for what, unchanged_after, steps in [
        ("scheduler", 2, 6),  # the rate is 0 after the first epoch
        ("plateau", 4, 8),  # the rate is 0 after the second epoch, which is not better
        ("stopping", 2, 6),  # the first epoch was the best
    ]:
        chief, worker, server = reports(done, what)
        assert all(entry["like_chief"] for entry in (chief, worker, server))
        assert chief["unchanged_after"] == worker["unchanged_after"] == unchanged_after
        assert chief["steps"] == steps <= worker["steps"] <= steps + 1
        assert chief["epochs"] == server["epochs"] == steps // 2
        assert chief["rate"] == pytest.approx(0.1 if what == "stopping" else 0.0)
    chief, worker, _ = reports(done, "a worker stops")
    assert worker["steps"] == 1
    assert 1 <= chief["steps"] <= 3, "the chief stops after the reply to its next gradient"


# Rank 1 pushes, the chief pushes four times, rank 1 pushes again; each gradient is 1.
SCALED = program("""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(1.0), lambda y, predicted: predicted)
    hvdtrain.distribute(model, presharded=True)
    if RANK == 0:
        at = At(begin=lambda n: wait_for("first"), end=lambda n: n == 3 and Path("all").touch())
    else:
        at = At(begin=lambda n: n and wait_for("all"), end=lambda n: Path("first").touch())
    rows = 8 if RANK == 0 else 4
    model.fit(np.ones((rows, 1)), np.ones((rows, 1)), batch_size=2, verbose=0, callbacks=[at])
    report("done", weight=model.get_weights()[0].item())
""")


def test_staleness_is_reported(launch):
    done = launch(3, SCALED, env=servers("async-ps"))
    assert done.returncode == 0
    assert [entry["weight"] for entry in reports(done, "done")] == [-6.0] * 3
    assert "2 workers sent 6 gradients; staleness " in done.stderr
    assert ", 4 at the 95th percentile, 4 at most" in done.stderr


BACKUP = program("""
    model = classifier("sgd")

    def begin(batch):
        if RANK == 2:
            wait_for("others are done")

    def end(batch):
        if RANK == 0 and batch == 19:
            Path("others are done").touch()

    history = model.fit(X, Y, batch_size=8, verbose=0, callbacks=[At(begin, end)]).history
    report("done", like_chief=like_chief(model), history=history)
""")


def test_other_workers_dont_wait_for_a_backup_worker(launch):
    done = launch(4, BACKUP, env=servers("sync-ps", backup_workers=1), timeout_s=100)
    assert done.returncode == 0
    assert [entry["like_chief"] for entry in reports(done, "done")] == [True] * 4
    assert "3 workers sent 60 gradients, 1 of them too late; staleness 0.0" in done.stderr


def test_every_fit_appends_a_header_to_the_update_log(tmp_path):
    specs = [Spec("kernel", (4, 2), "float32"), Spec("bias", (2,), "float32")]
    (shard,) = shard_variables(specs, 1)
    job = SimpleNamespace(
        settings=SimpleNamespace(update_log=str(tmp_path / "logs")),
        collectives=SimpleNamespace(member=2),
        specs=specs,
        roles=SimpleNamespace(workers=(0, 1)),
    )
    for version in (1, 2):
        with _update_log(job, shard) as log:
            log.write(json.dumps({"version": version}) + "\n")
    header = {"server": 2, "workers": [0, 1], "pieces": [["kernel", 0, 8], ["bias", 0, 2]]}
    lines = (tmp_path / "logs" / "server-2.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [header, {"version": 1}, header, {"version": 2}]
