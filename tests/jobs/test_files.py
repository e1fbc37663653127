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


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert list(read_json_lines(path)) == []
    for number in range(3):
        append_json_line(path, {"number": number, "text": "a\nb"})
    assert [line["number"] for line in read_json_lines(path)] == [0, 1, 2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_half_written_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_json_line(path, {"number": 0})
    with path.open("ab") as file:
        file.write(b'{"number": 1, "te')
    append_json_line(path, {"number": 2})
    assert [line["number"] for line in read_json_lines(path)] == [0, 2]


def test_what_is_no_object_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'[1]\n7\n\xff\xfe\n\n{"number": 3}\n')
    assert list(read_json_lines(path)) == [{"number": 3}]


def test_the_last_object_is_found_without_reading_all(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert last_json_line(path) == {}
    path.touch()
    assert last_json_line(path) == {}
    for number in range(3000):
        append_json_line(path, {"number": number})
    with path.open("ab") as file:
        file.write(b'{"number": 3000')
    assert last_json_line(path) == {"number": 2999}
    newest = [line["number"] for line in newest_json_lines(path)]
    assert newest == list(range(newest[0], 3000))
    assert 500 < len(newest) < 1500
    append_json_line(path, {"long": "x" * 500_000})
    assert len(last_json_line(path)["long"]) == 500_000
    assert "long" in newest_json_lines(path)[-1]


def test_a_long_file_is_sampled(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert list(sampled_json_lines(path, 10)) == []
    for count in (1, 2, 9, 10, 11, 95):
        path.unlink(missing_ok=True)
        for number in range(count):
            append_json_line(path, {"number": number})
        numbers = [row["number"] for row in sampled_json_lines(path, 10)]
        assert (numbers[0], numbers[-1]) == (0, count - 1)
        assert numbers == sorted(set(numbers))
        assert min(count, 5) <= len(numbers) <= 12
    for number in range(95, 5000):
        append_json_line(path, {"number": number, "text": "x" * 40})
    numbers = [row["number"] for row in sampled_json_lines(path, 10)]
    assert (numbers[0], numbers[-1]) == (0, 4999)
    assert numbers == sorted(set(numbers))
    assert len(numbers) <= 12


def test_on_a_full_disk_lines_are_written_whole_or_not_at_all(small_disk: Path) -> None:
    descriptor = os.open(small_disk / "lines", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    line = b"x" * 1000 + b"\n"
    append_whole(descriptor, line)
    with pytest.raises(OSError, match="No space"):
        append_whole(descriptor, line * (SMALL_BYTES // 500))
    assert os.fstat(descriptor).st_size == len(line)
    assert append_whole(descriptor, line) == 2 * len(line)
    os.close(descriptor)
