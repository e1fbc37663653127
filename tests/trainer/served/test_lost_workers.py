"""Workers that die or become silent, and training without them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import HVDTRAIN
from tests.trainer.served.programs import program, reports, servers
from tests.trainer.served.test_worker_checkpoints import COUNTING, PRELUDE

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

# Worker 1 of three dies between two of its steps, and the training is repeated by hand.
EXACT = program("""
    import signal

    keras.config.set_floatx("float64")
    x, y = X[:432].astype("float64"), rng.normal(size=(432, 1))
    DEATH, STEPS, BATCH = 4, 18, 8


    def die(batch):
        if RANK == 1 and batch == DEATH:
            os.kill(os.getpid(), signal.SIGKILL)


    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0625, momentum=0.875), "mse")
    weights = model.get_weights()[0]
    hvdtrain.distribute(model)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=1, callbacks=[At(begin=die)], **options)
    velocity = np.zeros_like(weights)


    def step(workers, number, ranks):
        global weights, velocity
        samples = [s for rank in workers for s in share(rank, number, ranks)]
        error = x[samples] @ weights - y[samples]
        velocity = 0.875 * velocity - 0.0625 * 2 * x[samples].T @ error / len(samples)
        weights = weights + velocity


    def share(rank, step, ranks):
        first = (step * ranks + rank) * BATCH
        return range(first, first + BATCH)


    for number in range(STEPS):
        step((0, 1, 2) if number < DEATH else (0, 2), number, 3)
    first = float(np.abs(model.get_weights()[0] - weights).max())
    # Two workers share the data of the second fit.
    model.fit(x, y, epochs=1, **options)
    for number in range(len(x) // (2 * BATCH)):
        step((0, 1), number, 2)
    second = float(np.abs(model.get_weights()[0] - weights).max())
    report("errors", first=first, second=second)
""")


@pytest.fixture
def start(run_command: Any, tmp_path: Path, forked_python: list[str]) -> Any:
    """Return a function that runs a program in a job of ``hvdtrain run``."""

    def run(
        text: str,
        mode: str,
        ranks: int,
        *arguments: object,
        options: Sequence[str] = ("--elastic",),
        **settings: Any,
    ) -> Any:
        script = tmp_path / "program.py"
        script.write_text(text)
        argv = [*HVDTRAIN, "-np", str(ranks), *options, "--grace-s", "1", "--"]
        command = [*argv, *forked_python, str(script), *map(str, arguments)]
        return run_command(command, timeout_s=200, env=servers(mode, **settings))

    return run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mode": "sync-ps", "count": 2}, id="sync-ps"),
        pytest.param({"mode": "async-ps", "count": 1, "staleness_bound": 0}, id="bound 0"),
    ],
)
def test_steps_after_a_loss_use_the_gradients_of_the_remaining_workers(start, settings):
    ranks = 3 + settings["count"]
    done = start(EXACT, settings.pop("mode"), ranks, **settings)
    assert done.returncode == 0, done
    errors = reports(done, "errors")
    assert [entry["rank"] for entry in errors] == [rank for rank in range(ranks) if rank != 1]
    for entry in errors:
        assert entry["first"] < 1e-12, errors
        assert entry["second"] < 1e-12, errors
    assert re.search(r"rank 1 on .* was lost \(SIGKILL\)", done.stderr)


ANY_MOMENT = program("""
    import signal
    import threading

    who, after_s, folder = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]


    def die():
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)


    def begin(batch):
        time.sleep(0.005)


    model = classifier(keras.optimizers.Adam(0.03))
    if RANK == who:
        threading.Thread(target=die, daemon=True).start()
    for number in range(2):
        callbacks = [At(begin=begin)]
        if folder:
            callbacks.append(hvdtrain.Checkpoint(f"{folder}/{number}", every_steps=3))
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
        accuracy = model.evaluate(X, Y, verbose=0)[1]
        report("fit", like=like_chief(model), members=len(world.collectives().members))
    report("end", accuracy=accuracy)
""")


# Settings of each mode, chosen at random, and whether to take checkpoints.
MODES = {
    "async-ps": [({}, True), ({"staleness_bound": 1}, False)],
    "sync-ps": [({}, True), ({"backup_workers": 1}, False)],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_worker_may_die_at_any_time(start, tmp_path, mode):
    """The worker dies during a push, a snapshot or an evaluation, or at the end."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    settings, saves = chance.choice(MODES[mode])
    folder = str(tmp_path / "checkpoints") if saves else ""
    who, after_s = chance.choice([1, 2]), chance.uniform(0, 2)
    done = start(ANY_MOMENT, mode, 5, who, after_s, folder, count=2, **settings)
    assert done.returncode == 0, done
    left = [rank for rank in range(5) if rank != who]
    ends = reports(done, "end")
    assert [entry["rank"] for entry in ends if entry["rank"] != who] == left, done
    assert len({entry["accuracy"] for entry in ends}) == 1
    assert ends[0]["accuracy"] > 0.7
    fits = reports(done, "fit")
    assert all(entry["like"] for entry in fits)
    if len(ends) == 4:
        assert re.search(rf"rank {who} on .* was lost \(SIGKILL\)", done.stderr)


SKIPPED = program(
    PRELUDE
    + COUNTING
    + """
    again = Path("checkpoints").exists()
    world.collectives().barrier(name="looked")


    def die():
        os.kill(os.getpid(), signal.SIGKILL)


    # In the second epoch, at its fourth step.
    callbacks = [] if again or RANK != 1 else [at_step(12, die)]
    model = counting()
    model.fit(
        **arrays, epochs=3, verbose=0, callbacks=[*callbacks, hvdtrain.Checkpoint("checkpoints")]
    )
    report("seen", counts=np.unique(model.seen.numpy()).tolist())
"""
)


def test_a_resumed_training_uses_the_samples_that_a_lost_worker_skipped(start):
    """Training resumes with three workers again."""
    done = start(SKIPPED, "async-ps", 4)
    assert done.returncode == 0, done
    assert reports(done, "seen") == [
        {"rank": rank, "counts": [1.0, 2.0, 3.0]} for rank in (0, 2, 3)
    ]
    done = start(SKIPPED, "async-ps", 4)
    assert done.returncode == 0, done
    assert reports(done, "seen") == [{"rank": rank, "counts": [3.0]} for rank in range(4)]


VITAL = program("""
    import signal
    import threading

    from tests.checkpoint.samples import saved_steps

    who, folder = int(sys.argv[1]), sys.argv[2]
    sign = Path(folder, "there is a checkpoint")
    again = sign.exists()
    world.collectives().barrier()
    model = classifier(keras.optimizers.Adam(0.01))
    if RANK == who and not again:

        def die():
            wait_for(sign)
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=die, daemon=True).start()


    def begin(batch):
        time.sleep(0.02)
        # The launcher knows of the first checkpoint once there is a second one.
        if RANK == 0 and not again and len(saved_steps(folder)) > 1:
            sign.touch()
            time.sleep(60 if who == 0 else 0)


    callbacks = [At(begin=begin), hvdtrain.Checkpoint(folder, every_steps=5)]
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    report("end", again=again)
""")


@pytest.mark.parametrize(
    ("who", "what", "restarts"), [(3, "a parameter server", 0), (0, "the chief", 1)]
)
def test_a_lost_server_or_chief_ends_the_job(start, tmp_path, who, what, restarts):
    """The job ends with the documented exit code and a hint, or it restarts."""
    options = "--elastic", "--max-restarts", str(restarts)
    done = start(VITAL, "async-ps", 4, who, tmp_path / "checkpoints", options=options)
    assert f"rank {who} on " in done.stderr
    assert f", {what}, failed first: killed by signal 9 (SIGKILL)" in done.stderr
    if restarts:
        assert done.returncode == 0, done
        assert re.search(r"attempt 2 of 2 starts .* since the checkpoint of step \d+", done.stderr)
        assert "resuming from the checkpoint of step" in done.stderr
        assert [entry["again"] for entry in reports(done, "end")] == [True] * 4
    else:
        assert done.returncode == 137, done
        assert re.search(r"newest checkpoint is from step \d+; start the job again", done.stderr)
        assert reports(done, "end") == []


SILENT = program("""
    import signal
    import threading

    model = classifier(keras.optimizers.SGD(0.1))
    PIDS = world.collectives().allgather_object(os.getpid(), name="processes")


    left = {5}


    def stop(batch):
        if RANK == 1 and batch in left:
            left.remove(batch)
            os.kill(os.getpid(), signal.SIGSTOP)


    class Wake(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            # Workers 0 and 2 have finished this epoch without it.
            if RANK == 0 and epoch == 0:
                report("epoch without worker 1")
                os.kill(PIDS[1], signal.SIGCONT)


    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[At(begin=stop), Wake()])
    report("end", like=like_chief(model))
""")


def test_workers_and_servers_dont_wait_for_a_silent_worker(launch):
    """This is the case under any MPI, and without --elastic.

    The silent worker's later gradients are dropped because they are too late.
    """
    done = launch(4, SILENT, timeout_s=120, env=servers("sync-ps", worker_timeout_s=4))
    assert done.returncode == 0
    assert len(reports(done, "epoch without worker 1")) == 1
    assert [entry["like"] for entry in reports(done, "end")] == [True] * 4
    lines = [line for line in done.stderr.splitlines() if "rank 1" in line]
    assert lines == [
        "hvdtrain: rank 1 has been silent for 4 s; others no longer wait for it",
        "hvdtrain: rank 1 is back, and others wait for it again",
    ]
    assert "3 workers sent 120 gradients" in done.stderr


HANGS = program("""
    import signal


    def stop(batch):
        if RANK == 1 and batch == 5:
            # A rank reports its step once a second.
            time.sleep(1.5)
            os.kill(os.getpid(), signal.SIGSTOP)


    model = classifier(keras.optimizers.SGD(0.1))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[At(begin=stop)])
    report("end", like=like_chief(model))
""")


def test_a_hanging_worker_is_killed_and_the_others_continue(start):
    options = "--hang-timeout-s", "4"
    done = start(HANGS, "sync-ps", 3, options=options)
    assert done.returncode == 0, done
    # If the worker is stopped while it receives a reply, the server and other workers wait for it.
    others_continue = r"has completed no step for \d+ s"
    waited = r"keeps the others waiting \(not waiting for other ranks\)"
    assert re.search(rf"rank 1 on \S+ ({others_continue}|{waited}); killing it", done.stderr)
    assert re.search(
        r"rank 1 on \S+ was lost \(SIGKILL\) after step \d; 2 ranks continue", done.stderr
    )
    ends = [(entry["rank"], entry["like"]) for entry in reports(done, "end")]
    assert ends == [(0, True), (2, True)]


TOO_FEW = program("""
    import signal
    import time

    def die(batch):
        if RANK == 1 and batch == 3:
            os.kill(os.getpid(), signal.SIGKILL)


    model = classifier(keras.optimizers.SGD(0.1))
    callbacks = [At(begin=die), hvdtrain.Checkpoint(sys.argv[1], every_steps=1000)]
    try:
        model.fit(X, Y, batch_size=8, epochs=50, verbose=0, callbacks=callbacks)
    except hvdtrain.TooFewRanksError as error:
        # The ranks that end first don't shorten the time of the last one.
        time.sleep(1.2 if RANK == 2 else 0)
        report("too few", text=str(error))
        raise
""")


def test_with_too_few_ranks_the_job_saves_and_ends_with_the_lost_ranks_exit_code(start, tmp_path):
    options = "--elastic", "--min-np", "4"
    done = start(TOO_FEW, "async-ps", 4, tmp_path / "checkpoints", options=options)
    assert done.returncode == 137, done
    errors = reports(done, "too few")
    assert [entry["rank"] for entry in errors] == [0, 2, 3], done
    assert all("3 of 4 ranks are left, rank 1 died" in entry["text"] for entry in errors)
    assert re.search(r"newest checkpoint is from step \d+; start the job again", done.stderr)
