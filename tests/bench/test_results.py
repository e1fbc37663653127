"""Tables, limits and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdtrain.bench.results import BenchReport, Limit, format_seconds
from hvdtrain.cluster.ranges import format_table


def test_columns_are_aligned() -> None:
    shown = format_table(["name", "time"], [["a", "1 s"], ["longer", "22 ms"]], left=(0,))
    assert shown == "name     time\na         1 s\nlonger  22 ms"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(12.3456, "12.3 s"), (0.5, "500 ms"), (2e-5, "20 us"), (0, "0 us")]
)
def test_seconds_read_well(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("bound", "measured", "held"),
    [
        ("at most", 3.0, True),
        ("at most", 3.1, False),
        ("at least", 3.0, True),
        ("at least", 2, False),
    ],
)
def test_limits_hold_on_one_side(bound, measured: float, held: bool) -> None:
    assert Limit(what="x", measured=measured, limit=3.0, unit="times", bound=bound).held is held


def test_finish_prints_limits_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = BenchReport("allreduce", {"ranks": 2})
    report.add("sizes", [1, 2])
    report.hold_against(Limit(what="ratio", measured=2.5, limit=3.0, unit="times", bound="at most"))
    path = tmp_path / "out.json"
    report.finish(str(path))
    assert "ratio   2.5 times  at most 3 times   yes" in capsys.readouterr().out
    limit = {"what": "ratio", "measured": 2.5, "limit": 3.0, "unit": "times", "bound": "at most"}
    assert json.loads(path.read_text()) == {
        "benchmark": "allreduce",
        "ranks": 2,
        "sizes": [1, 2],
        "limits": [{**limit, "held": True}],
    }
