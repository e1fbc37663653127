"""Which hosts are asked whether they still answer, and how."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdtrain.remote.reachability import unreachable


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of an ssh that writes down its arguments, never reaches b, and reaches c the second time."""
    program = tmp_path / "ssh"
    program.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n'
        'case "$*" in\n'
        '*" b "*) exit 255 ;;\n'
        f'*" c "*) rmdir {tmp_path}/again 2>/dev/null || {{ mkdir {tmp_path}/again; exit 255; }}\n'
        "esac\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}"}


def test_hosts_that_ssh_does_not_reach(environ: dict[str, str], tmp_path: Path) -> None:
    hosts = ["a", "b", "c", "localhost"]
    silent = unreachable(hosts, environ, ssh=("-p", "2222"), give_up=lambda: False)
    assert silent == ["b"]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3 + 2, "this host needs no ssh, and one that answered is left in peace"
    for line in asked:
        assert " -p 2222 -- " in line
