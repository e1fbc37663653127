"""The encoding of positions and of the training progress."""

import json

import pytest

from hvdtrain.data.partition import Position
from hvdtrain.errors import CheckpointError
from hvdtrain.parameter_server.protocol import POSITION_NUMBERS
from hvdtrain.trainer.epoch_iterator import EpochPlace
from hvdtrain.trainer.saving.training_progress import TrainingProgress, WorkerPosition

BEGIN = Position(epoch=4, start=30, missed=(2, 3, 7, 9), joint_batch=6)
POSITIONS = [None, Position(epoch=4), BEGIN, BEGIN.after(2), BEGIN.after(4), BEGIN.after(11)]


def worker_at(position):
    place = EpochPlace(position=position, epoch_step=3, epochs=4, passes=2, ranks=3)
    return WorkerPosition(epoch=4, place=place, samples=99)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_position_is_restored_from_numbers(position):
    worker = worker_at(position)
    numbers = worker.to_numbers()
    assert len(numbers) == POSITION_NUMBERS
    assert WorkerPosition.from_numbers(numbers, ranks=3, begins={4: BEGIN}) == worker


def progress(**options):
    return TrainingProgress(
        step=7,
        epoch=4,
        place=worker_at(BEGIN).place,
        unit="samples",
        seed=1,
        tensorflow_seed=None,
        presharded=False,
        samples=50,
        **options,
    )


def test_progress_is_restored_from_json():
    others = [worker_at(position) for position in POSITIONS]
    saved = progress(others=others, begins=[BEGIN], each=2, built=[[0, 2], []])
    assert TrainingProgress.from_json(json.loads(json.dumps(saved.to_json()))) == saved


def test_progress_of_an_earlier_version():
    values = progress().to_json()
    for name in ("others", "begins", "each"):
        del values[name]
    loaded = TrainingProgress.from_json(values)
    assert (list(loaded.others), list(loaded.begins), loaded.each) == ([], [], 0)


def test_a_missing_entry_is_an_error():
    values = progress(others=[worker_at(None)]).to_json()
    del values["others"][0]["place"]["passes"]
    with pytest.raises(CheckpointError, match="KeyError"):
        TrainingProgress.from_json(values)
