"""The code that a program ends with, as functions at exit learn it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from hvdtrain.collectives.exit_code_watch import ExitCodeWatch
before = sys.exit
watch = ExitCodeWatch()
def tell():
    watch.close()
    assert before == sys.exit
    print(watch.code)
atexit.register(tell)
"""

# The end of a program, and the code that it has.
ENDS = {
    "none": ("", 0),
    "exit": ("sys.exit(7)", 7),
    "exit-with-nothing": ("sys.exit()", 0),
    "exit-with-words": ("sys.exit('no data')", 1),
    "exit-with-a-large-number": ("sys.exit(-1)", 255),
    "exception-class": ("raise SystemExit", 0),
    "within-a-function": ("def main():\n    sys.exit(7)\nmain()", 7),
    "after-others": ("try: sys.exit(7)\nfinally: sys.exit(8)", 8),
    "caught": ("try: sys.exit(7)\nexcept SystemExit as end: assert end.code == 7", 0),
    "caught-with-the-class": ("try: raise SystemExit(7)\nexcept SystemExit as e: e.code", 0),
    "arguments": ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", 2),
    "in-a-thread": ("import threading; threading.Thread(target=sys.exit, args=[7]).start()", 0),
    "changed": ("try: sys.exit(7)\nexcept SystemExit as end: end.code = 8; raise", 8),
    "pickled": (
        "import pickle\ntry: sys.exit(7)\n"
        "except SystemExit as end: assert pickle.loads(pickle.dumps(end)).code == 7",
        0,
    ),
}


@pytest.mark.parametrize(("body", "code"), ENDS.values(), ids=ENDS)
def test_code_is_known(body: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + body],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, f"{code}\n")
