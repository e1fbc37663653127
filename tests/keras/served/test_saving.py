"""Checkpoints with parameter servers: one consistent state, and training that goes on from it."""

import pytest

from tests.keras.served.programs import facts, program, servers

PRELUDE = """
    import signal

    from hvdtrain.checkpoint import Store

    PIDS = world.collectives().allgather_object(os.getpid(), name="processes")


    def at_step(step, call):
        \"\"\"A callback that calls after so many steps.\"\"\"
        left = [step]

        def count(batch):
            left[0] -= 1
            if left[0] == 0:
                call()

        return At(end=count)


    def outcome(model, history):
        return {
            "weights": [v.numpy().tobytes().hex() for v in model.weights],
            "optimizer": [v.numpy().tobytes().hex() for v in model.optimizer.variables],
            "epochs": history.epoch,
            "logs": {name: [float(v) for v in values] for name, values in history.history.items()},
            "drawn": float(np.random.rand()),
        }


    def run(seed, make, callbacks, **options):
        \"\"\"What came of a training; the number of the signal where one ended it.\"\"\"
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(seed)
        model = hvdtrain.distribute(make())
        options = {"x": X[:101], "y": Y[:101], "batch_size": 4, "epochs": 3, **options}
        try:
            history = model.fit(verbose=0, callbacks=callbacks, **options)
        except hvdtrain.Preempted as ended:
            return ended.signal
        return outcome(model, history)
"""

EXACT = program(
    PRELUDE
    + """
    def deep():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.4), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"])
        return model


    def momentum():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), LOSS, steps_per_execution=3)
        return model


    def accumulating():
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile(optimizer, LOSS)
        return model


    for make in (deep, momentum, accumulating):
        for victim in range(len(PIDS)):
            folder = f"{make.__name__} {victim}"
            kill = lambda: RANK == 0 and os.kill(PIDS[victim], signal.SIGUSR1)
            whole = run(1, make, [hvdtrain.Checkpoint(folder + " whole", every_steps=4)])
            stopped = run(1, make, [at_step(5, kill), hvdtrain.Checkpoint(folder, every_steps=1)])
            resumed = run(9, make, [hvdtrain.Checkpoint(folder, every_steps=4)])
            parts = whole if hvdtrain.is_chief() else ["weights"]
            off = [name for name in parts if whole[name] != resumed[name]]
            tell("exact", case=folder, stopped=stopped, off=off)
"""
)


@pytest.mark.parametrize(
    ("ranks", "environment"),
    [
        pytest.param(3, servers("sync-ps"), id="sync-ps"),
        pytest.param(4, servers("async-ps", 2, staleness_bound=0), id="bound 0, 2 servers"),
        pytest.param(2, servers("async-ps"), id="one worker"),
    ],
)
def test_resuming_is_exact_where_training_is(launch, ranks, environment):
    """A signal to any rank, a server too, saves and ends all."""
    done = launch(ranks, EXACT, timeout_s=300, env=environment)
    assert done.returncode == 0
    told = facts(done, "exact")
    assert len(told) == ranks * ranks * 3
    for entry in told:
        assert (entry["stopped"], entry["off"]) == (10, []), entry
