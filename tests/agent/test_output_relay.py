from __future__ import annotations

import pytest

from hvdtrain.agent.messages import MAX_LINE_LENGTH
from hvdtrain.agent.output_relay import MAX_STATUS_LENGTH, LineSplitter


def split(*reads: bytes) -> list[str]:
    """Return the lines of a stream that arrives in these reads."""
    splitter = LineSplitter()
    lines = [line for data in reads for line in splitter.feed(data)]
    lines += splitter.feed(b"", final=True)
    assert splitter.status == ""
    return lines


def states(*reads: bytes) -> list[str]:
    """Return the status after each of these reads."""
    splitter = LineSplitter()
    states = []
    for data in reads:
        assert list(splitter.feed(data)) == []
        states.append(splitter.status)
    return states


LINES = {
    "nothing": (b"", []),
    "one": (b"one\n", ["one"]),
    "empty-lines": (b"\n\n", ["", ""]),
    "rest-without-end": (b"one\ntwo", ["one", "two"]),
    "spaces-stay": (b"  one \t\n", ["  one \t"]),
    "crlf": (b"one\r\ntwo\r\n\r\n", ["one", "two", ""]),
    "multi-byte": ("höher\n━━ 日本 🎉\n".encode(), ["höher", "━━ 日本 🎉"]),
    "invalid-utf-8": (b"a\xffb\n", ["a�b"]),
    "character-never-completed": (b"a\n\xe2\x94", ["a", "�"]),
    "bar": (b"\r1/3 [=>.]\r2/3 [==>]\r3/3 [===]\nend\n", ["3/3 [===]", "end"]),
    "bar-ends-with-return": (b"1 %\r2 %\r\n", ["2 %"]),
    "bar-erases": (b"loading\r\x1b[Kdone\n", ["done"]),
    "bar-without-end": (b"one\n\r1 %\r2 %", ["one", "2 %"]),
    "bar-erased": (b"\r50 %\r\x1b[K", []),
}


@pytest.mark.parametrize(("data", "lines"), LINES.values(), ids=LINES)
def test_lines_from_any_parts(data: bytes, lines: list[str]) -> None:
    assert split(data) == lines
    for cut in range(len(data) + 1):
        assert split(data[:cut], data[cut:]) == lines, f"cut at {cut}"
    assert split(*(data[at : at + 1] for at in range(len(data)))) == lines


def test_a_line_is_returned_once_complete() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"one\ntw")) == ["one"]
    assert list(splitter.feed(b"")) == []
    assert list(splitter.feed(b"o\n")) == ["two"]


def test_the_status_is_the_last_drawing() -> None:
    keras = [b"\r1/3 ", b"[=>.]", b"\b\b\b\b\r2/3 [==>]"]
    assert states(*keras) == ["1/3 ", "1/3 [=>.]", "2/3 [==>]"]
    assert states(b"\r  0%|    | 0/9", b"\r 11%|#   | 1/9") == ["  0%|    | 0/9", " 11%|#   | 1/9"]
    assert states(b"1 %\r", b"2 %\r", b"3", b" %\r") == ["1 %", "2 %", "3", "3 %"]
    assert states(b"\r50 %", b"\r\x1b[K") == ["50 %", ""]


def test_an_incomplete_line_is_not_a_status() -> None:
    assert states(b"Epoch 1", b"/3 ") == ["", ""]


def test_a_newline_ends_the_status() -> None:
    splitter = LineSplitter()
    assert list(splitter.feed(b"\r1/3")) == []
    assert list(splitter.feed(b"\r3/3\nEpoch")) == ["3/3"]
    assert splitter.status == ""
    assert list(splitter.feed(b" 2\n\r1/3")) == ["Epoch 2"]
    assert splitter.status == "1/3"


@pytest.mark.parametrize("extra", [0, 1, MAX_LINE_LENGTH, 2 * MAX_LINE_LENGTH + 1])
def test_long_lines_are_split(extra: int) -> None:
    line = "x" * (MAX_LINE_LENGTH + extra)
    data = line.encode() + b"\nend\n"
    for reads in ([data], [data[at : at + 65536] for at in range(0, len(data), 65536)]):
        *parts, end = split(*reads)
        assert "".join(parts) == line
        assert max(map(len, parts)) <= MAX_LINE_LENGTH
        assert end == "end"


def test_a_long_line_before_a_carriage_return_is_not_split() -> None:
    line = "x" * MAX_LINE_LENGTH
    assert split(
        *(f"{line}\r\n"[at : at + 65536].encode() for at in range(0, len(line) + 2, 65536))
    ) == [line]


def test_endless_lines_are_not_kept() -> None:
    splitter = LineSplitter()
    total = 0
    for _ in range(10):
        total += sum(map(len, splitter.feed(b"x" * MAX_LINE_LENGTH)))
    assert total >= 9 * MAX_LINE_LENGTH
    assert list(splitter.feed(b"\r" + b"y" * 10 * MAX_LINE_LENGTH)) == []
    assert len(splitter.status) == MAX_STATUS_LENGTH
