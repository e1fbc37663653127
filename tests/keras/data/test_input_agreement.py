from __future__ import annotations

import re

import pytest

from hvdtrain.errors import DataError
from hvdtrain.keras.data.input_agreement import REMEDIES, agreed_steps, compare, differences
from hvdtrain.keras.data.shard_plan import InputReport


def _report(rows: int = 10, **changes) -> InputReport:
    values = {
        "structure": {"kind of input": "arrays", "x": "float32 of shape (3,) per row"},
        "content": {"number of samples": rows, "content of x": "ab"},
        "steps": 5,
    }
    return InputReport(**{**values, **changes})


def test_equal_reports_pass() -> None:
    compare([_report()] * 3, presharded=False)
    assert agreed_steps([_report()] * 3, presharded=False) == 5


def test_a_difference_names_the_fact_the_values_and_the_ranks() -> None:
    with pytest.raises(DataError) as caught:
        compare([_report(), _report(12), _report()], presharded=False)
    message = str(caught.value)
    assert "number of samples is 10 on ranks 0, 2, 12 on rank 1" in message
    assert "presharded=True" in message
    assert "same data" in message
    places = [message.index(f"{name}(") for name in re.findall(r"[\w.]+(?=\()", REMEDIES)]
    assert places[0] == message.index("keras.utils.set_random_seed(1)") == min(places)


def test_a_missing_leaf_is_a_difference() -> None:
    facts = [{"x": "float32", "y": "int32"}, {"x": "float32"}]
    assert differences(facts) == ["y is int32 on rank 0, nothing on rank 1"]


def test_many_ranks_and_differences_stay_readable() -> None:
    facts = [{f"fact {i}": rank * i for i in range(1, 9)} for rank in range(64)]
    found = differences(facts)
    assert len(found) == 8
    assert len(found[0]) < 200
    reports = [InputReport(structure=entry) for entry in facts]
    with pytest.raises(DataError, match="and 4 more"):
        compare(reports, presharded=False)


def test_presharded_compares_structure_only() -> None:
    compare([_report(), _report(12)], presharded=True)
    with pytest.raises(DataError, match="kind of input"):
        compare([_report(), _report(structure={"kind of input": "other"})], presharded=True)


def test_presharded_takes_the_longest() -> None:
    reports = [_report(steps=3), _report(steps=0), _report(steps=7)]
    assert agreed_steps(reports, presharded=True) == 7


def test_presharded_needs_known_numbers() -> None:
    with pytest.raises(DataError, match=r"rank 1 can't tell.*assert_cardinality"):
        agreed_steps([_report(), _report(steps=None)], presharded=True)
    with pytest.raises(DataError, match="No rank has any data"):
        agreed_steps([_report(steps=0)] * 2, presharded=True)


def test_endless_on_some_ranks_only() -> None:
    endless = _report(steps=None, endless=True)
    assert agreed_steps([endless] * 2, presharded=True) is None
    with pytest.raises(DataError, match="input of rank 1 is endless"):
        compare([_report(), endless], presharded=True)


def test_another_ranks_failure_is_named() -> None:
    failed = InputReport(error="ValueError: bad shape")
    with pytest.raises(DataError, match="rank 1: ValueError: bad shape"):
        compare([_report(), failed], presharded=False)
