"""Programs of a worker's pod: sshd, to which this job's launcher connects, and a drain command.

    python -m hvdtrain.pods.worker          becomes sshd
    python -m hvdtrain.pods.worker drain    waits until no ranks are left, before the pod ends

An image may configure its libraries with environment variables. sshd's sessions don't inherit the
container's environment, so sshd's configuration sets these variables.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from hvdtrain.agent.messages import JOB
from hvdtrain.pods.names import KEYS_FOLDER, SSH_PORT

__all__ = ["drain", "serve_ssh", "sshd_config"]

POLL_S = 0.2
FOLDER = Path("/tmp/hvdtrain-sshd")
# Variables that sshd sets for each session, or that only concern this process.
_EXCLUDED = {"HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_"}


def sshd_config(folder: Path, environ: Mapping[str, str]) -> str:
    """Return sshd's configuration.

    sshd reads its keys from ``folder``, and sets the variables in ``environ`` for all sessions.
    """
    variables = [
        _quoted(f"{name}={value}")
        for name, value in environ.items()
        if name not in _EXCLUDED and "\n" not in value
    ]
    lines = [
        f"Port {SSH_PORT}",
        f"HostKey {folder}/ssh_host_ed25519_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "AuthenticationMethods publickey",
        "PermitRootLogin prohibit-password",
        "UsePAM no",
        # The home directory in an image may belong to another user.
        "StrictModes no",
        "PidFile none",
        "X11Forwarding no",
        "AllowTcpForwarding no",
        "PrintMotd no",
        # All ranks of a job may connect at once.
        "MaxStartups 1000",
        # Closes the sessions of a launcher whose node is lost.
        "ClientAliveInterval 15",
        "ClientAliveCountMax 4",
        # All variables are on one line, because sshd uses only the first SetEnv.
        *([f"SetEnv {' '.join(variables)}"] if variables else []),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def serve_ssh() -> None:
    """Replace this process with sshd."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if sshd is None:
        sys.exit("hvdtrain: sshd is not installed in this image; install openssh-server.")
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    for name in ("ssh_host_ed25519_key", "authorized_keys"):
        copy = FOLDER / name
        copy.unlink(missing_ok=True)
        with open(os.open(copy, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write((Path(KEYS_FOLDER) / name).read_bytes())
    config = FOLDER / "sshd_config"
    config.write_text(sshd_config(FOLDER, os.environ))
    if os.geteuid() == 0:
        # As root, sshd needs this folder for privilege separation before authentication.
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    os.execv(sshd, [sshd, "-D", "-e", "-f", str(config)])


def drain() -> None:
    """Wait until no process of a job is left.

    Meanwhile the launcher sees that the pod is terminating and lets all ranks save a checkpoint.
    After its grace period, Kubernetes ends the pod in any case.
    """
    while _has_ranks():
        time.sleep(POLL_S)


def _has_ranks() -> bool:
    for process in psutil.process_iter():
        try:
            if JOB in process.environ():
                return True
        except psutil.Error:
            # The process has ended or belongs to another user.
            continue
    return False


if __name__ == "__main__":
    if sys.argv[1:] == ["drain"]:
        drain()
    else:
        serve_ssh()
