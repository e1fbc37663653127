from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.pods.worker import sshd_config
from tests.harness.required import skip_or_fail
from tests.testbed.requirements import find_command


@pytest.fixture(autouse=True)
def privilege_separation_folder() -> Iterator[None]:
    """Create the folder that sshd needs as root. In a pod, the worker creates it."""
    folder = Path("/run/sshd")
    missing = os.geteuid() == 0 and not folder.exists()
    if missing:
        folder.mkdir(mode=0o755)
    yield
    if missing:
        folder.rmdir()


def test_sshd_accepts_the_configuration_and_any_environment(tmp_path: Path) -> None:
    try:
        sshd, keygen = find_command("sshd"), find_command("ssh-keygen")
    except FileNotFoundError as error:
        skip_or_fail("cluster", str(error))
    key = tmp_path / "ssh_host_ed25519_key"
    subprocess.run(
        [keygen, "-q", "-t", "ed25519", "-N", "", "-f", key],
        check=True,
        timeout=20,
    )
    environ = {
        "PATH": "/opt/bin:/usr/bin",
        "SPECIAL": "a b \"quoted\" 'single' back\\slash # $(id) %h",
        "EMPTY": "",
        "LINES": "1\n2",
        "HOME": "/other",
    }
    config = tmp_path / "config"
    config.write_text(sshd_config(tmp_path, environ))
    done = subprocess.run([sshd, "-T", "-f", config], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "port 2222" in lines
    assert "usepam no" in lines
    variables = [line.removeprefix("setenv ") for line in lines if line.startswith("setenv ")]
    assert variables == [f"{name}={environ[name]}" for name in ("PATH", "SPECIAL", "EMPTY")]
