"""Workers that die or fall silent: the others and the servers go on, and nothing else is lost."""

from __future__ import annotations

import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.keras.served.programs import facts, program, servers
from tests.keras.served.test_worker_checkpoints import COUNTING, PRELUDE
from tests.launch.jobs import HVDTRAIN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

# Worker 1 of three dies before one of its steps; everything of those before has been answered.
EXACT = program("""
    import signal

    keras.config.set_floatx("float64")
    x, y = X[:432].astype("float64"), rng.normal(size=(432, 1))
    LOST, STEPS, BATCH = 4, 18, 8


    def die(batch):
        if RANK == 1 and batch == LOST:
            os.kill(os.getpid(), signal.SIGKILL)


    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(0.0625, momentum=0.875), "mse")
    weights = model.get_weights()[0]
    hvdtrain.distribute(model)
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=1, callbacks=[At(begin=die)], **options)
    velocity = np.zeros_like(weights)


    def step(samples):
        global weights, velocity
        error = x[samples] @ weights - y[samples]
        velocity = 0.875 * velocity - 0.0625 * 2 * x[samples].T @ error / len(samples)
        weights = weights + velocity


    def share(rank, step, ranks):
        first = (step * ranks + rank) * BATCH
        return range(first, first + BATCH)


    for number in range(STEPS):
        step([s for w in (0, 1, 2) if w != 1 or number < LOST for s in share(w, number, 3)])
    first = float(np.abs(model.get_weights()[0] - weights).max())
    # The data are shared out among two from now on.
    model.fit(x, y, epochs=1, **options)
    for number in range(len(x) // (2 * BATCH)):
        step([s for w in (0, 1) for s in share(w, number, 2)])
    second = float(np.abs(model.get_weights()[0] - weights).max())
    tell("errors", first=first, second=second)
""")


@pytest.fixture
def start(run_command: Any, tmp_path: Path, forked_python: list[str]) -> Any:
    """Start a program in an elastic job of ``hvdtrain run``."""

    def run(text: str, mode: str, ranks: int, *arguments: str, **settings: Any) -> Any:
        script = tmp_path / "program.py"
        script.write_text(text)
        argv = [*HVDTRAIN, "-np", str(ranks), "--elastic", "--grace-s", "2"]
        command = [*argv, "--", *forked_python, str(script), *arguments]
        return run_command(command, timeout_s=200, env=servers(mode, **settings))

    return run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"mode": "sync-ps", "count": 2}, id="sync-ps"),
        pytest.param({"mode": "async-ps", "count": 1, "staleness_bound": 0}, id="bound 0"),
    ],
)
def test_steps_without_one_are_those_of_fewer_workers(start, settings):
    ranks = 3 + settings["count"]
    done = start(EXACT, settings.pop("mode"), ranks, **settings)
    assert done.returncode == 0, done
    told = facts(done, "errors")
    assert [entry["rank"] for entry in told] == [rank for rank in range(ranks) if rank != 1]
    for entry in told:
        assert entry["first"] < 1e-12, told
        assert entry["second"] < 1e-12, told
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


    model = classifier(keras.optimizers.Adam(0.01))
    if RANK == who:
        threading.Thread(target=die, daemon=True).start()
    for number in range(2):
        callbacks = [At(begin=begin)]
        if folder:
            callbacks.append(hvdtrain.Checkpoint(f"{folder}/{number}", every_steps=3))
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        accuracy = model.evaluate(X, Y, verbose=0)[1]
        tell("fit", like=like_chief(model), members=len(world.collectives().members))
    tell("end", accuracy=accuracy)
""")


# Ways of each mode, of which one is drawn.
MODES = {
    "async-ps": [({}, True), ({"staleness_bound": 1}, False)],
    "sync-ps": [({}, True), ({"backup_workers": 1}, False)],
}


@pytest.mark.parametrize("mode", MODES)
def test_any_moment(start, tmp_path, mode):
    """Also while weights travel, a snapshot is taken, all evaluate, or the last has ended."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    settings, saves = chance.choice(MODES[mode])
    folder = str(tmp_path / "checkpoints") if saves else ""
    who, after_s = chance.choice([1, 2]), chance.uniform(0, 2)
    done = start(ANY_MOMENT, mode, 5, str(who), str(after_s), folder, count=2, **settings)
    assert done.returncode == 0, done
    left = [rank for rank in range(5) if rank != who]
    told = facts(done, "end")
    assert [entry["rank"] for entry in told if entry["rank"] != who] == left, done
    assert len({entry["accuracy"] for entry in told}) == 1
    assert told[0]["accuracy"] > 0.7
    fits = facts(done, "fit")
    assert all(entry["like"] for entry in fits)
    if len(told) == 4:
        assert re.search(rf"rank {who} on .* was lost \(SIGKILL\)", done.stderr)


LEFT_OUT = program(
    PRELUDE
    + COUNTING
    + """
    again = Path("checkpoints").exists()
    world.collectives().barrier(name="all have looked")


    def die():
        os.kill(os.getpid(), signal.SIGKILL)


    # While the others are in the second epoch, at its fourth step.
    callbacks = [] if again or RANK != 1 else [at_step(12, die)]
    model = counting()
    model.fit(
        **arrays, epochs=3, verbose=0, callbacks=[*callbacks, hvdtrain.Checkpoint("checkpoints")]
    )
    tell("seen", counts=np.unique(model.seen.numpy()).tolist())
"""
)


def test_resuming_makes_up_for_what_was_left_out(start, tmp_path):
    """With the two workers that were left, or three again."""
    done = start(LEFT_OUT, "async-ps", 4)
    assert done.returncode == 0, done
    assert facts(done, "seen") == [{"rank": rank, "counts": [1.0, 2.0, 3.0]} for rank in (0, 2, 3)]
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "kept")
    for ranks in (3, 4):
        done = start(LEFT_OUT, "async-ps", ranks)
        assert done.returncode == 0, done
        assert facts(done, "seen") == [{"rank": rank, "counts": [3.0]} for rank in range(ranks)]
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.copytree(tmp_path / "kept", tmp_path / "checkpoints")


VITAL = program("""
    import signal
    import threading

    from hvdtrain.checkpoint import Store

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
        # One may lie there before the launcher has been told of it, but not two.
        if RANK == 0 and not again and len(Store(folder).steps()) > 1:
            sign.touch()
            time.sleep(60 if who == 0 else 0)


    callbacks = [At(begin=begin), hvdtrain.Checkpoint(folder, every_steps=5)]
    model.fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=callbacks)
    tell("end", again=again)
""")


@pytest.mark.parametrize(
    ("who", "what", "restarts"), [(3, "a parameter server", 0), (0, "the chief", 1)]
)
def test_who_can_not_be_done_without(run_command, forked_python, tmp_path, who, what, restarts):
    """The job ends with the documented code, and says how it goes on; or it does so by itself."""
    script, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    script.write_text(VITAL)
    argv = [*HVDTRAIN, "-np", "4", "--elastic", "--max-restarts", str(restarts), "--grace-s", "2"]
    command = [*argv, "--", *forked_python, str(script), str(who), str(folder)]
    done = run_command(command, timeout_s=200, env=servers("async-ps"))
    assert f"rank {who} on " in done.stderr
    assert f", {what}, failed first: ended by signal 9 (SIGKILL)" in done.stderr
    if restarts:
        assert done.returncode == 0, done
        assert re.search(r"attempt 2 of 2 starts .* since the checkpoint of step \d+", done.stderr)
        assert "resuming from the checkpoint of step" in done.stderr
        assert [entry["again"] for entry in facts(done, "end")] == [True] * 4
    else:
        assert done.returncode == 137, done
        assert re.search(r"newest checkpoint is of step \d+; the next start goes on", done.stderr)
        assert facts(done, "end") == []


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
            # Workers 0 and 2 have made this epoch's steps without it.
            if RANK == 0 and epoch == 0:
                tell("epoch without one")
                os.kill(PIDS[1], signal.SIGCONT)


    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[At(begin=stop), Wake()])
    tell("end", like=like_chief(model))
""")


@pytest.mark.parametrize(
    ("mode", "settings"), [("sync-ps", {}), ("async-ps", {"staleness_bound": 2})]
)
def test_nobody_waits_for_who_says_nothing(launch, mode, settings):
    """Under any MPI, and without --elastic; what it sends when it is back is taken, or too late."""
    environment = servers(mode, worker_timeout_s=4, **settings)
    done = launch(4, SILENT, timeout_s=120, env=environment)
    assert done.returncode == 0
    assert len(facts(done, "epoch without one")) == 1
    assert [entry["like"] for entry in facts(done, "end")] == [True] * 4
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
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGSTOP)


    model = classifier(keras.optimizers.SGD(0.1))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[At(begin=stop)])
    tell("end", like=like_chief(model))
""")


def test_a_worker_that_hangs_is_ended(run_command, tmp_path):
    """Then the others go on as without one that died."""
    script = tmp_path / "program.py"
    script.write_text(HANGS)
    argv = [*HVDTRAIN, "-np", "3", "--hang-timeout-s", "5"]
    command = [*argv, "--", sys.executable, str(script)]
    done = run_command(command, timeout_s=200, env=servers("sync-ps"))
    assert done.returncode == 0, done
    # Stopped while it took an answer, it would keep a server waiting, and so the others.
    went_on = r"has done no step for \d+ s, while others go on"
    waited = r"keeps the others waiting \(it is stopped \(state T\)\)"
    assert re.search(rf"rank 1 on \S+ ({went_on}|{waited}): it is killed", done.stderr)
    assert re.search(
        r"rank 1 on \S+ was lost \(SIGKILL\) after step \d; 2 ranks go on", done.stderr
    )
    told = [(entry["rank"], entry["like"]) for entry in facts(done, "end")]
    assert told == [(0, True), (2, True)]


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
        # Those that end at once don't take away the time of one that needs some.
        time.sleep(2 if RANK == 2 else 0)
        tell("too few", text=str(error))
        raise
""")


def test_too_few(run_command, forked_python, tmp_path):
    """What there is is saved, and the job ends as the lost rank did."""
    script, folder = tmp_path / "program.py", tmp_path / "checkpoints"
    script.write_text(TOO_FEW)
    argv = [*HVDTRAIN, "-np", "4", "--elastic", "--min-np", "4"]
    command = [*argv, "--", *forked_python, str(script), str(folder)]
    done = run_command(command, timeout_s=200, env=servers("async-ps"))
    assert done.returncode == 137, done
    told = facts(done, "too few")
    assert [entry["rank"] for entry in told] == [0, 2, 3], done
    assert all("3 of 4 ranks are left, rank 1 died" in entry["text"] for entry in told)
    assert re.search(r"newest checkpoint is of step \d+; the next start goes on", done.stderr)
