from __future__ import annotations

from typing import Any

import pytest

from hvdtrain.jobs.roll_up import RollUp, spread


def _rolled(*rows: dict[str, Any], span_s: float = 60.0) -> dict[str, Any]:
    roll_up = RollUp(span_s)
    for row in rows:
        assert roll_up.add(row) is None
    rolled = roll_up.end()
    assert rolled is not None
    return rolled


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3, 3, 3, 3)),
        ([2.0, 1.0], (1, 1.5, 2, 2)),
        (range(19, 0, -1), (1, 10, 19, 19)),
        (range(100), (0, 49.5, 94, 99)),
        (range(1000), (0, 499.5, 949, 999)),
    ],
)
def test_many_values_are_four(values: Any, expected: tuple[float, ...]) -> None:
    parts = ("x_min", "x", "x_p95", "x_max")
    assert spread("x", values) == dict(zip(parts, expected))


def test_a_row_tells_of_all_within_its_time() -> None:
    rows = [
        {"time": 60.0 + second, "step": 7 * second, "loss": 1 / (1 + second), "epoch": second // 30}
        for second in range(60)
    ]
    assert _rolled(*rows) == {
        "time": 89.5,
        "step": 7 * 29,
        "epoch": 0,
        "loss_min": pytest.approx(1 / 60, rel=1e-5),
        "loss": pytest.approx((1 / 30 + 1 / 31) / 2, rel=1e-5),
        "loss_p95": pytest.approx(1 / 4, rel=1e-5),
        "loss_max": 1.0,
    }


def test_extremes_of_ranks_are_kept() -> None:
    first = {"time": 1.0, **spread("own_s", [0.1, 0.2, 0.9])}
    second = {"time": 2.0, **spread("own_s", [0.05, 0.3, 0.4])}
    rolled = _rolled(first, second, {"time": 3.0, "own_s": 0.25})
    assert [rolled[f"own_s{part}"] for part in ("_min", "", "_p95", "_max")] == [
        *(0.05, 0.25, 0.9, 0.9)
    ]


def test_who_is_slow_now_is_what_there_is_to_say() -> None:
    slow = {"slow": 3, "slow_host": "node1", "slow_factor": 2.0}
    assert _rolled({"time": 1.0, "slow": 1}, {"time": 2.0, **slow}) == {"time": 1.5, **slow}
    assert _rolled({"time": 1.0, **slow}, {"time": 2.0, "step": 3}) == {"time": 1.5, "step": 3}


def test_a_row_ends_with_the_first_that_is_not_of_its_time() -> None:
    roll_up = RollUp(10.0)
    assert roll_up.end() is None
    assert roll_up.add({"time": 8.0, "step": 1}) is None
    assert roll_up.add({"time": 9.9, "step": 2}) is None
    assert roll_up.add({"time": 10.0, "step": 3}) == {"time": 8.95, "step": 1}
    # Nothing came for long, and then a clock was set back.
    assert roll_up.add({"time": 95.0, "step": 4}) == {"time": 10.0, "step": 3}
    assert roll_up.add({"time": 5.0, "step": 5}) == {"time": 95.0, "step": 4}
    assert roll_up.end() == {"time": 5.0, "step": 5}
    assert roll_up.end() is None
