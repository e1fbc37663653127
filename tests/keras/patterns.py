"""What Keras' guides and its pages on the API show, each as a small model and a way to train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import hvdtrain
from hvdtrain.keras.model_optimizers import state_of_optimizers
from tests.keras.features import JOINT_BATCH, ROWS, X, Y, classifier

__all__ = ["PATTERNS", "Gan", "Pattern", "make_gan", "outcome", "state"]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
NOISE = np.random.default_rng(8).normal(size=(ROWS, 2)).astype("float32")
TOKENS = np.random.default_rng(9).integers(0, 7, (ROWS, 5))  # zeros are masked
layers = keras.layers

Train = Callable[[keras.Model, int], Any]


class Pattern(NamedTuple):
    """One way to train.

    Attributes:
        guide: Where Keras shows it.
        make: The model, compiled.
        train: Takes the model and a batch size; returns what the user sees of it.
        often: Whether ``make test`` runs it.
    """

    guide: str
    make: Callable[[], keras.Model]
    train: Train
    often: bool = False


def state(model: keras.Model) -> list[np.ndarray]:
    """Weights and the state of all optimizers, without random seeds."""
    variables = [*model.weights, *state_of_optimizers(model)]
    return [np.asarray(variable.numpy()) for variable in variables]


def outcome(told: Any) -> dict[str, np.ndarray]:
    """What a user sees of a training, as arrays by name."""
    if not isinstance(told, dict):
        return {"": np.asarray(told, np.float64)}
    return {name: np.asarray(values, np.float64) for name, values in sorted(told.items())}


def fit(*arrays: Any, **options: Any) -> Train:
    """Training on arrays for two epochs; the last batch is an uneven one."""
    x, y, *rest = arrays or (X, Y)
    weights = {"sample_weight": rest[0]} if rest else {}

    def train(model: keras.Model, size: int) -> Any:
        given = {"epochs": 2, "shuffle": False, "verbose": 0, **weights, **options}
        return model.fit(x, y, batch_size=size, **given).history

    return train


def built(model: keras.Model, x: Any = X, **options: Any) -> keras.Model:
    """A subclassed model after its first call, compiled."""
    model(x[:1])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": LOSS, **options})
    return model


# Customizing what happens in fit().


class NestedLogs(keras.Model):
    """Updates all metrics in its step and returns each by name: those of compile are a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dense = layers.Dense(4, "tanh"), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(self.hidden(x))

    def _update(self, y: Any, y_pred: Any, loss: Any, weight: Any) -> Any:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(y)[0])
            else:
                metric.update_state(y, y_pred, weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self._update(y, y_pred, loss, weight)

    def test_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x)
        return self._update(y, y_pred, self.compute_loss(y=y, y_pred=y_pred), weight)


class OwnTrackers(keras.Model):
    """As autoencoders do: trackers whose names are not those in the logs; others by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2), layers.Dense(6)
        self.total = keras.metrics.Mean(name="total_loss")
        self.error = keras.metrics.Mean(name="error")

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.error]

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            difference = keras.ops.square(self(x) - x)
            error = keras.ops.mean(difference)
            loss = error + 0.1 * keras.ops.mean(keras.ops.square(self.encoder(x)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        rows = tf.shape(x)[0]
        self.total.update_state(loss, sample_weight=rows)
        self.error.update_state(error, sample_weight=rows)
        return {
            "loss": self.total.result(),
            "parts": {"error": self.error.result(), "of": {"last": loss}},
            "columns": keras.ops.mean(difference, axis=0),
            "pair": [error, 2 * error],
            "steps": self.optimizer.iterations,
            "note": None,
        }


class Gan(keras.Model):
    """Two networks and two optimizers, no call(); noise comes with the data or is drawn."""

    def __init__(self, every: int = 1, draw: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((2,)), layers.Dense(4, "tanh")])
        self.generator.add(layers.Dense(6))
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh")])
        self.critic.add(layers.Dense(1))
        self.seeds = keras.random.SeedGenerator(4)
        self.every = every
        self.draw = draw
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    def _both_losses(self, real: Any, noise: Any) -> tuple[Any, Any]:
        fake = self.critic(self.generator(noise))
        real = self.critic(real)
        ones, zeros = keras.ops.ones_like(fake), keras.ops.zeros_like(fake)
        d_loss = self.loss_fn(ones, real) + self.loss_fn(zeros, fake)
        return d_loss, self.loss_fn(ones, fake)

    def _told(self, d_loss: Any, g_loss: Any, rows: Any) -> Any:
        self.d_loss.update_state(d_loss, sample_weight=rows)
        self.g_loss.update_state(g_loss, sample_weight=rows)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def train_step(self, data: Any) -> Any:
        real, noise = data
        if self.draw is not None:
            noise = self.draw(keras.ops.shape(noise), self.seeds)
        with tf.GradientTape() as tape:
            d_loss, _ = self._both_losses(real, noise)
        weights = self.critic.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            _, g_loss = self._both_losses(real, noise)
        mine = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, mine)
        if self.every == 1:
            self.g_optimizer.apply(gradients, mine)
        else:
            tf.cond(
                self.d_optimizer.iterations.value % self.every == 0,
                lambda: self._apply(gradients, mine),
                lambda: 0,
            )
        return self._told(d_loss, g_loss, keras.ops.shape(real)[0])

    def _apply(self, gradients: Any, mine: Any) -> int:
        self.g_optimizer.apply(gradients, mine)
        return 0

    def test_step(self, data: Any) -> Any:
        real, noise = data
        return self._told(*self._both_losses(real, noise), keras.ops.shape(real)[0])


def make_gan(scaled: bool = False, **options: Any) -> keras.Model:
    """Compiled; nothing of it has been called as a whole."""
    gan = Gan(**options)
    d_optimizer: Any = keras.optimizers.Adam(0.01)
    if scaled:
        d_optimizer = keras.optimizers.LossScaleOptimizer(d_optimizer, initial_scale=1.0)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(d_optimizer, keras.optimizers.SGD(0.05, momentum=0.9), loss)
    if gan.every > 1:
        # Within tf.cond nothing can be built.
        gan.g_optimizer.build(gan.generator.trainable_weights)
    return gan


class Distiller(keras.Model):
    """Holds built models, has a call(), and is never called itself before fit."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.teacher.trainable = False
        self.student = keras.Sequential([keras.Input((6,)), layers.Dense(3)])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **options: Any
    ) -> Any:
        theirs = keras.ops.softmax(self.teacher(x, training=False))
        mine = keras.ops.softmax(y_pred)
        loss = super().compute_loss(x, y, y_pred, *args, **options)
        return loss + keras.ops.mean(keras.ops.square(theirs - mine))

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> keras.Model:
    model = Distiller()
    model.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    return model


def _by_layer() -> keras.Model:
    """A dict and a list of optimizers, each for a layer."""

    class ByLayer(NestedLogs):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            for layer, optimizer in [
                (self.hidden, self.those["hidden"]),
                (self.dense, self.more[0]),
            ]:
                weights = layer.trainable_weights
                optimizer.apply(tape.gradient(loss, weights), weights)
            return self._update(y, y_pred, loss, None)

    model = ByLayer()
    model.those = {"hidden": keras.optimizers.Adam(0.01)}
    model.more = [keras.optimizers.SGD(0.1)]
    return built(model, optimizer=None, metrics=["accuracy"])


def _batches(model: keras.Model, size: int) -> Any:
    """train_on_batch and test_on_batch on this rank's part of each joint batch."""
    told: list[Any] = []
    for start in range(0, 2 * JOINT_BATCH, JOINT_BATCH):
        first = start + (hvdtrain.rank() * size if size < JOINT_BATCH else 0)
        model.train_on_batch(X[first : first + size], Y[first : first + size])
    told.append(model.predict_on_batch(X[:3]))
    return np.concatenate(told)


# Training and evaluation with the built-in methods; layers and models by subclassing.


class Watching(layers.Layer):
    """Adds a loss and keeps a metric of what goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.size = keras.metrics.Mean(name="size")

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        self.size.update_state(keras.ops.mean(keras.ops.abs(x), axis=-1))
        return x


class Hits(keras.metrics.Metric):
    """A metric of the user's own."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.found = self.add_variable((), "zeros", name="found")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        hits = keras.ops.equal(keras.ops.argmax(y_pred, -1), keras.ops.cast(y_true, "int64"))
        self.found.assign_add(keras.ops.sum(keras.ops.cast(hits, self.dtype)))

    def result(self) -> Any:
        return self.found.value


def stack(*parts: Any, start: Any = None, **options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)) if start is None else start, *parts])
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": LOSS, **options})
    return model


def two_outputs() -> keras.Model:
    first, second = keras.Input((6,), name="first"), keras.Input((2,), name="second")
    shared = layers.Dense(4, "tanh")
    joined = layers.concatenate([shared(first), shared(first[:, ::-1]), second])
    outputs = {
        "label": layers.Dense(3, name="label")(joined),
        "value": layers.Dense(1, name="value")(joined),
    }
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        loss={"label": LOSS, "value": "mse"},
        loss_weights={"label": 1.0, "value": 0.2},
        metrics={"label": ["accuracy"], "value": ["mae"]},
    )
    return model


def _train_two(model: keras.Model, size: int) -> Any:
    inputs = {"first": X, "second": NOISE}
    told = fit(inputs, {"label": Y, "value": X[:, :1]})(model, size)
    # Keras gives the short last batch of single outputs as much weight as the others.
    return {name: told[name] for name in ("loss", "label_accuracy", "value_mae")}


def _frozen() -> keras.Model:
    """A frozen base, whose BatchNormalization runs in inference mode, under a new head."""
    base = keras.Sequential([keras.Input((6,)), layers.Dense(4, use_bias=False)])
    base.add(layers.BatchNormalization(synchronized=True))
    base.trainable = False
    start = keras.Input((6,))
    model = keras.Model(start, layers.Dense(3)(base(start, training=False)))
    model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
    return model


def _fine_tune(model: keras.Model, size: int) -> Any:
    """Train the head, then all of it at a lower rate."""
    before = fit(epochs=1)(model, size)
    model.layers[1].trainable = True
    model.compile(keras.optimizers.Adam(1e-3), LOSS, metrics=["accuracy"])
    if size < JOINT_BATCH:
        hvdtrain.distribute(model)
    after = fit(epochs=1)(model, size)
    return {name: [*values, *after[name]] for name, values in before.items()}


def _encoder_decoder() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(7, 3, mask_zero=True)(tokens)
    _, state_ = layers.GRU(3, return_state=True)(embedded)
    out = layers.Bidirectional(layers.LSTM(2))(embedded)
    model = keras.Model(tokens, layers.Dense(3)(layers.concatenate([state_, out])))
    model.compile(keras.optimizers.Adam(0.01), LOSS)
    return model


def _loaded(model: keras.Model, size: int) -> Any:
    """Rebuilt from its configuration and weights, as the guide on saving does."""
    again = keras.Sequential.from_config(model.get_config())
    again.set_weights(model.get_weights())
    again.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    if size < JOINT_BATCH:
        hvdtrain.distribute(again)
    history = fit()(again, size)
    model.set_weights(again.get_weights())
    return history


def _evaluated(model: keras.Model, size: int) -> Any:
    fit()(model, size)
    told = model.evaluate(X, Y, batch_size=size, verbose=0, return_dict=True)
    listed = model.evaluate(X, Y, batch_size=size, verbose=0)
    return np.concatenate([[told[name] for name in sorted(told)], np.ravel(listed)])


def _own_loop(model: keras.Model, size: int) -> Any:
    """A custom training loop; each rank computes its part of a joint batch."""
    averages = size < JOINT_BATCH
    for start in range(0, 2 * JOINT_BATCH, JOINT_BATCH):
        first = start + (hvdtrain.rank() * size if averages else 0)
        with tf.GradientTape() as tape:
            loss = LOSS(Y[first : first + size], model(X[first : first + size], training=True))
        if averages:
            tape = hvdtrain.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_weights)
        for gradient, weight in zip(gradients, model.trainable_weights):
            weight.assign_sub(0.1 * gradient)
    return model.predict_on_batch(X[:3])


class Noted(keras.callbacks.Callback):
    """As the guide on callbacks: looks at logs of epochs, sets the rate, stops."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen += [logs["loss"], logs["val_loss"]]
        self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
        if epoch == 2:
            self.model.stop_training = True


def _with_callbacks(model: keras.Model, size: int) -> Any:
    noted = Noted()
    callbacks = [
        noted,
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: None),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=10.0),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=3, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
    ]
    history = fit(callbacks=callbacks, epochs=5, validation_split=0.25)(model, size)
    return {"seen": noted.seen, **history}


def _swapped(model: keras.Model, size: int) -> Any:
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    return fit(callbacks=callbacks, **validated)(model, size)


def _pipeline(model: keras.Model, size: int) -> Any:
    weights = np.where(Y == 1, 2.0, 0.5).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((X, Y, weights)).batch(size)
    history = model.fit(data, validation_data=data, epochs=3, validation_freq=2, verbose=0)
    return history.history


SCHEDULE = keras.optimizers.schedules.ExponentialDecay
CUSTOM, BUILT_IN = "custom train_step", "training with built-in methods"
SUBCLASSING, MASKING = "layers and models via subclassing", "masking and padding"
API = "API"
validated = {"validation_data": (X[:17], Y[:17])}

PATTERNS: dict[str, Pattern] = {
    "metrics of compile by name": Pattern(
        CUSTOM,
        lambda: built(NestedLogs(), metrics=["accuracy", Hits()]),
        fit(**validated),
        often=True,
    ),
    "trackers of one's own": Pattern(
        CUSTOM, lambda: built(OwnTrackers(), loss=None), fit(), often=True
    ),
    "GAN": Pattern(
        CUSTOM, make_gan, fit(X, NOISE, validation_data=(X[:17], NOISE[:17])), often=True
    ),
    "GAN, the generator every third step": Pattern(
        CUSTOM, lambda: make_gan(every=3), fit(X, NOISE, epochs=3), often=True
    ),
    "GAN with a LossScaleOptimizer": Pattern(CUSTOM, lambda: make_gan(scaled=True), fit(X, NOISE)),
    "an optimizer for each layer": Pattern(CUSTOM, _by_layer, fit()),
    "compute_loss of one's own, not called before": Pattern(CUSTOM, distiller, fit()),
    "losses and metrics of layers": Pattern(
        BUILT_IN, lambda: stack(layers.Dense(4), Watching(), layers.Dense(3)), fit(**validated)
    ),
    "a metric of one's own": Pattern(
        # With a validation Keras alone shows its value as that of the training, too.
        BUILT_IN,
        lambda: classifier(metrics=[Hits(), "accuracy"]),
        fit(),
    ),
    "several inputs and outputs, a shared layer": Pattern(
        "functional API", two_outputs, _train_two
    ),
    "a pipeline with weights": Pattern(
        BUILT_IN, lambda: classifier(weighted_metrics=["accuracy"]), _pipeline
    ),
    "a schedule": Pattern(
        BUILT_IN,
        lambda: classifier(optimizer=keras.optimizers.Adam(SCHEDULE(0.05, 2, 0.5))),
        fit(),
    ),
    "validation_split, callbacks, early stopping": Pattern(
        "writing your own callbacks",
        lambda: classifier(optimizer=keras.optimizers.SGD(0.1)),
        _with_callbacks,
    ),
    "activity regularization": Pattern(
        SUBCLASSING,
        lambda: stack(layers.Dense(4, activity_regularizer="l2"), layers.Dense(3)),
        fit(),
    ),
    "frozen, then fine-tuned": Pattern("transfer learning", _frozen, _fine_tune),
    "recurrent layers with masks and states": Pattern("RNNs", _encoder_decoder, fit(TOKENS, Y)),
    "a Masking layer": Pattern(
        MASKING,
        lambda: stack(layers.Masking(), layers.LSTM(3), layers.Dense(3), start=keras.Input((5, 1))),
        fit(TOKENS[..., np.newaxis].astype("float32"), Y),
    ),
    "from_config and weights": Pattern("serialization and saving", classifier, _loaded),
    "a loop of one's own": Pattern("custom training loops", classifier, _own_loop),
    "evaluate as a dict and as a list": Pattern(
        API, lambda: classifier(metrics=["accuracy"]), _evaluated
    ),
    "train_on_batch, predict_on_batch": Pattern(API, classifier, _batches),
    "initial_epoch and class weights": Pattern(
        API, classifier, fit(epochs=4, initial_epoch=2, class_weight={0: 1.0, 1: 2.0, 2: 0.5})
    ),
    "moving averages swapped in": Pattern(
        API,
        lambda: classifier(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)),
        _swapped,
    ),
    "LossScaleOptimizer with clipping": Pattern(
        API,
        lambda: classifier(
            optimizer=keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01, global_clipnorm=0.1), initial_scale=8.0
            )
        ),
        fit(),
    ),
}
