"""Training with slow and full disks."""

from __future__ import annotations

import os
import sys
import textwrap

import pytest

from hvdtrain.checkpoint import Store
from tests.checkpoint.disks import remount
from tests.checkpoint.samples import saved_steps, snapshot

# 300,000 parameters, with Adam's state about 3.6 MB.
TRAINING = """
    import os, sys, time
    import keras, numpy as np
    import hvdtrain

    hvdtrain.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(1000)])
    model.compile("adam", "mse")
    hvdtrain.distribute(model)
    directory, every, on_error = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # The steps in which another program fills the disk and frees it again.
    fills, frees = ((20, 60), (40, 80)) if "filled" in sys.argv else ((), ())

    def fill(path):
        with open(path, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    class Watch(keras.callbacks.Callback):
        steps = 0
        while_writing = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            names = os.listdir(directory) if hvdtrain.is_chief() else []
            self.while_writing += any(name.startswith(".writing") for name in names)
            if hvdtrain.is_chief() and self.steps in fills:
                fill(directory + "/filler")
            if hvdtrain.is_chief() and self.steps in frees:
                os.unlink(directory + "/filler")
            time.sleep(0.01)

    watch = Watch()
    checkpoint = hvdtrain.Checkpoint(directory, every_steps=every, keep=1, on_error=on_error)
    x = np.ones((800, 300), "float32")
    y = np.ones((800, 1000), "float32")
    size = 8 // hvdtrain.size()
    model.fit(x, y, batch_size=size, verbose=0, callbacks=[watch, checkpoint])
    if hvdtrain.is_chief():
        print(watch.steps, "steps,", watch.while_writing, "while writing")
"""


IN_USE = """
    import sys
    import keras, numpy as np
    import hvdtrain
    from hvdtrain.trainer.saving import training_progress

    training_progress.LOCK_TIMEOUT_S = 0.3
    hvdtrain.init()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    hvdtrain.distribute(model)
    try:
        model.fit(np.ones((4, 3)), np.ones((4, 1)), callbacks=[hvdtrain.Checkpoint(sys.argv[1])])
    except hvdtrain.CheckpointError as error:
        print(hvdtrain.rank(), error)
"""


def test_a_second_job_in_a_folder_is_an_error_on_all_ranks(launch, tmp_path):
    store = Store(tmp_path / "runs")
    store.write(snapshot(0, step=0))
    done = launch(2, IN_USE, str(tmp_path / "runs"))
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert f"process {os.getpid()} on host" in line
    assert "Waiting up to 0.3 s" in done.stderr
    assert saved_steps(tmp_path / "runs") == [0]


def test_training_continues_while_a_slow_disk_writes(launch, slow_disk):
    """A write takes about two seconds."""
    done = launch(2, TRAINING, str(slow_disk), "20", "warn", timeout_s=120)
    assert done.returncode == 0, done.stderr
    steps, while_writing = (int(word) for word in done.stdout.split() if word.isdecimal())
    assert steps == 100
    assert while_writing >= 10
    assert saved_steps(slow_disk) == [100]


def test_a_full_disk_is_logged_once(launch, small_disk):
    done = launch(2, TRAINING, str(small_disk), "10", "warn", timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no checkpoint could be saved; training continues") == 1
    assert "No space left" in done.stderr
    assert done.stdout.startswith("100 steps")


def test_a_disk_that_fills_again_is_logged_again(launch, small_disk):
    remount(small_disk, "size=16m")
    done = launch(2, TRAINING, str(small_disk), "10", "warn", "filled", timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no checkpoint could be saved; training continues") == 2, done.stderr
    assert saved_steps(small_disk) == [100]


def test_a_full_disk_is_an_error_on_request(launch, small_disk):
    done = launch(2, TRAINING, str(small_disk), "10", "raise", timeout_s=120)
    assert done.returncode == 1
    for rank in range(2):
        assert f"hvdtrain: rank {rank} of 2 failed: CheckpointError" in done.stderr
    assert "No space left" in done.stderr


# Each file has 10 MB, so writing it takes longer than the time-out.
SLOW = """
    import sys
    import keras, numpy as np
    import hvdtrain

    hvdtrain.init()
    folder = sys.argv[1]
    model = keras.Sequential([keras.Input((1100,)), keras.layers.Dense(800)])
    model.compile("adam", "mse")
    hvdtrain.distribute(model)
    x, y = np.ones((16, 1100), "float32"), np.ones((16, 800), "float32")
    export = folder + "/export.keras"
    checkpoint = hvdtrain.Checkpoint(folder + "/checkpoints", export=export)
    callbacks = [checkpoint, keras.callbacks.ModelCheckpoint(folder + "/callback.keras")]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks)
    print("rank", hvdtrain.rank(), "has trained", flush=True)
    if hvdtrain.is_chief():
        model.save(folder + "/end.keras")
"""


@pytest.mark.mpi
@pytest.mark.more
def test_ranks_wait_for_the_chief_longer_than_the_time_out(
    run_command, forked_python, slow_disk, tmp_path
):
    (tmp_path / "script.py").write_text(textwrap.dedent(SLOW))
    launcher = [sys.executable, "-m", "hvdtrain", "run", "-np", "2", "--timeout-s", "4", "--"]
    program = [*forked_python, str(tmp_path / "script.py"), str(slow_disk)]
    done = run_command([*launcher, *program], timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 has trained" in done.stdout
    assert "rank 1 has trained" in done.stdout
    assert "in barrier(the chief saves) for rank 0" in done.stderr
    assert "has ended its program and waits for rank 0" in done.stderr
    assert saved_steps(slow_disk / "checkpoints") == [2]
    for name in ("callback", "export", "end"):
        assert (slow_disk / f"{name}.keras").stat().st_size > 10_000_000
