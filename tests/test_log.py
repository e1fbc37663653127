"""What hvdtrain says of itself: from which level on, and beside what logging a program has."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from hvdtrain.log import LOGGER, show
from tests.launch.jobs import HVDTRAIN, OWN_DEFAULTS, program

LEVELS = ("debug", "info", "warning", "error")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    show("error")
    show(level)
    for each in LEVELS:
        getattr(logging.getLogger("hvdtrain.keras.saving"), each)(each)
    shown = LEVELS[LEVELS.index(level) :]
    assert capsys.readouterr().err == "".join(f"hvdtrain: {each}\n" for each in shown)


def test_time_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    show("info", tag="[3] ", with_time=True)
    LOGGER.info("well")
    assert re.fullmatch(TIME + r" \[3\] hvdtrain: well\n", capsys.readouterr().err)


PROGRAMS = {
    "configured": "logging.basicConfig(format='root %(message)s'); show('info')",
    "configured later": "show('info'); logging.basicConfig(format='root %(message)s')",
    "its own": "logging.basicConfig(format='root %(message)s', level='INFO'); "
    "LOGGER.addHandler(logging.NullHandler()); show('info')",
    "handed over": "show('info'); LOGGER.handlers.clear(); LOGGER.propagate = True; "
    "logging.basicConfig(format='root %(message)s')",
}
SHOWN = ("hvdtrain: well", "hvdtrain: well", "root well", "root well")


@pytest.mark.parametrize(("body", "line"), list(zip(PROGRAMS.values(), SHOWN)), ids=PROGRAMS)
def test_programs_with_logging_of_their_own(body: str, line: str) -> None:
    code = f"import logging, hvdtrain\nfrom hvdtrain.log import LOGGER, show\n{body}"
    state = "assert not LOGGER.handlers and LOGGER.propagate and not logging.root.handlers"
    last = "logging.getLogger('hvdtrain.launch').info('well')"
    code = code.replace("show\n", f"show\n{state}\n", 1) + f"\n{last}"
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stderr == line + "\n"


# What the launcher says at each level, and what the ranks do, of which the second one fails.
JOB = {
    "debug": (
        ["attempt 1: ", "rank 1 on "],
        ["Topology(", "MPI combines gradients", "collectives"],
    ),
    "error": (["rank 1 on "], []),
}
BODY = """
import hvdtrain
hvdtrain.init()
if rank == 1:
    # The other one is out of init() by then, and so has nothing to say of this.
    time.sleep(1)
    os._exit(7)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("level", JOB)
def test_level_of_a_job(run_command, level: str) -> None:
    options = ["-np", "2", "--log-level", level]
    done = run_command([*HVDTRAIN, *options, "--", *program(BODY)], env=OWN_DEFAULTS, timeout_s=90)
    assert done.returncode == 7, done
    lines = done.stderr.splitlines()
    launchers = [line for line in lines if line.startswith("hvdtrain run: ")]
    ranks = [line for line in lines if " hvdtrain: " in line and line not in launchers]
    ours, theirs = JOB[level]
    for said, expected in ((launchers, ours), (ranks, theirs)):
        for words in expected:
            assert any(words in line for line in said), done.stderr
    assert bool(ranks) == bool(theirs), done.stderr
    assert ("combines" in done.stderr) == (level == "debug"), done.stderr
    assert ("attempt 1: " in done.stderr) == (level == "debug"), done.stderr
