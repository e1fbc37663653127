from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.pods.worker import sshd_config
from tests.harness.required import do_without
from tests.testbed.requirements import find_command


@pytest.fixture(autouse=True)
def separation() -> Iterator[None]:
    """The folder that sshd wants root to have; in a pod the worker makes it."""
    folder = Path("/run/sshd")
    missing = os.geteuid() == 0 and not folder.exists()
    if missing:
        folder.mkdir(mode=0o755)
    yield
    if missing:
        folder.rmdir()


def test_sshd_takes_the_configuration_and_any_environment(tmp_path: Path) -> None:
    """A real sshd reads it, and says what it would set for those who come in."""
    try:
        sshd, keygen = find_command("sshd"), find_command("ssh-keygen")
    except FileNotFoundError as error:
        do_without("cluster", str(error))
    key = tmp_path / "ssh_host_ed25519_key"
    subprocess.run(
        [keygen, "-q", "-t", "ed25519", "-N", "", "-f", key],
        check=True,
        timeout=20,
    )
    environ = {
        "PATH": "/opt/bin:/usr/bin",
        "NASTY": "a b \"quoted\" 'single' back\\slash # $(id) %h",
        "EMPTY": "",
        "LINES": "1\n2",
        "HOME": "/other",
    }
    config = tmp_path / "config"
    config.write_text(sshd_config(tmp_path, environ))
    done = subprocess.run([sshd, "-T", "-f", config], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert "port 2222" in said
    assert "usepam no" in said
    variables = [line.removeprefix("setenv ") for line in said if line.startswith("setenv ")]
    assert variables == [f"{name}={environ[name]}" for name in ("PATH", "NASTY", "EMPTY")]
