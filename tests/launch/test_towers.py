"""Ranks with several devices: what the command line comes to."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hvdtrain.cli import main

TOWERS = ("--mode", "towers", "--devices-per-rank", "2")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """The GPUs of each rank, as a dry run on these shows them; or its complaint."""
    for name in [name for name in os.environ if name.startswith("HVDTRAIN_")]:
        monkeypatch.delenv(name)

    def show(gpus: str, *options: str) -> list[str] | str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        code = main(["run", *options, "--dry-run", "--", "python", "train.py"])
        shown = capsys.readouterr()
        if code == 2:
            return shown.err
        assert code == 0, shown.err
        return [line.split()[4] for line in shown.out.partition("\n\n")[0].splitlines()[1:]]

    return show


def test_the_plan_gives_each_rank_its_devices(planned) -> None:
    assert planned("0,1,2,3", "-np", "2", *TOWERS) == ["0,1", "2,3"]
    assert planned("0,1,2", "-np", "2", *TOWERS, "--share-gpus") == ["0,1", "0,2"]
    assert planned("-1", "-np", "2", *TOWERS) == ["-", "-"]
    assert planned("0,1,2,3", "-np", "2", "--mode", "towers") == ["0", "1"]


def test_what_does_not_fit_is_told_before_anything_starts(planned) -> None:
    told = planned("0,1,2", "-np", "2", *TOWERS)
    assert "too few GPUs for 2 per rank (--devices-per-rank): localhost has 3 GPUs for 2" in told
    told = planned("0,1", "-np", "1", "--devices-per-rank", "2")
    assert "--devices-per-rank 2 (HVDTRAIN_DEVICES_PER_RANK) needs --mode towers" in told
