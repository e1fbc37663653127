from __future__ import annotations

import fcntl
import io
import math
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from hvdtrain.monitor.progress_bar import (
    StatusLine,
    TrainingSpeed,
    format_progress,
    terminal_columns,
)


def _format(columns: int, **changes: Any) -> str:
    values = {"epoch": 3, "epochs": 10, "done": 8, "steps": 32, "loss": 0.3149}
    return format_progress(columns, **{**values, "samples_per_s": 1234.5, "step_s": 0.5, **changes})


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            200,
            "epoch 3/10 [=======.......................] 8/32 "
            "loss = 0.31, ETA 12 s, 1234 samples/s",
        ),
        (80, "epoch 3/10 [=====..................] 8/32 loss = 0.31, ETA 12 s, 1234 samples/s"),
        (55, "epoch 3/10 8/32 loss = 0.31, ETA 12 s, 1234 samples/s"),
        (50, "epoch 3/10 [==.......] 8/32 loss = 0.31, ETA 12 s"),
        (36, "epoch 3/10 8/32 loss = 0.31"),
        (20, "epoch 3/10 8/32"),
        (8, "epoch 3"),
    ],
)
def test_the_bar_fits_the_terminal(columns: int, line: str) -> None:
    assert _format(columns) == line
    assert len(line) < columns


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"done": 32}, "] 32/32 loss = 0.31, 1234 samples/s"),
        ({"loss": math.nan, "samples_per_s": 0.0, "step_s": 0.0}, "] 8/32"),
        ({"steps": 0}, "epoch 3/10 step 8 loss = 0.31, 1234 samples/s"),
        ({"step_s": 10.1}, " ETA 4 min 3 s, 1234 samples/s"),
        ({"step_s": 200}, " ETA 1 h 20 min, 1234 samples/s"),
    ],
)
def test_unknown_values_are_omitted(changes: dict[str, float], end: str) -> None:
    assert _format(120, **changes).endswith(end)


def test_the_speed_follows_recent_steps() -> None:
    speed = TrainingSpeed()
    assert (speed.samples_per_s, speed.step_s) == (0.0, 0.0)
    speed.add(1, 64, 20.0)
    assert (speed.samples_per_s, speed.step_s) == (3.2, 20.0)
    speed.add(2, 128, 0.5)
    assert (speed.samples_per_s, speed.step_s) == (256.0, 0.25), "the first includes compilation"
    for _ in range(200):
        speed.add(1, 64, 1.0)
    assert speed.samples_per_s == pytest.approx(64, rel=0.01)
    assert speed.step_s == pytest.approx(1.0, rel=0.01)


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as stream:
        yield stream
    os.close(main)


def test_width_of_a_terminal(terminal: TextIO) -> None:
    assert terminal_columns(terminal) == 0
    fcntl.ioctl(terminal.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    assert terminal_columns(terminal) == 97


def test_files_and_buffers_are_not_terminals(tmp_path) -> None:
    assert terminal_columns(io.StringIO()) == 0
    with (tmp_path / "file").open("w") as file:
        assert terminal_columns(file) == 0
    closed = io.StringIO()
    closed.close()
    assert terminal_columns(closed) == 0


def test_without_a_terminal_only_lines_are_printed() -> None:
    stream = io.StringIO()
    line = StatusLine(stream, 0)
    line.show("status")
    line.print("first")
    line.clear()
    line.print("second")
    assert stream.getvalue() == "first\nsecond\n"


def test_lines_are_printed_above_the_status() -> None:
    stream = io.StringIO()
    line = StatusLine(stream, 10)
    line.show("a long status")
    line.print("line")
    line.clear()
    assert stream.getvalue() == "\r\x1b[Ka long st\r\x1b[Kline\na long st\r\x1b[K"
