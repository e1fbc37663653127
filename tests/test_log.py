from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from hvdtrain.log import LOGGER, configure_log
from tests.launch.jobs import HVDTRAIN, OWN_DEFAULTS, program

LEVELS = ("debug", "info", "warning", "error")
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize("level", LEVELS)
def test_level(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("error")
    configure_log(level)
    for each in LEVELS:
        getattr(logging.getLogger("hvdtrain.trainer.saving"), each)(each)
    shown = LEVELS[LEVELS.index(level) :]
    assert capsys.readouterr().err == "".join(f"hvdtrain: {each}\n" for each in shown)


def test_time_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("info", tag="[3] ", with_time=True)
    LOGGER.info("message")
    assert re.fullmatch(TIME + r" \[3\] hvdtrain: message\n", capsys.readouterr().err)


PROGRAMS = {
    "configured": "logging.basicConfig(format='root %(message)s'); configure_log('info')",
    "configured later": "configure_log('info'); logging.basicConfig(format='root %(message)s')",
    "own handler": "logging.basicConfig(format='root %(message)s', level='INFO'); "
    "LOGGER.addHandler(logging.NullHandler()); configure_log('info')",
    "handler removed": "configure_log('info'); LOGGER.handlers.clear(); LOGGER.propagate = True; "
    "logging.basicConfig(format='root %(message)s')",
}
OUTPUT = ("hvdtrain: message", "hvdtrain: message", "root message", "root message")


@pytest.mark.parametrize(("body", "line"), list(zip(PROGRAMS.values(), OUTPUT)), ids=PROGRAMS)
def test_programs_that_configure_logging(body: str, line: str) -> None:
    code = f"import logging, hvdtrain\nfrom hvdtrain.log import LOGGER, configure_log\n{body}"
    state = "assert not LOGGER.handlers and LOGGER.propagate and not logging.root.handlers"
    last = "logging.getLogger('hvdtrain.launch').info('message')"
    code = code.replace("_log\n", f"_log\n{state}\n", 1) + f"\n{last}"
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stderr == line + "\n"


# Messages of the launcher and of the ranks at each level; rank 1 fails.
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
    # Rank 0 has left init() by then and doesn't report this failure.
    time.sleep(1)
    os._exit(7)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("level", JOB)
def test_level_of_a_job(run_command, forked_python: list[str], level: str) -> None:
    options = ["-np", "2", "--log-level", level, "--", *program(BODY, forked_python)]
    done = run_command([*HVDTRAIN, *options], env=OWN_DEFAULTS, timeout_s=90)
    assert done.returncode == 7, done
    lines = done.stderr.splitlines()
    launchers = [line for line in lines if line.startswith("hvdtrain run: ")]
    ranks = [line for line in lines if " hvdtrain: " in line and line not in launchers]
    of_launcher, of_ranks = JOB[level]
    for output, expected in ((launchers, of_launcher), (ranks, of_ranks)):
        for text in expected:
            assert any(text in line for line in output), done.stderr
    assert bool(ranks) == bool(of_ranks), done.stderr
    assert ("combines" in done.stderr) == (level == "debug"), done.stderr
    assert ("attempt 1: " in done.stderr) == (level == "debug"), done.stderr
