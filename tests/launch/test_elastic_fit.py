"""``fit`` in elastic jobs, which uses each sample once per epoch, even if ranks die."""

from __future__ import annotations

import csv
import json
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.checkpoint import Store
from tests.launch.elastic_fit import BATCH, ROWS, Scenario
from tests.launch.jobs import HVDTRAIN

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(400)]

PROGRAM = Path(__file__).with_name("elastic_fit.py")


@pytest.fixture
def run_on(run_command: Any, python_with: Callable[[str], list[str]]) -> Callable[..., Any]:
    def run(
        program: Path,
        arguments: Sequence[str],
        ranks: int,
        *options: str,
        backend: str = "tensorflow",
    ) -> Any:
        command = [*HVDTRAIN, "-np", str(ranks), "--elastic", "--grace-s", "2", *options]
        return run_command(
            [*command, "--", *python_with(backend), str(program), *arguments],
            env={"KERAS_BACKEND": backend},
            timeout_s=300,
        )

    return run


@pytest.fixture
def train(run_on: Any) -> Callable[..., Any]:
    def run(scenarios: Sequence[Scenario], ranks: int, *options: str, **more: str) -> Any:
        plan = json.dumps([scenario.to_json() for scenario in scenarios])
        return run_on(PROGRAM, [plan], ranks, *options, **more)

    return run


def results_of(done: Any, scenarios: Sequence[Scenario], ranks: int) -> list[dict[str, Any]]:
    """Check the results of all ranks, and return the results of the final chief."""
    assert done.returncode == 0, done
    printed = [
        json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line
    ]
    dead = {scenario.dies for scenario in scenarios}
    assert {report["first_rank"] for report in printed} == set(range(ranks)) - dead, done
    for number, scenario in enumerate(scenarios):
        results = [report["results"][number] for report in printed]
        for result in results:
            left_over = result["steps"] % (scenario.accumulate or 1)
            if left_over:
                # Accumulated gradients at the end of training are never applied.
                assert result["visits"] in ([1, 2], [2]), (scenario, result)
                assert result["missing"] <= left_over * BATCH * (result["size"]), (scenario, result)
            elif "steps_per_epoch" in (scenario.fit or {}):
                # A pass spans epochs, and the last one is incomplete.
                assert max(result["visits"]) - min(result["visits"]) <= 1, (scenario, result)
            else:
                assert result["visits"] == [scenario.epochs], (scenario, result)
            assert result["size"] == ranks - number - 1, (scenario, result)
            for name in ("steps", "loss", "exact"):
                assert result[name] == results[0][name], (scenario, name)
    return list(printed[0]["results"])


# Each job has one more rank than trainings, because it loses one rank in each training.
JOBS: dict[str, list[Scenario]] = {
    "steps": [
        Scenario(dies=1),
        Scenario(dies=0, moment="step end", turn=4),
        Scenario(dies=2, turn=8, compile={"steps_per_execution": 3}),
    ],
    "data": [
        Scenario(dies=0, data="pipeline"),
        Scenario(dies=2, data="batches", fit={"steps_per_epoch": 3}, turn=10, epochs=5),
        Scenario(dies=3, data="filtered"),
    ],
    "gradients": [
        Scenario(dies=2, layer="embedding"),
        Scenario(dies=0, accumulate=2, turn=4),
        Scenario(dies=1, accumulate=3, turn=5, compile={"jit_compile": True}),
    ],
    "evaluation": [
        Scenario(dies=1, moment="test step", validate=True),
        Scenario(dies=0, moment="test step", data="pipeline", validate=True),
        Scenario(dies=2, moment="epoch end", turn=0, validate=True),
    ],
}


EVERYWHERE = [
    Scenario(dies=1, validate=True),
    Scenario(dies=0, moment="step end", turn=4, accumulate=2),
    Scenario(dies=2, moment="test step", data="batches", validate=True),
]


@pytest.mark.parametrize(
    ("scenarios", "backend"),
    [
        *(pytest.param(scenarios, "tensorflow", id=name) for name, scenarios in JOBS.items()),
        *(pytest.param(EVERYWHERE, name, id=name) for name in ("torch", "jax")),
    ],
)
def test_every_sample_is_seen_once(train: Any, scenarios: list[Scenario], backend: str) -> None:
    results = results_of(train(scenarios, 4, backend=backend), scenarios, 4)
    for scenario, result in zip(scenarios, results):
        if scenario.validate:
            assert result["exact"] == [True] * scenario.epochs, (scenario, result)


# A step with a sample adds the learning rate, times -1, to the weight of this sample.
SCHEDULE = """
import json, os, signal
import keras, numpy as np
import hvdtrain
from tests.launch.elastic_fit import BATCH, ROWS, Total

class Die(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if me == 1 and batch == 4:
            os.kill(os.getpid(), signal.SIGKILL)

hvdtrain.init()
me = hvdtrain.rank()
rate = hvdtrain.scale_learning_rate(1.0)
schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1000], [rate, rate])
dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((ROWS,)), dense])
model.compile(keras.optimizers.SGD(schedule), Total())
hvdtrain.distribute(model)
x, y = np.eye(ROWS, dtype="float32"), np.zeros((ROWS, 1), "float32")
model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Die()])
rates, counts = np.unique(-model.get_weights()[0], return_counts=True)
print("rates", json.dumps([rates.tolist(), counts.tolist()]), flush=True)
"""


def test_schedules_of_compiled_steps_are_rescaled(run_on: Any, tmp_path: Path) -> None:
    program = tmp_path / "schedule.py"
    program.write_text(SCHEDULE)
    done = run_on(program, [], 3, backend="jax")
    assert done.returncode == 0, done
    # Four steps of three ranks and the step that loses a rank, and then two ranks.
    expected = [[2.0, 3.0], [ROWS - 14 * BATCH, 14 * BATCH]]
    assert done.stdout.count(f"rates {json.dumps(expected)}") == 2, done


def test_random_losses(train: Any) -> None:
    """Three of four ranks die at random moments, the chief first."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    dies = [0, *chance.sample([1, 2, 3], 2)]
    moments = chance.sample(["step", "step end", "test step", "epoch end"], 3)
    scenarios = [
        Scenario(
            dies=rank,
            moment=moment,
            turn=chance.randrange(1 if moment == "epoch end" else 6),
            delay_s=chance.uniform(0.0, 0.05),
            by=chance.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]),
            data=chance.choice(["arrays", "pipeline", "batches"]),
            validate=True,
        )
        for rank, moment in zip(dies, moments)
    ]
    results = results_of(train(scenarios, 4), scenarios, 4)
    for scenario, result in zip(scenarios, results):
        assert result["exact"] == [True] * scenario.epochs, (scenario, result)


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_a_remaining_rank_becomes_the_chief(train: Any, tmp_path: Path, backend: str) -> None:
    """The new chief continues to save checkpoints and to run Keras' callbacks."""
    folders = [tmp_path / name for name in ("step", "save")]
    for folder in folders:
        folder.mkdir()
    chance = random.Random()
    where = [{"files": str(folder), "checkpoint": str(folder / "saved")} for folder in folders]
    scenarios = [
        Scenario(dies=0, moment="step", turn=12, epochs=3, **where[0]),
        # While a snapshot is gathered or written.
        Scenario(dies=1, moment="step end", turn=5, delay_s=chance.uniform(0.0, 0.02), **where[1]),
    ]
    results = results_of(train(scenarios, 3, backend=backend), scenarios, 3)
    for scenario, folder, result in zip(scenarios, folders, results):
        with (folder / "log.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["epoch"]) for row in rows] == list(range(scenario.epochs)), rows
        # The loss falls, and the callback keeps the epoch with the highest.
        assert [path.name for path in folder.glob("best-*")] == ["best-1.keras"]
        newest = Store(folder / "saved").newest()
        assert newest is not None
        assert newest.step == result["steps"], "the end of the training is saved"
        assert newest.state["place"]["ranks"] == result["size"]


def test_too_few_ranks_save_a_checkpoint_and_a_new_job_resumes(train: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    scenario = Scenario(dies=1, moment="step", turn=4, checkpoint=str(folder), epochs=2)
    done = train([scenario], 3, "--min-np", "3", "--preempt-grace-s", "30")
    assert done.returncode == 137, done
    assert "fewer than --min-np 3" in done.stderr
    newest = Store(folder).newest()
    assert newest is not None
    assert newest.step == 5, "the step is completed without the lost rank"
    again = Scenario(dies=-1, checkpoint=str(folder), epochs=2)
    done = train([again], 2)
    printed = [
        json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line
    ]
    assert [report["results"][0]["visits"] for report in printed] == [[2.0]] * 2, done


@pytest.mark.parametrize(
    ("trainings", "bucket_bytes"),
    [
        # Four ranks use 20 samples per step, so the third step of an epoch is uneven.
        ([("weights", 1, 1), ("sum", 0, 3), ("scaled rate", 3, 4)], "auto"),
        # Buckets are used between hosts, and if ranks have GPUs.
        ([("accumulating", 1, 1), ("own step", 0, 2), ("two optimizers", 3, 3)], "100"),
    ],
    ids=["one gradient", "several"],
)
def test_training_after_losses_equals_one_process(
    run_on: Any, tmp_path: Path, trainings: list[tuple[str, int, int]], bucket_bytes: str
) -> None:
    arguments = [str(tmp_path), json.dumps(trainings)]
    program = PROGRAM.with_name("elastic_reference.py")
    done = run_on(program, arguments, 4, "--bucket-bytes", bucket_bytes)
    assert done.returncode == 0, done
    survivors = [3 - number for number in range(len(trainings))]
    assert done.stdout.count("is equal after") == sum(survivors), done
