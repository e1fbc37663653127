"""The servers' logs: one process that repeats the logged updates gets the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.served import replayed
from tests.trainer.served.programs import servers

PROGRAM = Path(replayed.__file__)


class Server:
    """A server's variables, one after another, with a plain optimizer.

    Args:
        log: The log that the server has written.
        initial: The first weights by name.
    """

    def __init__(self, log: Path, initial: dict[str, np.ndarray]) -> None:
        header, *lines = map(json.loads, log.read_text().splitlines())
        assert header["workers"] == list(range(replayed.WORKERS))
        self.pieces = header["pieces"]
        self.updates = [line for line in lines if "version" in line]
        self.gradients = [line["late"] for line in lines if "late" in line]
        for update in self.updates:
            self.gradients += update["gradients"]
        self.held = keras.Variable(self.cut(initial), dtype="float64")
        self.optimizer = replayed.make_model().optimizer
        self.optimizer.build([self.held])
        # Version 0 is before the chief has loaded weights.
        self.versions = [np.empty(0), self.held.numpy().copy()]

    def cut(self, whole: dict[str, np.ndarray]) -> np.ndarray:
        """Return this server's part of the weights."""
        parts = [whole[path].reshape(-1)[start:stop] for path, start, stop in self.pieces]
        return np.concatenate(parts)

    def put(self, version: int, whole: dict[str, np.ndarray]) -> None:
        """Assign this server's part of a version of the weights."""
        values = self.versions[version]
        for path, start, stop in self.pieces:
            whole[path].reshape(-1)[start:stop] = values[: stop - start]
            values = values[stop - start :]

    def apply(self, update: dict[str, Any], gradients: list[dict[str, np.ndarray]]) -> None:
        weights = [entry["weight"] for entry in update["gradients"]]
        mean = np.average([self.cut(gradient) for gradient in gradients], axis=0, weights=weights)
        assert update["version"] == len(self.versions)
        for entry in update["gradients"]:
            assert update["staleness"] == update["version"] - 1 - entry["version"]
        self.optimizer.learning_rate = np.float32(update["learning_rate"])
        self.optimizer.apply([tf.constant(mean)], [self.held])
        self.versions.append(self.held.numpy().copy())


class Replay:
    """All servers' updates in one process."""

    def __init__(self, folder: Path, count: int) -> None:
        self.model = replayed.make_model()
        self.names = [variable.path for variable in self.model.trainable_variables]
        with np.load(folder / "before.npz") as before:
            initial = dict(zip(self.names, before.values()))
        logs = [folder / f"server-{replayed.WORKERS + number}.jsonl" for number in range(count)]
        self.servers = [Server(log, initial) for log in logs]
        self.versions: dict[tuple[int, int], list[int]] = {}  # worker and step; versions by server
        for server in self.servers:
            for entry in server.gradients:
                self.versions.setdefault(_key(entry), []).append(entry["version"])

    def run(self) -> None:
        """Make each update as soon as the weights of its gradients are known."""
        left = {server: list(server.updates) for server in self.servers}
        while any(left.values()):
            ready = [
                server for server in self.servers if left[server] and self._ready(left[server])
            ]
            assert ready, "no order of the updates has all weights that are needed"
            for server in ready:
                update = left[server].pop(0)
                keys = [_key(entry) for entry in update["gradients"]]
                server.apply(update, [self._gradient(*key) for key in keys])

    def _ready(self, updates: list[dict[str, Any]]) -> bool:
        return bool(updates) and all(
            version < len(server.versions)
            for entry in updates[0]["gradients"]
            for server, version in zip(self.servers, self.versions[_key(entry)], strict=True)
        )

    def _gradient(self, worker: int, step: int) -> dict[str, np.ndarray]:
        weights = {v.path: np.empty(v.shape) for v in self.model.trainable_variables}
        for server, version in zip(self.servers, self.versions[worker, step], strict=True):
            server.put(version, weights)
        for variable in self.model.trainable_variables:
            variable.assign(weights[variable.path])
        x, y = replayed.batch_of(worker, step)
        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(y=tf.constant(y), y_pred=self.model(x, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        return {name: gradient.numpy() for name, gradient in zip(self.names, gradients)}


def _key(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["worker"], entry["step"]


@pytest.mark.parametrize(
    ("mode", "count", "settings"),
    [
        ("async-ps", 2, {}),
        ("async-ps", 2, {"overlap": 1}),
        ("sync-ps", 2, {"backup_workers": 1}),
    ],
)
def test_one_process_makes_the_same_updates(launch, tmp_path, mode, count, settings):
    """Servers apply gradients in different orders.

    The gradients are computed with weights of several versions.
    """
    env = servers(mode, count, update_log=tmp_path, **settings)
    done = launch(replayed.WORKERS + count, PROGRAM, str(tmp_path), timeout_s=100, env=env)
    assert done.returncode == 0
    replay = Replay(tmp_path, count)
    gradients = replayed.WORKERS * replayed.STEPS * replayed.EPOCHS
    for server in replay.servers:
        assert len(server.gradients) == gradients
        if mode == "async-ps":
            assert len(server.updates) == gradients
            assert max(update["staleness"] for update in server.updates) >= 2
    replay.run()
    with np.load(tmp_path / "after.npz") as after:
        values = list(after.values())
    variables = len(replay.names)
    for server in replay.servers:
        weights = dict(zip(replay.names, values[:variables]))
        momentums = dict(zip(replay.names, values[variables:], strict=True))
        np.testing.assert_allclose(server.held.numpy(), server.cut(weights), rtol=0, atol=1e-9)
        momentum = server.optimizer.momentums[0].numpy()
        np.testing.assert_allclose(momentum, server.cut(momentums), rtol=0, atol=1e-9)
