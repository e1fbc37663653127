"""A small model and data for tests of single features."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.private_api.tensorflow import function_body
from tests.trainer.equivalence import alike, distance, from_chief, weights

JOINT_BATCH = 12
ROWS = JOINT_BATCH * 4 + 5
TOLERANCE = 1e-5
rng = np.random.default_rng(2)
X = rng.normal(size=(ROWS, 6)).astype("float32")
Y = rng.integers(0, 3, ROWS)


def classifier(**options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = [keras.Input((6,)), keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    options.setdefault("optimizer", keras.optimizers.SGD(0.1))
    options.setdefault("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(**options)
    return model


def compare(hvdtrain, make, train) -> keras.Model:
    """Train ``make()`` on the chief alone and on all ranks, and compare the weights."""
    alone = make()
    # Running these few steps eagerly is faster than tracing them.
    alone.jit_compile, alone.run_eagerly = False, True
    if hvdtrain.is_chief():
        train(alone, JOINT_BATCH)
    reference = from_chief(weights(alone))
    together = make()
    hvdtrain.distribute(together)
    train(together, JOINT_BATCH // hvdtrain.size())
    assert alike(together)
    assert distance(together, reference) <= TOLERANCE
    return together


def train_arrays(model: keras.Model, batch_size: int, **options: Any) -> None:
    model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options)


def operations(graph: Any) -> Iterator[Any]:
    """Yield the operations that a step runs, one for each cluster."""
    for operation in graph.get_operations():
        yield operation
        if not is_cluster(operation):
            for value in operation.node_def.attr.values():
                for function in (value.func, *value.list.func):
                    body = function_body(graph, function.name) if function.name else ()
                    if first := next(iter(body), None):
                        yield from operations(first.graph)


def is_cluster(operation: Any) -> bool:
    return bool(operation.node_def.attr["_XlaMustCompile"].b)


def traced(model: keras.Model) -> list[Any]:
    """Return the operations of a training step."""
    step = tf.function(model.train_step, autograph=False)
    return list(operations(step.get_concrete_function((X[:4], Y[:4])).graph))


def clusters(model: keras.Model) -> int:
    """Return the number of parts of a training step that XLA compiles."""
    return sum(map(is_cluster, traced(model)))


class OwnStep(keras.Model):
    """A subclassed model with a train_step as in Keras' guides."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
