import pytest

from tests.trainer.served.programs import program, reports, servers

MISTAKES = """
    def refused(case, call):
        try:
            call()
        except hvdtrain.HvdtrainError as error:
            report("refused", case=case, error=type(error).__name__, text=str(error))


    def average():
        classifier(keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2))

    def norm():
        classifier(keras.optimizers.SGD(global_clipnorm=1.0))

    def batch():
        good.train_on_batch(X[:8], Y[:8])

    def tiny():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
        hvdtrain.distribute(model)

    class Two(keras.Sequential):
        def train_step(self, data):
            raise NotImplementedError

    def two():
        model = Two([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", LOSS)
        model.another = keras.optimizers.SGD(0.1)
        hvdtrain.distribute(model)

    refused("two optimizers", two)
    refused("use_ema", average)
    refused("global_clipnorm", norm)
    refused("too many servers", tiny)
    good = classifier("sgd")
    refused("train_on_batch", batch)
    # All ranks are still synchronized.
    good.fit(X, Y, verbose=0)
    refused("train_on_batch after fit", batch)
"""


def test_unsupported_models_are_refused_on_every_rank(launch):
    messages = {
        "two optimizers": "has 2 optimizers, but parameter servers apply one",
        "use_ema": "use_ema=True with gradient_accumulation_steps, got 2",
        "global_clipnorm": "global_clipnorm needs one parameter server, got 2",
        "too many servers": "number of parameter servers must be between 1 and 1, got 2",
        "train_on_batch": "Call model.fit",
        "train_on_batch after fit": "Call model.fit",
    }
    done = launch(4, program(MISTAKES), timeout_s=100, env=servers("async-ps", 2))
    assert done.returncode == 0
    for case, text in messages.items():
        entries = [entry for entry in reports(done, "refused") if entry["case"] == case]
        assert [entry["rank"] for entry in entries] == [0, 1, 2, 3], case
        assert all(text in entry["text"] for entry in entries)


FAILS = """
    # mpirun kills a rank that computes for too long after others have ended. The compilation of the
    # first step may take that long, so worker 1 waits for the chief's.
    awaited = "chief ends 0" if os.environ["HVDTRAIN_MODE"] == "async-ps" else "chief begins 0"

    def begin(batch):
        if RANK == 0:
            Path(f"chief begins {batch}").touch()
        if RANK == 1 and batch == 0:
            wait_for(awaited)

    def end(batch):
        if RANK == 0:
            Path(f"chief ends {batch}").touch()
        if case == "exception" and batch == 3 and RANK == 1:
            raise ValueError("bad batch")

    sums = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    case = os.environ["CASE"]
    model = classifier("sgd", loss=sums if case == "sums" else LOSS)
    x = X * np.nan if case == "nan" and RANK == 1 else X
    model.fit(x, Y, batch_size=8, verbose=0, callbacks=[At(begin, end)])
    report("continued")
"""


@pytest.mark.parametrize(
    ("case", "mode", "text"),
    [
        ("nan", "async-ps", "NonFiniteError: A gradient is not finite: sequential/dense/kernel"),
        ("exception", "sync-ps", "ValueError: bad batch"),
        ("sums", "sync-ps", "ModelError: Losses with reduction='sum'"),
    ],
)
def test_an_error_in_fit_ends_all_ranks(launch, case, mode, text):
    done = launch(3, program(FAILS), timeout_s=100, env=servers(mode) | {"CASE": case})
    assert done.returncode == 1
    assert not reports(done, "continued")
    failed, stopped = (
        {rank for rank in range(3) if f"hvdtrain: rank {rank} of 3 {how}" in done.stderr}
        for how in (f"failed: {text}", "stops: rank ")
    )
    assert 2 in stopped
    assert failed | stopped == {0, 1, 2}
    # Both workers refuse sums, unless one receives the other's failure first.
    assert failed & ({0, 1} if case == "sums" else {1})
