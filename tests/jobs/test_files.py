from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.jobs.files import (
    append_json_line,
    append_whole,
    last_json_line,
    newest_json_lines,
    read_json_lines,
    sampled_json_lines,
)
from tests.checkpoint.disks import SMALL_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def _numbers(rows) -> list[int]:
    return [row["number"] for row in rows]


def test_appended_rows_are_read(path: Path) -> None:
    assert list(read_json_lines(path)) == []
    for number in range(3):
        append_json_line(path, {"number": number, "text": "a\nb"})
    assert _numbers(read_json_lines(path)) == [0, 1, 2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_incomplete_and_invalid_rows_are_skipped(path: Path) -> None:
    append_json_line(path, {"number": 0})
    with path.open("ab") as file:
        file.write(b'[1]\n7\n\xff\xfe\n\n{"number": 1, "te')
    append_json_line(path, {"number": 2})
    assert _numbers(read_json_lines(path)) == [0, 2]


def test_the_last_row_is_found_without_reading_all(path: Path) -> None:
    assert last_json_line(path) == {}
    path.touch()
    assert last_json_line(path) == {}
    for number in range(3000):
        append_json_line(path, {"number": number})
    with path.open("ab") as file:
        file.write(b'{"number": 3000')
    assert last_json_line(path) == {"number": 2999}
    newest = _numbers(newest_json_lines(path))
    assert newest == list(range(newest[0], 3000))
    assert 500 < len(newest) < 1500
    append_json_line(path, {"long": "x" * 500_000})
    assert len(last_json_line(path)["long"]) == 500_000
    assert "long" in newest_json_lines(path)[-1]


def test_a_long_file_is_sampled(path: Path) -> None:
    assert list(sampled_json_lines(path, 10)) == []
    for count in (1, 2, 9, 10, 11, 95, 5000):
        path.write_text("".join(f'{{"number": {n}, "text": "{"x" * 40}"}}\n' for n in range(count)))
        numbers = _numbers(sampled_json_lines(path, 10))
        assert (numbers[0], numbers[-1]) == (0, count - 1)
        assert numbers == sorted(set(numbers))
        assert min(count, 5) <= len(numbers) <= 12


def test_a_full_disk_takes_complete_lines_or_none(small_disk: Path) -> None:
    descriptor = os.open(small_disk / "lines", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    line = b"x" * 1000 + b"\n"
    append_whole(descriptor, line)
    with pytest.raises(OSError, match="No space"):
        append_whole(descriptor, line * (SMALL_BYTES // 500))
    assert os.fstat(descriptor).st_size == len(line)
    assert append_whole(descriptor, line) == 2 * len(line)
    os.close(descriptor)
