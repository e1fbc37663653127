from __future__ import annotations

import pytest

from hvdtrain.text import format_duration, format_list, plural


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, ""),
        (1, "0"),
        (3, "0, 1, 2"),
        (8, "0, 1, 2, 3, 4, 5, 6, 7"),
        (9, "0, 1, 2, 3, 4, 5, 6, 7, 1 more"),
        (1000, "0, 1, 2, 3, 4, 5, 6, 7, 992 more"),
    ],
)
def test_format_list(count: int, text: str) -> None:
    assert format_list(range(count)) == text


def test_the_noun_of_the_rest() -> None:
    hosts = (f"node{number}" for number in range(10))
    assert format_list(hosts, "hosts").endswith(", node7, 2 more hosts")


def test_plural() -> None:
    assert [plural(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.4, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90000, "1 d 1 h"),
        (86400 * 400 + 60, "400 d"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
