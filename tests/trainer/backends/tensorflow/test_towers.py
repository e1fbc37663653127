import re
from pathlib import Path

import numpy as np

from tests.harness.jobs import Completed
from tests.trainer.backends.tensorflow import oracle
from tests.trainer.served.programs import program, reports

PROGRAM = Path(oracle.__file__)
BETWEEN_RANKS = ("clip and decay", "embedding", "masked")


def towers(devices: int, **settings: object) -> dict[str, str]:
    """Return the environment of a job with ``devices`` towers per rank."""
    others = {f"HVDTRAIN_{name.upper()}": str(value) for name, value in settings.items()}
    return {"HVDTRAIN_MODE": "towers", "HVDTRAIN_DEVICES_PER_RANK": str(devices), **others}


def test_training_equals_one_device(launch):
    done = launch(None, PROGRAM, timeout_s=200, env=towers(3))
    assert done.returncode == 0
    for case in oracle.CASES:
        (differences,) = reports(done, case)
        for what in ("weights", "history", "scores", "predictions"):
            assert differences[what] <= 1e-12, f"{case}: {what}"


def test_ranks_with_towers_equal_one_device(launch):
    done = launch(2, PROGRAM, *BETWEEN_RANKS, timeout_s=200, env=towers(2))
    assert done.returncode == 0
    for case in BETWEEN_RANKS:
        # Counts that ranks exchange in a step are float32.
        tolerance = 1e-6 if case == "masked" else 1e-12
        for differences in reports(done, case):
            assert differences["weights"] <= tolerance, case
            assert differences["predictions"] <= tolerance, case


LAYERS = program("""
    assert tf.config.get_soft_device_placement()


    class Tracks(keras.layers.Layer):
        \"\"\"Stores the mean of its inputs, and counts its calls in training.\"\"\"

        def build(self, shape):
            self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros")
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False,
                                         initializer="zeros")

        def call(self, x, training=False):
            if training:
                self.mean.assign(tf.reduce_mean(x))
                self.calls.assign_add(1)
            return x


    class StoresOutputs(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            if hasattr(y_pred, "numpy"):  # the first call is symbolic
                seen.append(y_pred.numpy())
            return super().compute_loss(x, y, y_pred, sample_weight)


    def step(rows, *layers, **options):
        \"\"\"Train one step, and return the outputs.\"\"\"
        x = keras.Input((8,))
        inner = keras.Sequential([keras.Input((8,)), *layers])
        zero = keras.layers.Dense(8, kernel_initializer="zeros")(x)  # has trainable weights
        model = StoresOutputs(x, keras.layers.add([inner(x), zero]))
        model.compile(keras.optimizers.SGD(0.0), "mse", **options)
        hvdtrain.distribute(model)
        del seen[:]
        model.fit(X[:rows], X[:rows], batch_size=rows, shuffle=False, verbose=0)
        return seen[-1]


    seen = []
    for rows in (7, 2, 1):
        # Three towers get 2, 2 and 3 of 7 rows; the first gets none of 1 or 2.
        cuts = [rows * tower // 3 for tower in range(4)]
        parts = [X[a:b] for a, b in zip(cuts, cuts[1:]) if b > a]
        tracks = Tracks()
        step(rows, tracks, run_eagerly=True)
        assert int(tracks.calls) == 1
        np.testing.assert_allclose(tracks.mean, X[:rows].mean(), rtol=1e-4)
        normalize = keras.layers.BatchNormalization(momentum=0.9)
        outputs = step(rows, normalize, run_eagerly=True)
        expected = [(part - part.mean(0)) / np.sqrt(part.var(0) + 1e-3) for part in parts]
        np.testing.assert_allclose(outputs, np.concatenate(expected), atol=1e-4)
        variance = sum(part.var(0) * len(part) / rows for part in parts)
        np.testing.assert_allclose(normalize.moving_variance, 0.9 + 0.1 * variance, rtol=1e-4)
        assert all(np.isfinite(variable.numpy()).all() for variable in normalize.variables)
    X[:] = 1.0
    dropped = step(9, keras.layers.Dropout(0.5), run_eagerly=True)
    report("dropout", masks=len({row.tobytes() for row in dropped}))
""")


def test_layers_that_depend_on_the_batch(launch):
    done = launch(None, LAYERS, timeout_s=120, env=towers(3))
    assert done.returncode == 0
    assert "/device:" not in done.stdout, "no log of placements by default"
    # Towers with the same random numbers would have three masks of 256.
    assert reports(done, "dropout")[0]["masks"] > 3


PLACED = program("""
    assert not tf.config.get_soft_device_placement()
    model = classifier("sgd")
    model.fit(X[:16], Y[:16], batch_size=8, verbose=0)
    model.predict(X[:4], verbose=0)
""")


def placed(done: Completed, operation: str) -> set[str]:
    """Return the devices of an operation in TensorFlow's log."""
    return set(re.findall(rf"\({operation}\): \S+/device:(\S+)", done.stdout))


def test_towers_compute_on_different_devices(launch):
    settings = {"log_device_placement": 1, "soft_placement": 0}
    done = launch(None, PLACED, timeout_s=120, env=towers(3, **settings))
    assert done.returncode == 0
    three = {"CPU:0", "CPU:1", "CPU:2"}
    assert placed(done, "Relu") == three, "forward"
    assert placed(done, "ReluGrad") == three, "backward"
    assert placed(done, "ResourceApplyGradientDescent") <= {"CPU:0"}


APART = program("""
    class StoresGraph(keras.layers.Layer):
        def call(self, x):
            graphs.append(tf.compat.v1.get_default_graph())
            return x


    layers, graphs = keras.layers, []
    model = classifier("sgd", layers.Dense(9, "relu"), layers.BatchNormalization(),
                       layers.Dropout(0.5), layers.Dense(3), StoresGraph())
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    batch = tf.constant(X[:8]), tf.constant(Y[:8])
    tf.function(model.train_step).get_concrete_function(batch)


    def waits_for(operation):
        ancestors, queue = set(), [operation]
        while queue:
            current = queue.pop()
            before = {*(t.op for t in current.inputs), *current.control_inputs} - ancestors
            ancestors |= before
            queue += before
        return ancestors


    for operation in graphs[-1].get_operations():
        if operation.type == "BiasAdd":
            others = {one.device for one in waits_for(operation) if one.type == "MatMul"}
            report("outputs", device=operation.device, after=sorted(others))
""")


def test_no_tower_waits_for_the_pass_of_another(launch):
    done = launch(None, APART, timeout_s=120, env=towers(3))
    assert done.returncode == 0
    outputs = reports(done, "outputs")
    assert sorted({entry["device"][-5:] for entry in outputs}) == ["CPU:0", "CPU:1", "CPU:2"]
    for entry in outputs:
        assert entry["after"] == [entry["device"]]


RESUMED = program("""
    import sys

    epochs, folder = int(sys.argv[1]), sys.argv[2]
    model = classifier(keras.optimizers.Adam(0.01))
    model.fit(X[:50], Y[:50], batch_size=16, epochs=epochs, shuffle=False, verbose=0,
              callbacks=[hvdtrain.Checkpoint(folder)])
    np.savez(folder + "/weights.npz", *model.get_weights())
""")


def test_training_resumes_with_a_different_number_of_devices(launch, tmp_path):
    stopped, whole = str(tmp_path / "stopped"), str(tmp_path / "whole")
    assert launch(None, RESUMED, "1", stopped, env=towers(2)).returncode == 0
    resumed = launch(None, RESUMED, "2", stopped, env=towers(3))
    assert "resuming from the checkpoint of step 4" in resumed.stderr
    assert launch(None, RESUMED, "2", whole).returncode == 0
    got, expected = np.load(f"{stopped}/weights.npz"), np.load(f"{whole}/weights.npz")
    for name in expected.files:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


REFUSED = program("""
    from tests.trainer.own_steps import OwnStep


    class Scalar(keras.layers.Layer):
        def call(self, x):
            return tf.reduce_mean(x)


    class AddsRows(keras.layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_mean(x, axis=1))
            return x


    def refused(what, make):
        try:
            make()
        except hvdtrain.ModelError as error:
            report(what, error=str(error))


    def own_step():
        model = OwnStep()
        model(X[:1])
        model.compile("sgd", LOSS)
        hvdtrain.distribute(model)


    def fixed():
        model = keras.Sequential([keras.Input((8,), batch_size=4), keras.layers.Dense(3)])
        model.compile("sgd", LOSS)
        hvdtrain.distribute(model)


    def fit(*layers):
        model = classifier("sgd", *layers, loss="mse", metrics=[])
        model.fit(X[:16], X[:16], batch_size=8, verbose=0)


    refused("own step", own_step)
    refused("fixed", fixed)
    refused("scalar", lambda: fit(keras.layers.Dense(8), Scalar()))
    refused("rows", lambda: fit(keras.layers.Dense(8), AddsRows()))
    classifier("sgd", keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(3),
               jit_compile=True).fit(X, Y, batch_size=8, verbose=0)
""")


def test_unsupported_models_are_refused_on_all_ranks(launch):
    done = launch(2, REFUSED, timeout_s=120, env=towers(2))
    assert done.returncode == 0
    expected = {
        "own step": r"does not support the train_step of OwnStep; .* start one rank per device",
        "fixed": r"Input 0 .* has a fixed batch size of 4, .* start one rank per device",
        "scalar": r"Outputs must have a row for each sample with --mode towers, got a scalar",
        "rows": r"add_loss must get a scalar with --mode towers, got shape \(\w+,\)",
    }
    for what, message in expected.items():
        errors = reports(done, what)
        assert [entry["rank"] for entry in errors] == [0, 1], what
        assert all(re.search(message, entry["error"]) for entry in errors), errors
    for notice in ("normalizes the part of each tower", "towers run without jit_compile"):
        assert done.stderr.count(notice) == 1


def test_init_must_come_before_devices_are_used(launch):
    used = """
        import tensorflow as tf
        tf.zeros(3)
        import hvdtrain
        hvdtrain.init()
    """
    for settings in (towers(2), {"HVDTRAIN_LOG_DEVICE_PLACEMENT": "1"}):
        done = launch(None, used, env=settings)
        assert done.returncode != 0
        assert "LaunchError" in done.stderr
        assert "Call hvdtrain.init() first" in done.stderr
