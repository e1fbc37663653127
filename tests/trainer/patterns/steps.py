"""Custom train steps, as in "Customizing what happens in fit() with TensorFlow"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

from tests.trainer.features import X, Y
from tests.trainer.own_steps import differentiate, minimize, own_steps, track_optimizer
from tests.trainer.patterns.pattern import (
    LOSS,
    NOISE,
    TOKENS,
    WEIGHTS,
    Hits,
    Pattern,
    batches,
    built,
    fit,
    validated,
)

layers = keras.layers


@own_steps
class NestedLogs(keras.Model):
    """Returns all metrics of a step by name. The compiled metrics are in a nested dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dense = layers.Dense(4, "tanh"), layers.Dense(3)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(self.hidden(x))

    def _update(self, y: Any, y_pred: Any, loss: Any, weight: Any) -> Any:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=keras.ops.shape(y)[0])
            else:
                metric.update_state(y, y_pred, weight)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

        def losses() -> Any:
            y_pred = self(x, training=True)
            return self.compute_loss(y=y, y_pred=y_pred, sample_weight=weight), y_pred

        loss, y_pred = minimize(self, self.optimizer, self.trainable_weights, losses)
        return self._update(y, y_pred, loss, weight)

    def test_step(self, data: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x)
        return self._update(y, y_pred, self.compute_loss(y=y, y_pred=y_pred), weight)


class EmbeddedOwnStep(NestedLogs):
    """Has sparse gradients, whose repeated rows must be summed up before Adam applies them."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Embedding(7, 4)
        self.joined = layers.GlobalAveragePooling1D()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.dense(self.joined(self.hidden(x)))


def _reduced(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _weights_alone(model: keras.Model, size: int) -> Any:
    """Train without comparing the losses, because the step sums them over this rank's rows only."""
    fit()(model, size)
    return {}


def _weighted(model: keras.Model, size: int) -> Any:
    fit(X, Y, WEIGHTS)(model, size)
    return {}


@own_steps
class OwnTrackers(keras.Model):
    """Returns metrics by other names, and values of the batch, as autoencoders do."""

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

        def losses() -> Any:
            difference = keras.ops.square(self(x) - x)
            error = keras.ops.mean(difference)
            loss = error + 0.1 * keras.ops.mean(keras.ops.square(self.encoder(x)))
            return loss, error, difference

        weights = self.trainable_weights
        loss, error, difference = minimize(self, self.optimizer, weights, losses)
        rows = keras.ops.shape(x)[0]
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


@own_steps
class Gan(keras.Model):
    """A model with two networks and two optimizers, but without call().

    The noise is part of the data, or drawn in the step.
    """

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
        # Only TensorFlow accepts a model that can't be called and isn't built.
        self.built = keras.backend.backend() != "tensorflow"

    @property
    def metrics(self) -> list[Any]:
        return [self.d_loss, self.g_loss]

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_state = track_optimizer(d_optimizer, self.critic.trainable_weights)
        self.g_state = track_optimizer(g_optimizer, self.generator.trainable_weights)

    def both_losses(self, real: Any, noise: Any) -> tuple[Any, Any]:
        fake = self.critic(self.generator(noise))
        real = self.critic(real)
        ones, zeros = keras.ops.ones_like(fake), keras.ops.zeros_like(fake)
        d_loss = self.loss_fn(ones, real) + self.loss_fn(zeros, fake)
        return d_loss, self.loss_fn(ones, fake)

    def _update(self, d_loss: Any, g_loss: Any, rows: Any) -> Any:
        self.d_loss.update_state(d_loss, sample_weight=rows)
        self.g_loss.update_state(g_loss, sample_weight=rows)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def train_step(self, data: Any) -> Any:
        real, noise = data
        if self.draw is not None:
            noise = self.draw(keras.ops.shape(noise), self.seeds)
        weights = self.critic.trainable_weights
        both = lambda: self.both_losses(real, noise)  # noqa: E731
        d_loss, _ = minimize(self, self.d_optimizer, weights, both)
        weights = self.generator.trainable_weights
        (g_loss,), gradients = differentiate(self, weights, lambda: both()[1:])
        if self.every == 1:
            self.g_optimizer.apply(gradients, weights)
        else:
            keras.ops.cond(
                self.d_optimizer.iterations.value % self.every == 0,
                lambda: self._apply(gradients, weights),
                lambda: 0,
            )
        return self._update(d_loss, g_loss, keras.ops.shape(real)[0])

    def _apply(self, gradients: Any, weights: Any) -> int:
        self.g_optimizer.apply(gradients, weights)
        return 0

    def test_step(self, data: Any) -> Any:
        real, noise = data
        return self._update(*self.both_losses(real, noise), keras.ops.shape(real)[0])


def make_gan(scaled: bool = False, **options: Any) -> keras.Model:
    """Return a compiled GAN that was never called."""
    gan = Gan(**options)
    d_optimizer: Any = keras.optimizers.Adam(0.01)
    if scaled:
        d_optimizer = keras.optimizers.LossScaleOptimizer(d_optimizer, initial_scale=1.0)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    gan.compile(d_optimizer, keras.optimizers.SGD(0.05, momentum=0.9), loss)
    if gan.every > 1:
        # An optimizer can't be built within tf.cond.
        gan.g_optimizer.build(gan.generator.trainable_weights)
    return gan


class Distiller(keras.Model):
    """Contains built models, but is not called itself before fit."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
        self.teacher.trainable = False
        self.student = keras.Sequential([keras.Input((6,)), layers.Dense(3)])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **options: Any
    ) -> Any:
        expected = keras.ops.softmax(self.teacher(x, training=False))
        loss = super().compute_loss(x, y, y_pred, *args, **options)
        return loss + keras.ops.mean(keras.ops.square(expected - keras.ops.softmax(y_pred)))

    def call(self, x: Any) -> Any:
        return self.student(x)


def distiller() -> keras.Model:
    model = Distiller()
    model.compile(keras.optimizers.SGD(0.1), LOSS, metrics=["accuracy"])
    return model


def _by_layer() -> keras.Model:
    """A model with an optimizer for each layer, in a dict and a list."""

    @own_steps
    class ByLayer(NestedLogs):
        def train_step(self, data: Any) -> Any:
            x, y = data

            def losses() -> Any:
                y_pred = self(x, training=True)
                return self.compute_loss(y=y, y_pred=y_pred), y_pred

            parts = [(self.hidden, self.those["hidden"]), (self.dense, self.more[0])]
            weights = [weight for layer, _ in parts for weight in layer.trainable_weights]
            (loss, y_pred), gradients = differentiate(self, weights, losses)
            for layer, optimizer in parts:
                count = len(layer.trainable_weights)
                optimizer.apply(gradients[:count], layer.trainable_weights)
                gradients = gradients[count:]
            return self._update(y, y_pred, loss, None)

    model = ByLayer()
    model.those = {"hidden": keras.optimizers.Adam(0.01)}
    model.more = [keras.optimizers.SGD(0.1)]
    return built(model, optimizer=None, metrics=["accuracy"])


@own_steps
class OwnTest(keras.Model):
    """Overrides only the evaluation step."""

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


@own_steps
class OwnPrediction(keras.Model):
    """Predicts probabilities instead of logits."""

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"label": keras.ops.softmax(self(x, training=False))}


def _predicted(model: keras.Model, size: int) -> Any:
    fit()(model, size)
    data = batches(size, X)
    outputs = [model.predict(x, batch_size=n, verbose=0) for x, n in [(X, size), (data, None)]]
    return np.concatenate([entry["label"] for entry in outputs])


def functional(kind: type[keras.Model], **options: Any) -> keras.Model:
    start = keras.Input((6,))
    model = kind(start, layers.Dense(3)(layers.Dense(4, "tanh")(start)))
    model.compile(keras.optimizers.Adam(0.01), **options)
    return model


@own_steps
class Images(keras.Model):
    """A step on elements that are one tensor, with a tracker that counts batches."""

    def __init__(self) -> None:
        super().__init__()
        self.network = keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def train_step(self, images: Any) -> Any:
        weights = self.network.trainable_weights
        (loss,) = minimize(
            self,
            self.optimizer,
            weights,
            lambda: (keras.ops.mean(keras.ops.square(self.network(images) - images)),),
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def _images() -> keras.Model:
    model = Images()
    model.compile(keras.optimizers.Adam(0.01))
    return model


def _on_images(model: keras.Model, size: int) -> Any:
    """Train on a pipeline without labels, then on a part of it."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(X[:48]).batch(size)
    history = model.fit(data, epochs=2, verbose=0).history
    more = model.fit(data.take(2 if size == 12 else 4), epochs=1, verbose=0).history
    return {name: [*values, *more[name]] for name, values in history.items()}


class Four(NamedTuple):
    """A batch of four parts."""

    a: Any
    b: Any
    c: Any
    d: Any


@own_steps
class AnyStructure(OwnTrackers):
    """Steps that check the structure of their data."""

    expected: Callable[[Any], Any]

    def _loss(self, data: Any) -> Any:
        keras.tree.assert_same_structure(data, self.expected(X))
        scaled = [(n + 1) * leaf for n, leaf in enumerate(keras.tree.flatten(data))]
        return keras.ops.mean(keras.ops.square(self(sum(scaled))))

    def train_step(self, data: Any) -> Any:
        weights = self.trainable_weights
        (loss,) = minimize(self, self.optimizer, weights, lambda: (self._loss(data),))
        self.total.update_state(loss)
        return {"loss": self.total.result()}

    def test_step(self, data: Any) -> Any:
        self.total.update_state(self._loss(data))
        return {"loss": self.total.result()}

    def predict_step(self, data: Any) -> Any:
        keras.tree.assert_same_structure(data, self.expected(X))
        return self(keras.tree.flatten(data)[0])


def _on_any_structure(model: keras.Model, size: int) -> Any:
    import tensorflow as tf

    results = {}
    structures: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda x: x,
        "dict": lambda x: {"b": x, "a": x + 1},
        "tuple of one": lambda x: ((x, x + 1),),
        "named tuple": lambda x: Four(x, x + 1, x + 2, x + 3),
    }
    for name, structure in structures.items():
        model.expected = structure
        data = tf.data.Dataset.from_tensor_slices(structure(X[:48])).batch(size)
        history = model.fit(data, validation_data=data, verbose=0).history
        results.update({f"{name} {entry}": values for entry, values in history.items()})
        results[f"{name} prediction"] = model.predict(data, verbose=0)
    model.expected = structures["tensor"]
    options = {"batch_size": size, "shuffle": False, "verbose": 0}
    results["array"] = model.fit(X[:48], validation_data=X[:24], **options).history["val_loss"]
    return results


STEPS: dict[str, Pattern] = {
    "metrics of compile by name": Pattern(
        # Don't validate, because Keras alone would report the value of the validation for training.
        lambda: built(NestedLogs(), metrics=["accuracy", Hits()]),
        fit(),
        often=True,
        eager=False,
    ),
    "sample weights in an own step": Pattern(
        lambda: built(NestedLogs(), weighted_metrics=["accuracy"]),
        fit(X, Y, WEIGHTS, **validated),
    ),
    "sums over samples in an own step": Pattern(
        lambda: built(NestedLogs(), loss=_reduced("sum")), _weights_alone, often=True
    ),
    "means by sample weights in an own step": Pattern(
        lambda: built(NestedLogs(), loss=_reduced("mean_with_sample_weight")), _weighted
    ),
    "an embedding in an own step": Pattern(
        lambda: built(EmbeddedOwnStep(), TOKENS), fit(TOKENS, Y), often=True
    ),
    "own trackers": Pattern(lambda: built(OwnTrackers(), loss=None), fit()),
    "an own evaluation step": Pattern(
        lambda: functional(OwnTest, loss="mse", metrics=["mae"]),
        fit(X[:48], X[:48, :3], validation_data=(X[:24], X[:24, :3])),
    ),
    "an own prediction step": Pattern(lambda: functional(OwnPrediction, loss=LOSS), _predicted),
    "elements that are one tensor": Pattern(_images, _on_images, backends=("tensorflow",)),
    "batches of any structure": Pattern(
        lambda: built(AnyStructure(), loss=None),
        _on_any_structure,
        often=True,
        backends=("tensorflow",),
    ),
    "GAN": Pattern(make_gan, fit(X, NOISE, validation_data=(X[:17], NOISE[:17])), often=True),
    "GAN, the generator every third step": Pattern(
        lambda: make_gan(every=3), fit(X, NOISE, epochs=3), backends=("tensorflow", "torch")
    ),
    "GAN with a LossScaleOptimizer": Pattern(lambda: make_gan(scaled=True), fit(X, NOISE)),
    "an optimizer for each layer": Pattern(_by_layer, fit(), backends=("tensorflow", "torch")),
    "an own compute_loss": Pattern(distiller, fit()),
}
