"""Programs of a worker's pod: sshd, for the launcher of this job alone, as the pod's user.

    python -m hvdtrain.pods.worker          becomes sshd
    python -m hvdtrain.pods.worker drain    waits until no ranks are left, before the pod ends

A session of sshd does not have the environment of the container, where an image names its
libraries, so sshd is configured to set it.
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

__all__ = ["drain", "has_ranks", "serve_ssh", "sshd_config"]

POLL_S = 0.2

FOLDER = Path("/tmp/hvdtrain-sshd")
# Set by sshd for each session, or of this process alone.
_OWN = {"HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "USER", "_"}


def sshd_config(folder: Path, environ: Mapping[str, str]) -> str:
    """Return the configuration of sshd.

    Args:
        folder: The private folder with its keys.
        environ: The environment of its sessions.
    """
    variables = [
        _quoted(f"{name}={value}")
        for name, value in environ.items()
        if name not in _OWN and "\n" not in value
    ]
    lines = [
        f"Port {SSH_PORT}",
        f"HostKey {folder}/ssh_host_ed25519_key",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "AuthenticationMethods publickey",
        "PermitRootLogin prohibit-password",
        "UsePAM no",
        # A home of an image may belong to another user.
        "StrictModes no",
        "PidFile none",
        "X11Forwarding no",
        "AllowTcpForwarding no",
        "PrintMotd no",
        # All ranks of a job may connect at once.
        "MaxStartups 1000",
        # Sessions of a launcher that was lost with its node end.
        "ClientAliveInterval 15",
        "ClientAliveCountMax 4",
        # One line: sshd uses only the first.
        *([f"SetEnv {' '.join(variables)}"] if variables else []),
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def serve_ssh() -> None:
    """Become sshd."""
    sshd = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    if sshd is None:
        sys.exit("hvdtrain: this image has no sshd; install openssh-server in it.")
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    for name in ("ssh_host_ed25519_key", "authorized_keys"):
        copy = FOLDER / name
        copy.unlink(missing_ok=True)
        with open(copy, "wb", opener=_private) as file:
            file.write((Path(KEYS_FOLDER) / name).read_bytes())
    config = FOLDER / "sshd_config"
    config.write_text(sshd_config(FOLDER, os.environ))
    if os.geteuid() == 0:
        # sshd confines itself to this folder before authentication.
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    os.execv(sshd, [sshd, "-D", "-e", "-f", str(config)])


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def has_ranks() -> bool:
    """Return whether processes run here that belong to a job, by their environment."""
    for process in psutil.process_iter():
        try:
            if JOB in process.environ():
                return True
        except psutil.Error:
            # It has ended, or it is another user's.
            continue
    return False


def drain() -> None:
    """Wait until no ranks are left.

    The launcher sees that the pod is to end, and lets all ranks save a checkpoint. Kubernetes ends
    the pod after its grace period in any case.
    """
    while has_ranks():
        time.sleep(POLL_S)


if __name__ == "__main__":
    if sys.argv[1:] == ["drain"]:
        drain()
    else:
        serve_ssh()
