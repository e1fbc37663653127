"""Lines of several ranks become one, and every rank's own lines stay in order."""

from __future__ import annotations

import random

import pytest

from hvdtrain.launch.line_collapse import (
    MOST_WAITING,
    WINDOW_S,
    Group,
    LineCollapse,
    describe_ranks,
)


def shown(groups: list[Group]) -> list[str]:
    return [f"{describe_ranks(list(group.hosts))} {group.text}" for group in groups]


def collapsed(*lines: tuple[int, str], ranks: int = 4) -> list[str]:
    """All ``lines``, each written by a rank, within a moment."""
    collapse = LineCollapse(ranks)
    for rank, text in lines:
        collapse.add(rank, "node1", "stdout", text, 0.0)
    return shown(collapse.take_all())


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([5], "5"),
        ([3, 0], "0,3"),
        ([1, 0], "0,1"),
        ([7, *range(4)], "0-3,7"),
        (range(64), "0-63"),
        (range(0, 64, 2), "0,2,4,... 32 ranks"),
        ([*range(100), *range(200, 300), *range(400, 500)], "0-99,200-299,400-499"),
    ],
)
def test_ranks_in_few_words(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text


def test_the_same_line_of_all_ranks_is_one() -> None:
    assert collapsed(*[(rank, "hello") for rank in (2, 0, 3, 1)]) == ["0-3 hello"]


def test_a_rank_that_repeats_itself_repeats_it_for_all() -> None:
    assert collapsed((0, "a"), (0, "a"), (1, "a"), (1, "a"), (1, "a")) == ["0,1 a", "0,1 a", "1 a"]


def test_ranks_interleave() -> None:
    lines = [(0, "a"), (1, "x"), (0, "b"), (1, "a"), (0, "c"), (2, "b"), (1, "b"), (2, "c")]
    assert collapsed(*lines) == ["1 x", "0,1 a", "0-2 b", "0,2 c"]


def test_groups_make_way_for_what_has_to_come_first() -> None:
    """Also a shared one: only ranks 1 and 2 have an x, and before the a of all."""
    assert collapsed((0, "a"), (0, "b"), (1, "x"), (2, "x"), (1, "a"), (2, "a"), (2, "b")) == [
        *("1,2 x", "0-2 a", "0,2 b")
    ]


def test_opposite_orders_are_not_one() -> None:
    assert collapsed((0, "a"), (0, "b"), (1, "b"), (1, "a")) == ["0 a", "0,1 b", "1 a"]
    lines = [(0, "a"), (0, "b"), (1, "b"), (1, "c"), (2, "c"), (2, "a")]
    assert collapsed(*lines) == ["0 a", "0,1 b", "1,2 c", "2 a"], "a round of three"


def test_stdout_and_stderr_stay_apart() -> None:
    collapse = LineCollapse(2)
    collapse.add(0, "node1", "stdout", "a", 0.0)
    collapse.add(1, "node1", "stderr", "a", 0.0)
    assert [(group.stream, list(group.hosts)) for group in collapse.take_all()] == [
        ("stdout", [0]),
        ("stderr", [1]),
    ]


LOGGED = {
    "abseil": (
        "W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] No GPU",
        "W0000 00:00:1795552261.391135    1728 gpu_device.cc:2342] No GPU",
        "E0000 00:00:1795552261.391135    1728 gpu_device.cc:2342] No GPU",
    ),
    "logging": (
        "2026-11-24 20:29:51,123 WARNING slow",
        "2026-11-24 20:29:51,124 WARNING slow",
        "2026-11-24 20:29:51,124 WARNING slower",
    ),
}


@pytest.mark.parametrize("lines", LOGGED.values(), ids=LOGGED)
def test_when_it_was_logged_does_not_matter(lines: tuple[str, str, str]) -> None:
    first, same, other = lines
    assert collapsed((0, first), (1, same), (2, other)) == [f"0,1 {first}", f"2 {other}"]


def test_a_line_waits_for_a_moment() -> None:
    collapse = LineCollapse(3)
    collapse.add(0, "node1", "stdout", "a", 0.0)
    collapse.add(1, "node1", "stdout", "a", 0.9 * WINDOW_S)
    collapse.add(1, "node1", "stdout", "b", 0.9 * WINDOW_S)
    assert collapse.take(0.99 * WINDOW_S) == []
    assert shown(collapse.take(1.1 * WINDOW_S)) == ["0,1 a"]
    collapse.add(2, "node1", "stdout", "a", 1.1 * WINDOW_S)
    assert shown(collapse.take(2 * WINDOW_S)) == ["1 b"]
    assert shown(collapse.take(2.2 * WINDOW_S)) == ["2 a"]


def test_what_stands_before_a_line_that_is_due_comes_with_it() -> None:
    collapse = LineCollapse(3)
    collapse.add(0, "node1", "stdout", "a", 0.0)
    collapse.add(1, "node1", "stdout", "x", 0.9 * WINDOW_S)
    collapse.add(1, "node1", "stdout", "a", 0.9 * WINDOW_S)
    assert shown(collapse.take(WINDOW_S)) == ["1 x", "0,1 a"]


def test_nothing_waits_where_no_rank_is_missing() -> None:
    alone = LineCollapse(1)
    alone.add(0, "node1", "stdout", "a", 0.0)
    assert shown(alone.take(0.0)) == ["0 a"]
    two = LineCollapse(2)
    for rank, text in ((0, "a"), (0, "b"), (1, "a")):
        two.add(rank, "node1", "stdout", text, 0.0)
    assert shown(two.take(0.0)) == ["0,1 a"]


def test_few_lines_wait() -> None:
    collapse, taken = LineCollapse(2), []
    for number in range(3 * MOST_WAITING):
        collapse.add(0, "node1", "stdout", str(number), 0.0)
        taken += collapse.take(0.0)
    assert len(taken) == 2 * MOST_WAITING
    taken += collapse.take_all()
    assert [group.text for group in taken] == [str(number) for number in range(3 * MOST_WAITING)]


@pytest.mark.parametrize("seed", range(5))
def test_no_line_is_lost_and_each_rank_keeps_its_order(seed: int) -> None:
    """64 ranks, each with some of the same lines, in almost the same order."""
    dice = random.Random(seed)
    collapse, wrote, saw = LineCollapse(64), {rank: [] for rank in range(64)}, []
    for step in range(5000):
        rank, now = dice.randrange(64), step / 2000
        text = f"{len(wrote[rank]) // 4}.{dice.randrange(3)}"
        wrote[rank].append(text)
        collapse.add(rank, "node1", "stdout", text, now)
        saw += collapse.take(now)
    saw += collapse.take_all()
    for rank, lines in wrote.items():
        assert [group.text for group in saw if rank in group.hosts] == lines
    assert len(saw) < 1500, "of 5000 lines"


def test_64_ranks_that_start_alike_fill_no_screen() -> None:
    dice = random.Random(0)
    words = [f"line {number}" for number in range(20)]
    left = {rank: list(words) for rank in range(64)}
    lines = []
    while left:
        rank = dice.choice(list(left))
        lines.append((rank, left[rank].pop(0)))
        if not left[rank]:
            del left[rank]
    assert collapsed(*lines, ranks=64) == [f"0-63 {word}" for word in words]
