"""What the ranks write comes out with their tags, beside a status that is drawn again."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from hvdtrain.launch.console import Console


class Terminal(io.StringIO):
    """Remembers what is written to it, as a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that a terminal would show, without their colours."""
        lines = []
        for line in re.sub(r"\x1b\[\d+m", "", self.getvalue()).split("\n"):
            shown = ""
            for part in re.split(r"(\r|\x1b\[K)", line):
                if part == "\x1b[K":
                    shown = ""
                elif part != "\r":
                    shown += part
            lines.append(shown)
        return lines


def make(
    out: io.StringIO, err: io.StringIO, *, ranks: int = 2, with_host: bool = False, chief_only=False
) -> Console:
    return Console(out, err, ranks=ranks, with_host=with_host, chief_only=chief_only)


@pytest.mark.parametrize(
    ("ranks", "rank", "with_host", "tag"),
    [
        (1, 0, False, "[0]"),
        (10, 9, False, "[9]"),
        (11, 9, False, "[ 9]"),
        (11, 10, False, "[10]"),
        (1000, 7, True, "[  7 node1]"),
        (2, 1, True, "[1 node1]"),
    ],
)
def test_tags(ranks: int, rank: int, with_host: bool, tag: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    console = make(out, err, ranks=ranks, with_host=with_host)
    console.line(rank, "node1", "stdout", "loss: 1.5")
    console.line(rank, "node1", "stderr", "")
    assert (out.getvalue(), err.getvalue()) == (f"{tag} loss: 1.5\n", f"{tag} \n")


def test_lines_go_where_the_ranks_wrote_them() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = make(out, err)
    console.line(0, "node1", "stdout", "a")
    console.line(1, "node1", "stderr", "b")
    console.notice("two\nlines")
    assert out.getvalue() == "[0] a\n"
    assert err.getvalue() == "[1] b\nhvdtrain run: two\nhvdtrain run: lines\n"


def test_lines_begin_with_the_time_on_request() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, ranks=2, with_host=False, chief_only=False, timestamps=True)
    console.line(1, "node1", "stdout", "loss: 1.5")
    console.notice("two\nlines")
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{time} \[1\] loss: 1.5\n", out.getvalue())
    assert re.fullmatch(rf"({time} hvdtrain run: (two|lines)\n){{2}}", err.getvalue())


def test_colours_are_for_terminals() -> None:
    out, err = Terminal(), io.StringIO()
    console = make(out, err, ranks=12)
    for rank in (0, 1, 10, 11):
        console.line(rank, "node1", "stdout", "text")
        console.line(rank, "node1", "stderr", "text")
    colours = re.findall(r"\x1b\[(\d+)m\[ ?\d+\]\x1b\[0m text\n", out.getvalue())
    assert len(colours) == 4
    assert colours[0] != colours[1]
    assert colours[:2] == colours[2:], "the colours come round"
    assert err.getvalue() == "[ 0] text\n[ 1] text\n[10] text\n[11] text\n"


def test_the_chief_alone_and_untagged() -> None:
    out, err = Terminal(), io.StringIO()
    console = make(out, err, with_host=True, chief_only=True)
    for rank in (0, 1):
        console.line(rank, "node1", "stdout", f"out {rank}")
        console.line(rank, "node1", "stderr", f"err {rank}")
    assert (out.getvalue(), err.getvalue()) == ("out 0\n", "err 0\n")


def test_another_rank_is_the_chief_when_it_was_lost() -> None:
    out, err = Terminal(), io.StringIO()
    console = make(out, err, ranks=3, chief_only=True)
    console.status(0, "1/9")
    console.leave_behind(2)
    assert out.screen() == ["1/9"]
    console.leave_behind(0)
    assert out.screen() == [""], "a dead rank's status goes"
    for rank in (0, 1, 2):
        console.line(rank, "node1", "stdout", f"out {rank}")
        console.status(rank, f"{rank}/9")
    assert out.screen() == ["out 1", "1/9"]


@pytest.mark.parametrize("chief_only", [False, True])
def test_the_status_stays_below_the_lines(chief_only: bool) -> None:
    terminal = Terminal()
    console = make(terminal, terminal, chief_only=chief_only)
    tag = "" if chief_only else "[0] "
    console.status(0, "1/3 [=>.]")
    assert terminal.screen() == ["1/3 [=>.]"]
    console.line(0, "node1", "stdout", "saved")
    assert terminal.screen() == [f"{tag}saved", "1/3 [=>.]"]
    console.status(0, "2/3")
    assert terminal.screen() == [f"{tag}saved", "2/3"]
    console.line(0, "node1", "stderr", "careful")
    assert terminal.screen() == [f"{tag}saved", f"{tag}careful", "2/3"]
    console.notice("the end")
    assert terminal.screen()[2:] == ["hvdtrain run: the end", "2/3"]
    console.status(0, "")
    console.line(0, "node1", "stdout", "3/3")
    assert terminal.screen()[3:] == [f"{tag}3/3", ""]


def test_the_status_does_not_touch_what_goes_to_a_file() -> None:
    out, err = Terminal(), io.StringIO()
    console = make(out, err)
    console.status(0, "1/3")
    console.line(1, "node1", "stderr", "careful")
    assert err.getvalue() == "[1] careful\n"
    assert out.screen() == ["1/3"]


def test_only_the_chiefs_status_is_shown_and_only_on_a_terminal() -> None:
    terminal, out, err = Terminal(), io.StringIO(), Terminal()
    make(terminal, err).status(1, "1/3")
    make(out, err).status(0, "1/3")
    assert (terminal.getvalue(), out.getvalue(), err.getvalue()) == ("", "", "")


def test_what_several_ranks_print_is_shown_once() -> None:
    out, err = Terminal(), io.StringIO()
    console = Console(
        out, err, ranks=12, with_host=True, chief_only=False, collapse=True, environ={}
    )
    for rank in range(12):
        console.line(rank, f"node{rank // 8}", "stdout", "hello")
    for rank in (3, 0):
        console.line(rank, "node0", "stderr", "careful")
    console.line(3, "node0", "stderr", "alone")
    console.review()
    assert (out.screen(), err.getvalue()) == (["[0-11] hello", ""], ""), "the others may come"
    console.notice("the end")
    assert err.getvalue().splitlines() == [
        *("[0,3 node0] careful", "[ 3 node0] alone", "hvdtrain run: the end")
    ]


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"TERM": "dumb"}, "[0] text\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "\r\x1b[K1/3\r\x1b[K[0] text\n1/3"),
    ],
)
def test_what_the_terminal_can_do(environ: dict[str, str], shown: str) -> None:
    out = Terminal()
    console = Console(out, out, ranks=2, with_host=False, chief_only=False, environ=environ)
    console.status(0, "1/3")
    console.line(0, "node1", "stdout", "text")
    assert out.getvalue() == shown


def test_the_status_fits_into_the_window_as_it_is_now() -> None:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as out, os.fdopen(main, "rb", buffering=0) as screen:
        console = Console(out, out, ranks=2, with_host=False, chief_only=False)
        for columns, shown in ((0, "0123456789"), (8, "0123456"), (20, "0123456789")):
            fcntl.ioctl(out, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            console.status(0, "0123456789")
            assert screen.read(100).decode() == f"\r\x1b[K{shown}"
