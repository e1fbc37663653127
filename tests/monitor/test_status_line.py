from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import termios
from collections.abc import Iterator
from typing import TextIO

import pytest

from hvdtrain.monitor.status_line import StatusLine, terminal_columns


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as stream:
        yield stream
    os.close(main)


def test_a_terminal_has_its_width(terminal: TextIO) -> None:
    fcntl.ioctl(terminal.fileno(), termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    assert terminal_columns(terminal) == 97


def test_a_terminal_without_size_is_nobodys(terminal: TextIO) -> None:
    assert terminal_columns(terminal) == 0


def test_files_pipes_and_buffers_are_no_terminals(tmp_path) -> None:
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


def test_lines_go_above_the_status() -> None:
    stream = io.StringIO()
    line = StatusLine(stream, 10)
    line.show("a long status")
    line.print("line")
    line.clear()
    assert stream.getvalue() == "\r\x1b[Ka long st\r\x1b[Kline\na long st\r\x1b[K"
