"""The launcher's stdout and stderr: whoever reads them, or does not, the job goes on."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from typing import Any

import pytest

from hvdtrain.agent import backlog
from hvdtrain.launch.screen import Screen
from tests.harness.jobs import REPOSITORY


def in_a_process(code: str, encoding: str = "utf-8", **streams: Any) -> Any:
    program = f"""if True:
        import sys
        from hvdtrain.launch.screen import Screen
        screen = Screen(sys.stdout, sys.stderr)
        {code}
        screen.stderr.write("the job goes on\\n")
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


def test_the_job_goes_on_when_nobody_reads_any_more() -> None:
    reader = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    assert reader.wait(timeout=30) == 0
    code = "for _ in range(3): screen.stdout.write('text\\n')"
    done = in_a_process(code, stdout=reader.stdin)
    assert reader.stdin is not None
    reader.stdin.close()
    assert (done.returncode, done.stderr) == (3, "the job goes on\n")


def test_the_job_goes_on_when_the_disk_is_full() -> None:
    code = "for _ in range(3): screen.stdout.write('text\\n')"
    with open("/dev/full", "w") as full:
        done = in_a_process(code, stdout=full)
    assert (done.returncode, done.stderr) == (3, "the job goes on\n")


def test_characters_that_the_locale_has_not_become_question_marks() -> None:
    code = r"screen.stdout.write('1/3 \u2501\u2501 \xe9\n')"
    done = in_a_process(code, "latin-1", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (3, "1/3 ?? é\n"), done.stderr


def test_what_was_printed_before_comes_before() -> None:
    code = "print('plan'); screen = Screen(sys.stdout, sys.stderr); screen.stdout.write('line\\n')"
    assert in_a_process(code, stdout=subprocess.PIPE).stdout == "plan\nline\n"


def test_a_terminal_gets_both_streams_in_their_order() -> None:
    main, side = pty.openpty()
    with os.fdopen(side, "w") as out, os.fdopen(main, "rb", buffering=0) as terminal:
        with os.fdopen(os.dup(out.fileno()), "w") as err:
            screen = Screen(out, err)
            assert screen.stdout.isatty()
            for number in range(100):
                (screen.stdout, screen.stderr)[number % 2].write(f"{number}\n")
            screen.close(10.0, lambda: False)
        assert terminal.read(4000).split() == [b"%d" % number for number in range(100)]


def test_a_reader_that_pauses_gets_the_number_of_lines_and_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backlog, "MOST_BYTES", 1 << 19)
    monkeypatch.setattr(backlog, "HOLD_BYTES", 1 << 18)
    reader, descriptor = os.pipe()
    with os.fdopen(descriptor, "w") as out, os.fdopen(reader) as lines:
        screen = Screen(out, io.StringIO())
        for number in range(2000):
            screen.stdout.write(f"{number} {'x' * 1000}\n")
        assert screen.holds_up
        shown = []
        for line in lines:
            shown.append(line[:40].partition(" x")[0])
            if shown[-1] == "1999":
                break
        screen.close(10.0, lambda: False)
    # The thread may have read a part of the backlog between two drops.
    gaps = [line for line in shown if line.startswith("hvdtrain run: ")]
    numbers = [int(line) for line in shown if line not in gaps]
    dropped = [int(line.split()[2]) for line in gaps]
    assert 0 < sum(dropped) == 2000 - len(numbers)
    assert numbers == sorted(numbers)
    assert numbers[-400:] == list(range(1600, 2000)), "the newest lines are kept"


def test_a_stream_in_memory_is_written_at_once() -> None:
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out, err)
    screen.stdout.write("a\n")
    screen.stderr.write("b\n")
    assert (out.getvalue(), err.getvalue()) == ("a\n", "b\n")
