from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.agent.process_tree import descendants, kill_all
from tests.agent.processes import alive, assert_all_end

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0
# Above Linux's largest process ID.
NOBODY = 2**22 + 1

# Each process writes its name and ID to a file, and waits.
PRELUDE = """
    import os, subprocess, sys, time
    def here(name):
        with open(PIDS, "a") as file:
            file.write(f"{name} {os.getpid()}\\n")
    def child(name, setup=lambda: None, then=lambda: time.sleep(60)):
        pid = os.fork()
        if pid == 0:
            setup()
            here(name)
            then()
            os._exit(0)
        return pid
"""


class Tree:
    """A process in a separate session, and its descendants."""

    def __init__(self, pids: Path, body: str) -> None:
        self._pids = pids
        code = f"PIDS = {str(pids)!r}\n" + textwrap.dedent(PRELUDE) + textwrap.dedent(body)
        self.leader = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    def started(self, count: int) -> dict[str, int]:
        """Wait for ``count`` processes, and return their IDs by name."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            known = self.known()
            if len(known) >= count:
                return known
            time.sleep(0.02)
        raise AssertionError(f"{count} processes did not start within {WAIT_S} s")

    def known(self) -> dict[str, int]:
        text = self._pids.read_text() if self._pids.exists() else ""
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {name: int(pid) for name, pid in lines}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Tree]]:
    trees: list[Tree] = []

    def start(body: str) -> Tree:
        trees.append(Tree(tmp_path / f"pids-{len(trees)}", body))
        return trees[-1]

    yield start
    for tree in trees:
        for pid in tree.known().values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        tree.leader.kill()
        tree.leader.wait(timeout=WAIT_S)


def test_descendants_in_any_group_or_session(start) -> None:
    tree = start(
        """
        child("plain")
        child("group", os.setpgrp)
        child("session", os.setsid, lambda: (child("below", os.setsid), time.sleep(60)))
        here("leader")
        time.sleep(60)
        """
    )
    pids = tree.started(5)
    del pids["leader"]
    assert set(descendants(tree.leader.pid)) == set(pids.values())


def test_program_names_with_special_characters(start, tmp_path: Path) -> None:
    program = tmp_path / "a) S 1 1 (b"
    program.symlink_to("/bin/sleep")
    tree = start(f"here('leader'); subprocess.run([{str(program)!r}, '60'])")
    tree.started(1)
    deadline = time.monotonic() + WAIT_S
    while not (pids := descendants(tree.leader.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 1
    kill_all(pids)


ORPHANS = """
    def grandchildren():
        child("same-session")
        child("own-group", os.setpgrp)
        child("own-session", os.setsid)
    child("parent", then=grandchildren)
    os.wait()
    here("leader")
    time.sleep(60)
"""


def test_orphans_of_the_session(start) -> None:
    tree = start(ORPHANS)
    pids = tree.started(5)
    orphans = set(descendants(tree.leader.pid))
    assert orphans == {pids["same-session"], pids["own-group"]}
    tree.leader.kill()
    tree.leader.wait(timeout=WAIT_S)
    assert set(descendants(tree.leader.pid)) == orphans, "after the end of the leader"


def test_a_subreaper_adopts_all_orphans(start) -> None:
    adopt = "import ctypes; ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\n"
    tree = start(adopt + textwrap.dedent(ORPHANS))
    pids = tree.started(5)
    expected = {pids[name] for name in ("same-session", "own-group", "own-session")}
    assert set(descendants(tree.leader.pid)) == expected


def test_kill_all_with_ignored_signals_and_dead_processes(start) -> None:
    tree = start(
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child("plain")
        child("session", os.setsid)
        here("leader")
        time.sleep(60)
        """
    )
    pids = tree.started(3)
    kill_all([NOBODY, *descendants(tree.leader.pid), NOBODY])
    assert_all_end([pids["plain"], pids["session"]])
    assert alive(tree.leader.pid)
    kill_all([tree.leader.pid, NOBODY])
    assert_all_end([tree.leader.pid])
    kill_all([tree.leader.pid])
    assert tree.leader.wait(timeout=WAIT_S) == -signal.SIGKILL
    assert not any(map(alive, descendants(tree.leader.pid)))
