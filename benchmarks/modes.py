"""Compare the accuracy and speed of all modes, also with a slow worker.

    python benchmarks/modes.py
    python benchmarks/modes.py --modes allreduce local-sgd diloco

Three workers train on handwritten digits with the network of examples/mnist.py and SGD. Then each
step sleeps instead of computing, so that workers on shared cores have independent speeds: once all
equal, and once with one worker four times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

WORKERS = 3
JOB_TIMEOUT_S = 1800.0
LOCAL = ("--mode", "local-sgd", "--sync-every", "50")
# Label, number of servers, and flags of `hvdtrain run`.
MODES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "allreduce": ("allreduce", 0, ()),
    "async-ps": ("async-ps", 1, ("--mode", "async-ps")),
    "overlap": ("async-ps, overlap", 1, ("--mode", "async-ps", "--overlap")),
    "bounded": ("async-ps, bound 4", 1, ("--mode", "async-ps", "--staleness-bound", "4")),
    "sync-ps": ("sync-ps", 1, ("--mode", "sync-ps")),
    "backup": ("sync-ps, 1 backup worker", 1, ("--mode", "sync-ps", "--backup-workers", "1")),
    "local-sgd": ("local-sgd, every 50th step", 0, LOCAL),
    "diloco": (
        "local-sgd, DiLoCo",
        0,
        (*LOCAL, "--outer-learning-rate", "0.7", "--outer-momentum", "0.9"),
    ),
}
EPOCHS = 15
BATCH_SIZE = 32
LEARNING_RATE = 0.005
STEP_S = 0.1
STEPS = 60
TIMES_SLOWER = 4
# Steps before timing starts.
WARMUP_STEPS = 5


def main() -> None:
    """Run all modes and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES], help="default: all")
    parser.add_argument("--rank", nargs=2, metavar=("WHAT", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        what, folder = arguments.rank
        results = learn_digits() if what == "digits" else keep_pace(slow=what == "slow")
        if results:
            Path(folder, f"{os.getpid()}.json").write_text(json.dumps(results))
        return
    print("| mode | accuracy | seconds | bytes reduced per rank | speed with a slow worker |")
    print("|---|---|---|---|---|")
    for name in arguments.modes:
        label, servers, _ = MODES[name]
        (chief,) = train(name, "digits")
        # Servers and workers exchange gradients without a reduction.
        reduced = "" if servers else f"{chief['bytes'] / 1e6:.1f} MB"
        cells = [f"{chief['accuracy']:.2%}", f"{chief['seconds']:.1f}", reduced]
        own, others = (
            mean(rank["steps_per_s"] for rank in train(name, pace) if not rank["slow"])
            for pace in ("alike", "slow")
        )
        print(f"| {label} | {' | '.join(cells)} | {others / own:.0%} |", flush=True)


def train(name: str, what: str) -> list[dict[str, Any]]:
    """Run this program in a mode, and return the results of its ranks."""
    _, servers, flags = MODES[name]
    examples = Path(__file__).resolve().parents[1] / "examples"
    path = os.pathsep.join([str(examples), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "hvdtrain", "run", "-np", str(WORKERS + servers), *flags]
        argv += ["--", sys.executable, __file__, "--rank", what, folder]
        done = subprocess.run(
            argv,
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{done.stdout}\n{name} failed with exit code {done.returncode}")
        return [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]


def learn_digits() -> dict[str, float]:
    """Train on digits, and return the results on the chief."""
    import keras
    from mnist import build_model
    from mnist_data import load_digits

    import hvdtrain
    from hvdtrain import world

    hvdtrain.init()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    model = build_model()
    rate = hvdtrain.scale_learning_rate(LEARNING_RATE)
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    hvdtrain.distribute(model)
    images, labels = digits.train_images[..., None], digits.train_labels
    test = digits.test_images[..., None], digits.test_labels
    engine = world.collectives()
    before, start_s = engine.reduced_bytes, time.perf_counter()
    model.fit(images, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, validation_data=test, verbose=0)
    results = {"seconds": time.perf_counter() - start_s, "bytes": engine.reduced_bytes - before}
    results["accuracy"] = model.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
    return results if hvdtrain.is_chief() else {}


def keep_pace(*, slow: bool) -> dict[str, float]:
    """Train with steps that sleep, and return this worker's steps per second."""
    import keras

    import hvdtrain
    from hvdtrain.bench.models import synthetic_data

    hvdtrain.init()
    is_slow = slow and hvdtrain.rank() == WORKERS - 1
    step_s = STEP_S * (TIMES_SLOWER if is_slow else 1)
    ends_s: list[float] = []
    pace = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: time.sleep(step_s),
        on_train_batch_end=lambda batch, logs: ends_s.append(time.perf_counter()),
    )
    model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(1e-3), loss="mse")
    hvdtrain.distribute(model)
    x, y = synthetic_data(model, BATCH_SIZE * STEPS * hvdtrain.size())
    model.fit(x, y, batch_size=BATCH_SIZE, verbose=0, callbacks=[pace])
    if len(ends_s) <= WARMUP_STEPS:  # a server
        return {}
    seconds = ends_s[-1] - ends_s[WARMUP_STEPS - 1]
    return {"steps_per_s": (len(ends_s) - WARMUP_STEPS) / seconds, "slow": is_slow}


if __name__ == "__main__":
    main()
