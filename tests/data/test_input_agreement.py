from __future__ import annotations

import re

import pytest

from hvdtrain.data.input_agreement import REMEDIES, InputReport, compare, raise_if_different
from hvdtrain.errors import DataError


def _report(rows: int = 10, **changes) -> InputReport:
    values = {
        "structure": {"kind of input": "arrays", "x": "float32 of shape (3,) per row"},
        "content": {"number of samples": rows, "content of x": "ab"},
        "steps": 5,
    }
    return InputReport(**{**values, **changes})


def test_equal_reports_return_the_steps() -> None:
    assert compare([_report()] * 3, presharded=False) == 5


def test_a_difference_names_the_values_and_the_ranks() -> None:
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
    with pytest.raises(DataError, match=r"input: y is int32 on rank 0, missing on rank 1\. "):
        raise_if_different(facts, remedies="")


def test_messages_about_many_ranks_and_differences_are_shortened() -> None:
    facts = [{f"fact {i}": rank * i for i in range(1, 9)} for rank in range(64)]
    with pytest.raises(DataError, match=r"; and 4 more\. ") as caught:
        raise_if_different(facts, remedies="")
    assert len(str(caught.value)) < 800


def test_presharded_compares_structure_only() -> None:
    compare([_report(), _report(12)], presharded=True)
    with pytest.raises(DataError, match="kind of input"):
        compare([_report(), _report(structure={"kind of input": "other"})], presharded=True)


def test_presharded_uses_the_most_steps() -> None:
    reports = [_report(steps=3), _report(steps=0), _report(steps=7)]
    assert compare(reports, presharded=True) == 7


@pytest.mark.parametrize(
    ("steps", "message"),
    [((5, None), r"unknown on rank 1\. .*assert_cardinality"), ((0, 0), "empty on all ranks")],
)
def test_presharded_needs_a_known_amount_of_data(steps, message) -> None:
    with pytest.raises(DataError, match=message):
        compare([_report(steps=count) for count in steps], presharded=True)


def test_data_that_is_endless_on_some_ranks_only_is_an_error() -> None:
    endless = _report(steps=None, endless=True)
    assert compare([endless] * 2, presharded=True) is None
    with pytest.raises(DataError, match="endless on rank 1 only"):
        compare([_report(), endless], presharded=True)


def test_the_error_contains_the_failure_of_another_rank() -> None:
    failed = InputReport(error="ValueError: bad shape")
    with pytest.raises(DataError, match="rank 1: ValueError: bad shape"):
        compare([_report(), failed], presharded=False)
