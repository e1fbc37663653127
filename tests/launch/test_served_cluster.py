"""Training with parameter servers on separate hosts, over ssh and under Slurm."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launch.jobs import HVDTRAIN, ON_CLUSTER
from tests.testbed.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

PROGRAM = """
import os
import signal
import socket
import sys
from pathlib import Path

import keras
import numpy as np

import hvdtrain
from hvdtrain import world

folder = sys.argv[1]
may_die = folder and not Path(folder, "died").exists()


class Die(keras.callbacks.Callback):
    # Worker 1 dies in the first attempt.
    def on_epoch_begin(self, epoch, logs=None):
        if may_die and world.collectives().rank == 1 and epoch == 1:
            Path(folder, "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


hvdtrain.init()
keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(240, 6)).astype("float32")
y = x @ np.arange(6, dtype="float32")[:, np.newaxis]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
hvdtrain.distribute(model)
model.fit(x, y, batch_size=8, epochs=6, verbose=0, callbacks=[Die()])
serves = world.collectives().member in world.roles().servers
role = "serves" if serves else "trains"
print(socket.gethostname(), role, f"{model.evaluate(x, y, verbose=0):.4f}", flush=True)
"""


@pytest.mark.parametrize(("way", "mode"), [("ssh", "async-ps"), ("slurm", "sync-ps")])
def test_servers_on_separate_hosts(
    cluster: Cluster, forked_python: list[str], way: str, mode: str
) -> None:
    program = Path(cluster.folder, "served.py")
    program.write_text(PROGRAM)
    words = ["--mode", mode, "--num-ps", "2"]
    start = ["salloc", "--quiet", "--nodes=4", "--ntasks=4", "--overcommit"]
    if way == "ssh":
        tasks = {"worker": ["node1:2222", "node2:2222"], "ps": ["node3:2222", "node4:2222"]}
        Path(cluster.folder, "cluster.json").write_text(json.dumps(tasks))
        words = ["--mode", mode, "--cluster", f"{cluster.folder}/cluster.json"]
        start = []
    argv = [*start, *HVDTRAIN, *words, "--", *forked_python, str(program), ""]
    done = cluster.run(argv, env=ON_CLUSTER, timeout_s=200)
    assert done.returncode == 0, done
    assert "2 workers sent 180 gradients" in done.stderr, done
    lines = sorted(line for line in done.stdout.splitlines() if " node" in line)
    roles = [re.sub(r"^\[\d node\d\] | [\d.]+$", "", line) for line in lines]
    assert roles == ["node1 trains", "node2 trains", "node3 serves", "node4 serves"], done
    losses = {float(line.split()[-1]) for line in lines}
    assert len(losses) == 1, "all ranks have the same weights"
    assert losses.pop() < 0.5, done


@pytest.mark.parametrize("way", ["ssh", "slurm"])
def test_a_worker_that_dies_on_another_host(
    cluster: Cluster, forked_python: list[str], way: str
) -> None:
    """Over ssh, other workers continue. Under Slurm, srun ends all ranks, so the job restarts."""
    program, folder = Path(cluster.folder, "served.py"), Path(cluster.folder, f"dies-{way}")
    program.write_text(PROGRAM)
    folder.mkdir()
    words = ["--mode", "async-ps", "--num-ps", "1", "--max-restarts", "1"]
    start = ["salloc", "--quiet", "--nodes=4", "--ntasks=4", "--overcommit"]
    if way == "ssh":
        words = ["--mode", "async-ps", "-H", "node1,node2,node3,node4", "--ps-ranks", "3"]
        start = []
    argv = [*start, *HVDTRAIN, *words, "--", *forked_python, str(program), str(folder)]
    done = cluster.run(argv, env=ON_CLUSTER, timeout_s=200)
    assert done.returncode == 0, done
    hosts = re.findall(r"(node\d) (?:trains|serves)", done.stdout)
    if way == "ssh":
        assert "rank 1 on node2 was lost (SIGKILL)" in done.stderr, done
        assert sorted(hosts) == ["node1", "node3", "node4"], done
    else:
        assert "attempt 2 of 2 starts" in done.stderr, done
        assert sorted(hosts) == ["node1", "node2", "node3", "node4"], done
