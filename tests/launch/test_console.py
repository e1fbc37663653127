"""The output of ranks: tagged and collapsed lines, the status line, and the screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import random
import re
import struct
import subprocess
import sys
import termios
import time
from typing import Any

import pytest

from hvdtrain.launch.console import (
    MAX_WAITING,
    WINDOW_S,
    Console,
    Screen,
    _format_ranks,
    _LineQueues,
    early_info_filter,
)
from tests.harness.jobs import REPOSITORY


class Terminal(io.StringIO):
    """A terminal that records what is written."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines that a terminal would show, without colours."""
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
    console = Console(out, err, ranks=ranks, with_host=with_host)
    console.line(rank, "node1", "stdout", "loss: 1.5")
    console.line(rank, "node1", "stderr", "")
    assert (out.getvalue(), err.getvalue()) == (f"{tag} loss: 1.5\n", f"{tag} \n")


def test_timestamps() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, ranks=2, timestamps=True)
    console.line(1, "node1", "stdout", "loss: 1.5")
    console.notice("two\nlines")
    time = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{time} \[1\] loss: 1.5\n", out.getvalue())
    assert re.fullmatch(rf"({time} hvdtrain run: (two|lines)\n){{2}}", err.getvalue())


def test_only_terminals_get_colours() -> None:
    out, err = Terminal(), io.StringIO()
    console = Console(out, err, ranks=12)
    for rank in (0, 1, 10, 11):
        console.line(rank, "node1", "stdout", "text")
        console.line(rank, "node1", "stderr", "text")
    colours = re.findall(r"\x1b\[(\d+)m\[ ?\d+\]\x1b\[0m text\n", out.getvalue())
    assert len(colours) == 4
    assert colours[0] != colours[1]
    assert colours[:2] == colours[2:], "colours repeat"
    assert err.getvalue() == "[ 0] text\n[ 1] text\n[10] text\n[11] text\n"


def test_chief_only() -> None:
    out, err = Terminal(), io.StringIO()
    console = Console(out, err, ranks=2, with_host=True, chief_only=True)
    for rank in (0, 1):
        console.line(rank, "node1", "stdout", f"out {rank}")
        console.line(rank, "node1", "stderr", f"err {rank}")
    assert (out.getvalue(), err.getvalue()) == ("out 0\n", "err 0\n")


def test_a_remaining_rank_becomes_the_chief_after_a_loss() -> None:
    out, err = Terminal(), io.StringIO()
    console = Console(out, err, ranks=3, chief_only=True)
    console.status(0, "1/9")
    console.drop_rank(2)
    assert out.screen() == ["1/9"]
    console.drop_rank(0)
    assert out.screen() == [""], "the status of a lost rank is erased"
    for rank in (0, 1, 2):
        console.line(rank, "node1", "stdout", f"out {rank}")
        console.status(rank, f"{rank}/9")
    assert out.screen() == ["out 1", "1/9"]


@pytest.mark.parametrize("chief_only", [False, True])
def test_the_status_stays_below_the_lines(chief_only: bool) -> None:
    terminal = Terminal()
    console = Console(terminal, terminal, ranks=2, chief_only=chief_only)
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


def test_only_the_chiefs_status_is_shown_and_only_on_a_terminal() -> None:
    terminal, out, err = Terminal(), io.StringIO(), io.StringIO()
    Console(out, err, ranks=2).status(0, "1/3")
    console = Console(terminal, err, ranks=2)
    console.status(1, "2/3")
    assert (terminal.getvalue(), out.getvalue(), err.getvalue()) == ("", "", "")
    console.status(0, "1/3")
    console.line(1, "node1", "stderr", "careful")
    assert (terminal.screen(), err.getvalue()) == (["1/3"], "[1] careful\n")


def collapsing(ranks: int, with_host: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(out, out, ranks=ranks, with_host=with_host, collapse=True)
    return console, out


COLLAPSED: dict[str, tuple[list[tuple[int, str]], list[str]]] = {
    "all-ranks": ([(rank, "hello") for rank in (2, 0, 3, 1)], ["[0-3] hello"]),
    "some": ([(3, "hello"), (0, "hello"), (3, "a")], ["[0,3] hello", "[3] a"]),
    "repeated": (
        [(0, "a"), (0, "a"), (1, "a"), (1, "a"), (1, "a")],
        ["[0,1] a", "[0,1] a", "[1] a"],
    ),
    "own-lines-before": (
        [(0, "own 0"), (0, "a"), (0, "b"), (1, "own 1"), (1, "a"), (1, "b")],
        ["[0] own 0", "[1] own 1", "[0,1] a", "[0,1] b"],
    ),
    "opposite-orders": ([(0, "a"), (0, "b"), (1, "b"), (1, "a")], ["[0] a", "[0,1] b", "[1] a"]),
    "logged-at-different-times": (
        [
            (0, "W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] No GPU"),
            (1, "W0000 00:00:1795552261.391135    1728 gpu_device.cc:2342] No GPU"),
            (2, "2026-11-24 20:29:51,123 WARNING slow"),
            (3, "2026-11-24 20:29:51,124 WARNING slow"),
        ],
        [
            "[0,1] W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] No GPU",
            "[2,3] 2026-11-24 20:29:51,123 WARNING slow",
        ],
    ),
}


@pytest.mark.parametrize(("lines", "shown"), COLLAPSED.values(), ids=COLLAPSED)
def test_equal_lines_of_several_ranks_are_shown_once(
    lines: list[tuple[int, str]], shown: list[str]
) -> None:
    console, out = collapsing(4)
    for rank, text in lines:
        console.line(rank, "node1", "stdout", text)
    console.flush()
    assert out.getvalue().splitlines() == shown


def test_a_line_waits_unless_all_ranks_have_printed_it() -> None:
    console, out = collapsing(2)
    for rank, text in ((0, "a"), (0, "b"), (1, "a")):
        console.line(rank, "node1", "stdout", text)
    start = time.monotonic()
    console.review()
    assert out.getvalue() == "[0,1] a\n"
    console.review(start + 2 * WINDOW_S)
    assert out.getvalue() == "[0,1] a\n[0] b\n"
    for number in range(3 * MAX_WAITING):
        console.line(0, "node1", "stdout", str(number))
    console.review(start)
    assert len(out.getvalue().splitlines()) == 2 + 2 * MAX_WAITING, "a full queue does not wait"
    console.notice("the end")
    assert out.getvalue().splitlines()[2:-1] == [f"[0] {n}" for n in range(3 * MAX_WAITING)]


def test_collapsed_lines_keep_streams_apart_and_name_a_common_host() -> None:
    out, err = io.StringIO(), io.StringIO()
    console = Console(out, err, ranks=12, with_host=True, chief_only=False, collapse=True)
    for rank in range(12):
        console.line(rank, f"node{rank // 8}", "stdout", "hello")
    for rank in (3, 0):
        console.line(rank, "node0", "stderr", "hello")
    console.flush()
    assert (out.getvalue(), err.getvalue()) == ("[0-11] hello\n", "[0,3 node0] hello\n")


def test_no_line_is_lost_and_each_rank_keeps_its_order() -> None:
    dice = random.Random(0)
    queues, shown = _LineQueues(64), []
    printed: dict[int, list[str]] = {rank: [] for rank in range(64)}
    for step in range(5000):
        rank, now = dice.randrange(64), step / 2000
        text = f"{len(printed[rank]) // 4}.{dice.randrange(3)}"
        printed[rank].append(text)
        queues.add(rank, "node1", "stdout", text, now)
        shown += queues.take(now)
    shown += queues.take(float("inf"))
    for rank, lines in printed.items():
        assert [line.text for line, hosts in shown if rank in hosts] == lines
    assert len(shown) < 2500, "of 5000 lines"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3, 0], "0,3"),
        ([7, *range(4)], "0-3,7"),
        (range(64), "0-63"),
        (range(0, 64, 2), "0,2,4,... 32 ranks"),
        ([*range(100), *range(200, 300), *range(400, 500)], "0-99,200-299,400-499"),
    ],
)
def test_ranks_are_abbreviated(ranks: list[int], text: str) -> None:
    assert _format_ranks(ranks) == text


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({"TERM": "dumb"}, "[0] text\n"),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "\r\x1b[K1/3\r\x1b[K[0] text\n1/3"),
    ],
)
def test_term_and_no_color(environ: dict[str, str], shown: str) -> None:
    out = Terminal()
    console = Console(out, out, ranks=2, environ=environ)
    console.status(0, "1/3")
    console.line(0, "node1", "stdout", "text")
    assert out.getvalue() == shown


def test_the_status_fits_into_a_resized_window() -> None:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as out, os.fdopen(main, "rb", buffering=0) as screen:
        console = Console(out, out, ranks=2)
        for columns, shown in ((0, "0123456789"), (8, "0123456"), (20, "0123456789")):
            fcntl.ioctl(out, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            console.status(0, "0123456789")
            assert screen.read(100).decode() == f"\r\x1b[K{shown}"


def in_a_process(code: str, encoding: str = "utf-8", **streams: Any) -> Any:
    program = f"""if True:
        import sys
        from hvdtrain.launch.console import Screen
        screen = Screen(sys.stdout, sys.stderr)
        {code}
        screen.stderr.write("the job continues\\n")
        screen.close(30.0, lambda: False)
        sys.exit(3)
    """
    return subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program],
        env={"PYTHONIOENCODING": encoding},
        stderr=subprocess.PIPE,
        cwd=REPOSITORY,
        encoding=encoding,
        timeout=30,
        check=False,
        **streams,
    )


def test_the_job_continues_after_the_reader_has_closed() -> None:
    reader = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    assert reader.wait(timeout=30) == 0
    code = "for _ in range(3): screen.stdout.write('text\\n')"
    done = in_a_process(code, stdout=reader.stdin)
    assert reader.stdin is not None
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (3, "the job continues\n")


def test_the_job_continues_when_the_disk_is_full() -> None:
    code = "for _ in range(3): screen.stdout.write('text\\n')"
    with open("/dev/full", "w") as full:
        done = in_a_process(code, stdout=full)
    assert (done.returncode, done.stderr) == (3, "the job continues\n")


def test_unencodable_characters_become_question_marks() -> None:
    code = r"screen.stdout.write('1/3 \u2501\u2501 \xe9\n')"
    done = in_a_process(code, "latin-1", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, "1/3 ?? é\n"), done.stderr


def test_earlier_output_is_shown_first() -> None:
    code = "print('plan'); screen = Screen(sys.stdout, sys.stderr); screen.stdout.write('line\\n')"
    assert in_a_process(code, stdout=subprocess.PIPE).stdout == "plan\nline\n"


def test_a_terminal_gets_both_streams_in_order() -> None:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as out, os.fdopen(main, "rb", buffering=0) as terminal:
        with os.fdopen(os.dup(out.fileno()), "w") as err:
            screen = Screen(out, err)
            assert screen.stdout.isatty()
            for number in range(100):
                (screen.stdout, screen.stderr)[number % 2].write(f"{number}\n")
            screen.close(10.0, lambda: False)
        assert terminal.read(4000).split() == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize(
    ("level", "hidden"),
    [(None, True), ("1", True), ("3", True), ("0", False), ("", False), ("x", False)],
)
def test_early_info_is_hidden_unless_requested(level: str | None, hidden: bool) -> None:
    environ = {} if level is None else {"TF_CPP_MIN_LOG_LEVEL": level}
    assert early_info_filter(environ)("I0000 00:00:1.0   17820 port.cc:153] oneDNN is on") is hidden


@pytest.mark.parametrize(
    ("line", "is_hidden"),
    [
        ("I0000 00:00:1795552261.046417   17820 port.cc:153] oneDNN is on", True),
        (
            "WARNING: All log messages before absl::InitializeLog() is called "
            "are written to STDERR",
            True,
        ),
        ("W0000 00:00:1795552261.046417   17820 gpu_device.cc:2342] Cannot dlopen", False),
        # Printed by the program through absl-py.
        ("I1124 20:29:51.046417 140 train.py:12] epoch 3", False),
        ("", False),
    ],
)
def test_early_info_filter(line: str, is_hidden: bool) -> None:
    assert early_info_filter({})(line) is is_hidden
