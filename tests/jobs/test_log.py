from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from hvdtrain.jobs import log
from hvdtrain.jobs.log import (
    LAUNCHER,
    LogEntry,
    LogLine,
    LogWriter,
    format_line,
    log_end,
    parse_line,
    read_before,
    read_log,
    segment_path,
    segments,
)

TEXTS = {
    "plain": "epoch 1",
    "empty": "",
    "spaces": "  a  b ",
    "shell": "$(rm -rf /) `id` 'x' \"y\"",
    "markup": "<script>alert(1)</script>",
    "unicode": "⠋ 100 %\u2028 next",
    "like-a-line": "1764168603.123 3 o other",
    "controls": "\x1b[31mred\x00\r",
}


def _line(text: str, rank: int = 0, time_s: float = 1.5, stream: str = "stdout") -> LogLine:
    return LogLine(time_s=time_s, rank=rank, stream=stream, text=text)


def _texts(folder: Path, begin: int = 0) -> list[str | None]:
    return [one.line and one.line.text for one in read_log(folder, begin)]


@pytest.mark.parametrize("rank", [LAUNCHER, 0, 1023])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_line_is_formatted_and_parsed(text: str, rank: int) -> None:
    line = _line(text, rank, 1764168603.123, "stderr")
    data = format_line(line)
    assert data.count(b"\n") == 1
    assert parse_line(data) == line


def test_invalid_lines_and_characters() -> None:
    for data in (b"", b"x\n", b"1.5 0 o a\n", b"1.500 a o b\n"):
        assert parse_line(data) is None
    # These characters are valid in JSON, but not in a line of a file.
    assert parse_line(format_line(_line("\ud800"))) == _line("\\ud800")
    assert parse_line(format_line(_line("a\nb"))) == _line("a b")


def test_a_growing_log_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    assert _texts(folder) == []
    writer = LogWriter(folder)
    writer.append([_line("a"), _line("b", 1)])
    assert _texts(folder) == ["a", "b"]
    end = log_end(folder)
    writer.append([_line("c")])
    assert _texts(folder, end) == ["c"]
    writer.close()
    # The index was written by an earlier version, and the job has restarted.
    (folder / f"{0:020}.idx").write_text('{"begin":0,"end":7,"time":1.5,"ranks":"0"}\n')
    writer = LogWriter(folder)
    writer.append([_line("d")])
    writer.close()
    assert _texts(folder) == ["a", "b", "c", "d"]


def test_an_incomplete_line_is_terminated_by_the_next_writer(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    writer = LogWriter(folder)
    writer.append([_line("a")])
    with (folder / f"{0:020}.log").open("ab") as file:
        file.write(b"1.500 0 o hal")
    assert _texts(folder) == ["a"]
    again = LogWriter(folder)
    again.append([_line("b")])
    assert _texts(folder) == ["a", "hal", "b"]


@pytest.fixture
def long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log of 2,000 lines of about 1 KB in small segments.

    250 lines of rank 0 are followed by 250 lines of rank 1, and so on.
    """
    folder = tmp_path / "log"
    monkeypatch.setattr(log, "SEGMENT_BYTES", 256 << 10)
    writer = LogWriter(folder)
    for first in range(0, 2000, 10):
        numbers = range(first, first + 10)
        writer.append([_line(f"{n} " + "x" * 1000, n // 250 % 4, 1.0 + n) for n in numbers])
    writer.close()
    return folder


def test_segments_have_no_gaps(long_log: Path) -> None:
    assert len(segments(long_log)) == 8
    texts = _texts(long_log)
    assert [int(text.split()[0]) for text in texts if text] == list(range(2000))
    assert None not in texts


@pytest.mark.parametrize("lines", [0, 1, 3, 700, 2000, 5000])
def test_read_the_last_lines(long_log: Path, lines: int) -> None:
    part = read_before(long_log, log_end(long_log), lines)
    numbers = [int(one.line.text.split()[0]) for one in part.entries if one.line]
    assert numbers == list(range(max(0, 2000 - lines), 2000))
    part = read_before(long_log, log_end(long_log), lines, lambda line: line.rank == 0)
    assert [one.line.rank for one in part.entries if one.line] == [0] * min(lines, 500)


def _read_backwards(folder: Path, lines: int, *matches) -> list[LogEntry]:
    position, entries = log_end(folder), []
    while position > 0:
        part = read_before(folder, position, lines, *matches)
        assert part.begin < position
        position, entries = part.begin, part.entries + entries
    return entries


def _limit(monkeypatch: pytest.MonkeyPatch, *, segment: int, head: int, tail: int) -> None:
    for name, size in (("SEGMENT", segment), ("HEAD", head), ("TAIL", tail)):
        monkeypatch.setattr(log, f"{name}_BYTES", size)


@pytest.mark.parametrize("lines", [1, 7, 5000])
def test_reading_backwards_finds_the_same_lines(
    tmp_path: Path, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "log"
    _limit(monkeypatch, segment=90_000, head=100_000, tail=300_000)
    writer = LogWriter(folder)
    for number in range(700):
        length = 200_000 if number in (3, 690) else 1000
        writer.append([_line(f"{number} " + "x" * length, rank=number % 4)])
    everything = list(read_log(folder))
    assert sum(one.line is None for one in everything) == 1
    assert _read_backwards(folder, lines) == everything
    texts = [one for one in everything if one.line is None or one.line.rank == 2]
    assert _read_backwards(folder, lines, lambda line: line.rank == 2) == texts


def test_reading_backwards_skips_an_incomplete_last_line(long_log: Path) -> None:
    end = log_end(long_log)
    with segment_path(long_log, segments(long_log)[-1]).open("ab") as file:
        file.write(b"1764168603.123 0 o half")
    part = read_before(long_log, log_end(long_log), 2)
    assert part.end == part.entries[-1].end == end
    assert read_before(long_log, log_end(long_log), 2, lambda line: False).end == end


def test_searching_backwards_reads_each_line_once(long_log: Path, monkeypatch) -> None:
    parsed = []
    monkeypatch.setattr(
        "hvdtrain.jobs.log.parse_line", lambda data: parsed.append(data) or parse_line(data)
    )
    assert _read_backwards(long_log, 1, lambda line: False) == []
    assert len(parsed) == 2000


def test_a_search_that_times_out_returns_its_position(long_log: Path) -> None:
    part = read_before(long_log, log_end(long_log), 1, lambda line: False, patience_s=0)
    assert part.entries == []
    assert part.begin == log_end(long_log)


def test_the_middle_of_a_long_log_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "log"
    _limit(monkeypatch, segment=10_000, head=20_000, tail=50_000)
    writer = LogWriter(folder)
    for number in range(1000):
        writer.append([_line(f"{number:03} " + "x" * 500)])
    kept = sum(path.stat().st_size for path in folder.glob("*.log"))
    assert 70_000 <= kept <= 70_000 + 3 * 10_600
    entries = list(read_log(folder))
    [gap] = [one for one in entries if one.line is None]
    numbers = [int(one.line.text.split()[0]) for one in entries if one.line]
    assert numbers[0] == 0
    assert numbers[-1] == 999
    at = entries.index(gap)
    assert numbers[:at] == list(range(at))
    assert numbers[at:] == list(range(numbers[at], 1000))
    assert gap.end - gap.begin > 300_000
    # A reader within the gap continues after it.
    assert next(read_log(folder, gap.begin + 5)).end == gap.end


def test_lines_that_are_retried_on_a_full_disk_are_not_lost(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_disk / "log"
    monkeypatch.setattr(log, "SEGMENT_BYTES", 100_000)
    writer = LogWriter(folder)
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 700_000)
    number = 0
    with contextlib.suppress(OSError):
        while number < 1000:
            writer.append([_line(f"{number} " + "x" * 1000)])
            number += 1
    assert 100 < number < 400
    ballast.unlink()
    for again in range(number, number + 100):
        writer.append([_line(f"{again} " + "x" * 1000)])
    assert [int(t.split()[0]) for t in _texts(folder) if t] == list(range(number + 100))
