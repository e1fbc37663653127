"""Helpers for test programs with parameter servers, and for their output."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

from tests.harness.jobs import Completed

__all__ = ["program", "reports", "servers"]

_PRELUDE = """
    import json
    import os
    import sys
    import time
    from pathlib import Path

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain
    from hvdtrain import world

    hvdtrain.init()
    keras.utils.set_random_seed(3)
    RANK = world.collectives().rank
    IS_SERVER = RANK in world.roles().servers
    LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(480, 8)).astype("float32")
    Y = (X @ rng.normal(size=(8, 3))).argmax(1)


    def classifier(optimizer, *layers, **options):
        inner = layers or (keras.layers.Dense(16, "relu"), keras.layers.Dense(3))
        model = keras.Sequential([keras.Input((8,)), *inner])
        options.setdefault("metrics", ["accuracy"])
        model.compile(optimizer, options.pop("loss", LOSS), **options)
        return hvdtrain.distribute(model)


    def embedding(optimizer):
        layers = [keras.Input((8,), dtype="int32"), keras.layers.Embedding(9, 4),
                  keras.layers.Flatten(), keras.layers.Dense(3)]
        return compiled(keras.Sequential(layers), optimizer)


    def compiled(model, optimizer, **options):
        model.compile(optimizer, LOSS, **options)
        return model


    def report(what, **values):
        # A single write, so that lines of several ranks are not mixed.
        os.write(1, (json.dumps({"what": what, "rank": RANK, **values}) + "\\n").encode())


    def like_chief(model):
        values = [np.asarray(variable.numpy()) for variable in model.weights]
        broadcast = world.collectives().broadcast
        chiefs = [broadcast(value.copy(), name="the chief's") for value in values]
        return all(np.array_equal(*pair) for pair in zip(values, chiefs))


    def wait_for(name):
        # The harness has a time-out.
        while not Path(name).exists():
            time.sleep(0.02)


    class Seen(keras.callbacks.Callback):
        \"\"\"Stores the weights after each epoch.\"\"\"

        def __init__(self):
            super().__init__()
            self.weights = []

        def on_epoch_end(self, epoch, logs=None):
            self.weights.append([v.numpy() for v in self.model.trainable_variables])


    class At(keras.callbacks.Callback):
        \"\"\"Calls functions before and after each batch.\"\"\"

        def __init__(self, begin=None, end=None):
            super().__init__()
            self.begin, self.end = begin, end

        def on_train_batch_begin(self, batch, logs=None):
            if self.begin:
                self.begin(batch)

        def on_train_batch_end(self, batch, logs=None):
            if self.end:
                self.end(batch)

"""


def program(text: str) -> str:
    """Return a program with common imports and helpers before ``text``."""
    return textwrap.dedent(_PRELUDE) + textwrap.dedent(text)


def servers(mode: str, count: int = 1, **settings: Any) -> dict[str, str]:
    """Return the environment of a job with ``count`` parameter servers."""
    others = {f"HVDTRAIN_{name.upper()}": str(value) for name, value in settings.items()}
    return {"HVDTRAIN_MODE": mode, "HVDTRAIN_NUM_PS": str(count), **others}


def reports(done: Completed, what: str) -> list[dict[str, Any]]:
    """Return the values that ranks passed to ``report``, in the order of ranks."""
    # ``hvdtrain run`` puts the rank before each line.
    lines = re.findall(r"^(?:\[\d+\] )?(\{.*\})$", done.stdout, re.M)
    entries = [entry for entry in map(json.loads, lines) if entry.pop("what") == what]
    return sorted(entries, key=lambda entry: entry["rank"])
