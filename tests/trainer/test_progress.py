"""The progress that ``fit`` prints: lines of ``StepLog`` and progress bars."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdtrain
from tests.harness.jobs import clean_environment

STEP = re.compile(
    r"step (\d+), loss = (\d+\.\d\d) \((\d+\.\d) examples/sec; (\d+\.\d{3}) sec/batch\)"
)
EPOCH = re.compile(r"epoch (\d+)/(\d+): (\w+ = -?\d+\.\d{4}(, )?)+")

X = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")

# The source code of the same training, for other processes.
FIT = """
import time
import numpy as np, keras, hvdtrain

x = np.random.default_rng(0).normal(size=(100, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss, metrics=["accuracy"])

class Slow(keras.callbacks.Callback):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)
"""


def _model(**options: int) -> keras.Model:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], **options)
    return model


def _fit(model: keras.Model, every: int = 10, **options: object) -> list[float]:
    """Train 13 steps per epoch, and return the losses of the epochs."""
    history = model.fit(
        X, Y, batch_size=8, verbose=0, callbacks=[hvdtrain.StepLog(every)], **options
    )
    return history.history["loss"]


def test_progress_lines_of_one_process(capsys) -> None:
    model = _model()
    _fit(model, epochs=2, validation_data=(X, Y))
    _fit(model)
    text = capsys.readouterr().out
    lines = text.splitlines()
    # Steps are counted through epochs, and through calls of fit.
    assert [_kind(line) for line in lines] == [
        *("step 10", "epoch 1/2", "step 20", "epoch 2/2"),
        *("step 30", "epoch 1/1"),
    ]
    assert lines[1].startswith("epoch 1/2: accuracy = ")
    assert "val_accuracy = " in lines[1]
    assert "\x1b" not in text


def test_the_loss_is_the_average_since_the_last_line(capsys) -> None:
    losses = _fit(_model(), every=13, epochs=3)
    lines = capsys.readouterr().out.splitlines()
    printed = [float(match[2]) for match in map(STEP.fullmatch, lines) if match]
    assert printed == pytest.approx(losses, abs=0.006)


def test_several_steps_in_one_execution_print_one_line(capsys) -> None:
    _fit(_model(steps_per_execution=4), every=3)
    kinds = [_kind(line) for line in capsys.readouterr().out.splitlines()]
    assert kinds == ["step 4", "step 8", "step 12", "epoch 1/1"]


def test_an_epoch_may_have_more_steps_than_keras_knows(capsys) -> None:
    # This happens after ranks were lost.
    class KnowsFewer(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            self.params["steps"] = 7

    callbacks = [KnowsFewer(), hvdtrain.StepLog(5)]
    _model().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    kinds = [_kind(line) for line in capsys.readouterr().out.splitlines()]
    assert kinds == [
        *("step 5", "step 10", "epoch 1/2"),
        *("step 15", "step 20", "step 25", "epoch 2/2"),
    ]


def test_an_invalid_number_of_steps_is_an_error() -> None:
    for every in (0, -1, 2.5):
        with pytest.raises(hvdtrain.ConfigurationError, match="expected a whole number above 0"):
            hvdtrain.StepLog(every)


def test_only_the_chief_prints_and_counts_all_ranks(launch) -> None:
    program = FIT + (
        "hvdtrain.init()\n"
        "hvdtrain.distribute(model)\n"
        "model.fit(x, y, batch_size=8, epochs=3, verbose=0,\n"
        "          callbacks=[hvdtrain.StepLog(5), Slow(0.1)])\n"
    )
    done = launch(2, program)
    assert done.returncode == 0, done
    lines = [line for line in done.stdout.splitlines() if line]
    # An epoch has 7 steps of 16 rows. The chief draws no bar because the output of mpirun is a
    # pipe, even though Open MPI gives each rank a terminal.
    assert [_kind(line) for line in lines] == [
        *("step 5", "epoch 1/3", "step 10", "epoch 2/3"),
        *("step 15", "step 20", "epoch 3/3"),
    ]
    assert "\x1b" not in done.stdout
    match = STEP.fullmatch(lines[-2])
    assert match is not None
    # 16 rows in each step of the last line.
    assert float(match[3]) * float(match[4]) == pytest.approx(16, rel=0.05)
    assert float(match[4]) > 0.1


# The chief is lost in step 9, the second of an epoch. The loss differs between ranks.
LOSES_ITS_CHIEF = """
import os, signal, time
import keras, numpy as np, tensorflow as tf
import hvdtrain

hvdtrain.init()
first_rank = hvdtrain.rank()
steps = tf.Variable(0)

def work(step):
    if step == 9 and first_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)

class Own(keras.Sequential):
    def train_step(self, data):
        tf.numpy_function(work, [steps.assign_add(1)], [])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(data)) * 0.0 + tf.cast(first_rank + steps, tf.float32)
        tape = hvdtrain.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self._loss_tracker.update_state(loss, sample_weight=4.0)
        return {"loss": self._loss_tracker.result()}

model = Own([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.zeros((28, 1), "float32")
model.fit(x, batch_size=4, epochs=3, verbose=0, callbacks=[hvdtrain.StepLog(2)])
"""


def test_the_new_chief_continues_printing_after_a_loss(elastic) -> None:
    done = elastic(LOSES_ITS_CHIEF)
    assert done.returncode == 0, done
    lines = [line for line in done.stdout.splitlines() if "step" in line or "epoch" in line]
    # A rank prints only steps during which it was the chief.
    assert [(line.split("]")[0], _kind(line.split("] ")[1])) for line in lines] == [
        *[("[0", kind) for kind in ("step 2", "step 4", "step 6", "epoch 1/3", "step 8")],
        *[("[1", kind) for kind in ("step 10", "step 12", "step 14", "epoch 2/3")],
        *[("[1", kind) for kind in ("step 16", "step 18", "step 20", "epoch 3/3")],
    ]
    steps = [match for match in (STEP.search(line) for line in lines) if match]
    # Rank 0 prints means over two steps each. Then rank 1 prints the loss of step 10, and the mean
    # of steps 11 and 12.
    assert [float(match[2]) for match in steps[:6]] == [1.5, 3.5, 5.5, 7.5, 11.0, 12.5]
    # Each rank has 4 rows per step. The first line includes a slow step.
    for match, ranks in zip(steps[1:], [*[3] * 3, *[2] * 6]):
        assert float(match[3]) * float(match[4]) == pytest.approx(4 * ranks, rel=0.05)


@pytest.mark.slow
def test_lines_and_bars_share_a_terminal(forked_python: list[str], tmp_path: Path) -> None:
    program = FIT + (
        "for verbose in (0, 1):\n"
        "    model.fit(x, y, batch_size=8, epochs=2, verbose=verbose, validation_data=(x, y),\n"
        "              callbacks=[hvdtrain.StepLog(), Slow(0.05)])\n"
        "    print('done', verbose)\n"
    )
    raw = _run_on_terminal([*forked_python, "-c", program], tmp_path)
    own, keras_bar, _ = re.split(r"done \d", raw)
    assert re.search(r"epoch 1/2 \[=+\.*\] \d+/13", own)
    kinds = ["step 10", "epoch 1/2", "step 20", "epoch 2/2"]
    assert [_kind(line) for line in _render(own) if line] == kinds
    # With Keras' own bar, StepLog draws none and prints complete lines.
    assert not re.search(r"epoch 1/2 \[", keras_bar)
    lines = [line for line in _render(keras_bar) if line.startswith(("step", "epoch"))]
    kinds = ["step 30", "epoch 1/2", "step 40", "step 50", "epoch 2/2"]
    assert [_kind(line) for line in lines] == kinds


def test_the_chief_draws_on_the_terminal_of_mpirun(
    mpirun, forked_python: list[str], tmp_path: Path
) -> None:
    program = FIT + (
        "hvdtrain.init()\n"
        "hvdtrain.distribute(model)\n"
        "model.fit(x, y, batch_size=8, epochs=2, verbose=0,\n"
        "          callbacks=[hvdtrain.StepLog(5), Slow(0.1)])\n"
    )
    raw = _run_on_terminal(mpirun(2, [*forked_python, "-c", program]), tmp_path)
    assert re.search(r"epoch 1/2 \[=+\.*\] \d/7", raw)
    kinds = ["step 5", "epoch 1/2", "step 10", "epoch 2/2"]
    assert [_kind(line) for line in _render(raw) if line] == kinds


@pytest.mark.mpi
def test_the_chief_draws_on_the_terminal_of_hvdtrain_run(
    forked_python: list[str], tmp_path: Path
) -> None:
    # The bar is below the lines of all ranks, even though their output is a pipe.
    script = tmp_path / "train.py"
    script.write_text(
        FIT + "hvdtrain.init()\n"
        "hvdtrain.distribute(model)\n"
        "print(f'rank {hvdtrain.rank()} begins')\n"
        "model.fit(x, y, batch_size=8, epochs=2, verbose=0,\n"
        "          callbacks=[hvdtrain.StepLog(5), Slow(0.1)])\n"
    )
    run = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--", *forked_python, str(script)]
    raw = _run_on_terminal(run, tmp_path)
    bar = r"epoch 2/2 \[=+\.*\] \d/7 loss = \d\.\d\d, ETA \d+ s, \d+ samples/s"
    assert re.search(bar, raw)
    lines = [line for line in _render(raw) if line]
    assert {"[0] rank 0 begins", "[1] rank 1 begins"} < set(lines)
    own = [line.removeprefix("[0] ") for line in lines if "step" in line or "epoch" in line]
    assert [_kind(line) for line in own] == ["step 5", "epoch 1/2", "step 10", "epoch 2/2"]


def _kind(line: str) -> str:
    """Return the first part of a line, which must be a complete line of ``StepLog``."""
    assert STEP.fullmatch(line) or EPOCH.fullmatch(line), repr(line)
    return line.split(",")[0] if line.startswith("step") else line.split(":")[0]


def _run_on_terminal(argv: list[str], folder: Path) -> str:
    """Run a program with a terminal as standard output, and return its output."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=subprocess.DEVNULL,
        env=clean_environment({"COLUMNS": None, "TERM": "xterm"}),
        cwd=folder,
    )
    os.close(side)
    parts = []
    with contextlib.suppress(OSError):  # raised at the end of a terminal's output
        while part := os.read(main, 65536):
            parts.append(part)
    os.close(main)
    assert process.wait(60) == 0
    return b"".join(parts).decode()


def _render(text: str) -> list[str]:
    """Return the lines on the screen after carriage returns, backspaces and erasures."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n", re.sub(r"\x1b\[[0-9;]*m", "", text)):
        line = lines[-1]
        if token == "\n":
            lines.append("")
            column = 0
        elif token == "\r":
            column = 0
        elif token == "\b":
            column = max(0, column - 1)
        elif token.startswith("\x1b"):
            assert token == "\x1b[K", repr(token)
            lines[-1] = line[:column]
        else:
            lines[-1] = line.ljust(column)[:column] + token + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
