"""Bytes from a pipe become lines and a status, however they are cut."""

from __future__ import annotations

import pytest

from hvdtrain.agent.output_lines import LONGEST_LINE, LONGEST_STATUS, LineSplitter


def split(*reads: bytes) -> list[str]:
    """The lines of a stream that comes in these reads and ends."""
    splitter = LineSplitter()
    lines = [line for data in reads for line in splitter.feed(data)]
    lines += splitter.feed(b"", final=True)
    assert splitter.status == "", "nothing is drawn any more"
    return lines


def states(*reads: bytes) -> list[str]:
    """What the status is after each of these reads."""
    splitter = LineSplitter()
    found = []
    for data in reads:
        assert list(splitter.feed(data)) == []
        found.append(splitter.status)
    return found


LINES = {
    "nothing": (b"", []),
    "one": (b"one\n", ["one"]),
    "empty-lines": (b"\n\n", ["", ""]),
    "rest-without-end": (b"one\ntwo", ["one", "two"]),
    "spaces-stay": (b"  one \t\n", ["  one \t"]),
    "crlf": (b"one\r\ntwo\r\n\r\n", ["one", "two", ""]),
    "multi-byte": ("höher\n━━ 日本 🎉\n".encode(), ["höher", "━━ 日本 🎉"]),
    "no-utf-8": (b"a\xffb\n", ["a�b"]),
    "character-never-completed": (b"a\n\xe2\x94", ["a", "�"]),
    "bar": (b"\r1/3 [=>.]\r2/3 [==>]\r3/3 [===]\nend\n", ["3/3 [===]", "end"]),
    "bar-that-goes-back-first": (b"1 %\r2 %\r\n", ["2 %"]),
    "bar-that-erases": (b"loading\r\x1b[Kdone\n", ["done"]),
    "bar-without-end": (b"one\n\r1 %\r2 %", ["one", "2 %"]),
    "bar-that-leaves-nothing": (b"\r50 %\r\x1b[K", []),
}


@pytest.mark.parametrize(("data", "lines"), LINES.values(), ids=LINES)
def test_lines_are_the_same_however_they_are_cut(data: bytes, lines: list[str]) -> None:
    assert split(data) == lines
    for cut in range(len(data) + 1):
        assert split(data[:cut], data[cut:]) == lines, f"cut at {cut}"
    assert split(*(data[at : at + 1] for at in range(len(data)))) == lines


def test_a_line_comes_as_soon_as_it_is_complete() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"one\ntw")) == ["one"]
    assert list(splitter.feed(b"")) == []
    assert list(splitter.feed(b"o\n")) == ["two"]


def test_the_status_is_what_was_drawn_last() -> None:
    keras = [b"\r1/3 ", b"[=>.]", b"\b\b\b\b\r2/3 [==>]"]
    assert states(*keras) == ["1/3 ", "1/3 [=>.]", "2/3 [==>]"]
    assert states(b"\r  0%|    | 0/9", b"\r 11%|#   | 1/9") == ["  0%|    | 0/9", " 11%|#   | 1/9"]
    assert states(b"1 %\r", b"2 %\r", b"3", b" %\r") == ["1 %", "2 %", "3", "3 %"]
    assert states(b"\r50 %", b"\r\x1b[K") == ["50 %", ""]


def test_a_line_begun_is_no_status() -> None:
    assert states(b"Epoch 1", b"/3 ") == ["", ""]


def test_a_newline_ends_the_status() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"\r1/3")) == []
    assert list(splitter.feed(b"\r3/3\nEpoch")) == ["3/3"]
    assert splitter.status == ""
    assert list(splitter.feed(b" 2\n\r1/3")) == ["Epoch 2"]
    assert splitter.status == "1/3"


@pytest.mark.parametrize("extra", [0, 1, LONGEST_LINE, 2 * LONGEST_LINE + 1])
def test_very_long_lines_come_in_parts(extra: int) -> None:
    line = "x" * (LONGEST_LINE + extra)
    data = line.encode() + b"\nend\n"
    for reads in ([data], [data[at : at + 65536] for at in range(0, len(data), 65536)]):
        *parts, end = split(*reads)
        assert "".join(parts) == line
        assert max(map(len, parts)) <= LONGEST_LINE
        assert end == "end"


def test_a_long_line_that_ends_with_a_carriage_return_is_whole() -> None:
    line = "x" * LONGEST_LINE
    assert split(
        *(f"{line}\r\n"[at : at + 65536].encode() for at in range(0, len(line) + 2, 65536))
    ) == [line]


def test_what_never_ends_does_not_pile_up() -> None:
    splitter = LineSplitter()
    passed = 0
    for _ in range(10):
        passed += sum(map(len, splitter.feed(b"x" * LONGEST_LINE)))
    assert passed >= 9 * LONGEST_LINE
    assert list(splitter.feed(b"\r" + b"y" * 10 * LONGEST_LINE)) == []
    assert len(splitter.status) == LONGEST_STATUS
