"""Long lists in messages are cut, and say so."""

from __future__ import annotations

import pytest

from hvdtrain.cluster.ranges import counted, listing


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
def test_eight_are_named(count: int, text: str) -> None:
    assert listing(range(count)) == text


def test_the_rest_has_a_name() -> None:
    hosts = (f"node{number}" for number in range(10))
    assert listing(hosts, "hosts").endswith(", node7, 2 more hosts")


def test_one_thing_and_several() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
