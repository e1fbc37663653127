"""ssh between the hosts, with one key pair for users and one for hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.testbed.requirements import find_command

__all__ = ["PORT", "sshd_argv", "write_passwd", "write_ssh"]

PORT = 22
_PASSWD = Path("/etc/passwd")
_ROOT_UID = "0"


def write_passwd(passwd: Path, home: Path) -> None:
    """Write the machine's /etc/passwd with another home folder for root.

    It contains the files of ssh, and no .bashrc that changes PATH.
    """
    users = [line.split(":") for line in _PASSWD.read_text().splitlines()]
    for user in users:
        if user[2] == _ROOT_UID:
            user[5] = str(home)
    passwd.write_text("".join(":".join(user) + "\n" for user in users))


def write_ssh(home: Path, server: Path) -> None:
    """Write the files of ssh into ``home``, and the files of sshd into ``server``."""
    folder = home / ".ssh"
    folder.mkdir(mode=0o700)
    _make_key(folder / "id_ed25519")
    _make_key(server / "host_key")
    (folder / "authorized_keys").write_text((folder / "id_ed25519.pub").read_text())
    (folder / "known_hosts").write_text(f"* {(server / 'host_key.pub').read_text()}")
    (folder / "config").write_text("StrictHostKeyChecking yes\nLogLevel ERROR\n")
    _config(server).write_text(
        f"Port {PORT}\n"
        f"HostKey {server}/host_key\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        # The home folder is below /tmp, which is writable for all.
        "StrictModes no\n"
        "UsePAM no\n"
        "PidFile none\n"
    )


def sshd_argv(server: Path) -> list[str]:
    """Return the command of sshd on a host."""
    return [find_command("sshd"), "-D", "-e", "-f", str(_config(server))]


def _config(server: Path) -> Path:
    return server / "sshd_config"


def _make_key(path: Path) -> None:
    argv = [find_command("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=20)
