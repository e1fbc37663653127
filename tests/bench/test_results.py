"""Tables, targets and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hvdtrain.bench.options import Options
from hvdtrain.bench.results import BenchReport, format_seconds
from hvdtrain.text import format_table


def test_columns_are_aligned() -> None:
    table = format_table(["name", "time"], [["a", "1 s"], ["longer", "22 ms"]], left=(0,))
    assert table == "name     time\na         1 s\nlonger  22 ms"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.3456, "12.3 s"), (0.5, "500 ms"), (2e-5, "20.0 us"), (1234, "1234 s"), (0, "0 us")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("bound", "measured", "held"),
    [
        ("at most", 3.0, True),
        ("at most", 3.1, False),
        ("at least", 3.0, True),
        ("at least", 2, False),
    ],
)
def test_compare_with_a_target(bound, measured: float, held: bool, tmp_path: Path) -> None:
    report = BenchReport("allreduce", Options(), 2, lambda: True)
    report.compare("x", measured, bound, 3.0, "times")
    report.finish(str(tmp_path / "out.json"))
    (limit,) = json.loads((tmp_path / "out.json").read_text())["limits"]
    assert limit["held"] is held


@pytest.mark.parametrize("writes", [True, False])
def test_finish_prints_targets_and_writes_json(
    writes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = BenchReport("allreduce", Options(), 2, lambda: writes)
    report.add(sizes=[1, 2])
    report.compare("ratio", 2.5, "at most", 3.0, "times")
    path = tmp_path / "out.json"
    report.finish(str(path))
    printed = capsys.readouterr().out
    if not writes:
        assert (printed, path.exists()) == ("", False)
        return
    assert re.search(r"ratio +2.5 times +at most 3 times +yes", printed)
    limit = {"what": "ratio", "measured": 2.5, "limit": 3.0, "unit": "times", "bound": "at most"}
    written = json.loads(path.read_text())
    assert written.pop("machine")["cores"] > 0
    assert written == {
        "benchmark": "allreduce",
        "ranks": 2,
        "options": {"json": ""},
        "sizes": [1, 2],
        "limits": [{**limit, "held": True}],
    }
