"""Keys of one job alone: with which its launcher comes in, and by which it knows its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HOST_ALIAS", "KEY_FILES", "SshKeys", "make_keys"]

# The name by which all workers of a job are known, wherever they are.
HOST_ALIAS = "hvdtrain"
# The launcher's key, who may come in, the workers' key, and who they are.
KEY_FILES = ("id_ed25519", "authorized_keys", "ssh_host_ed25519_key", "known_hosts")


@dataclass(frozen=True, kw_only=True)
class SshKeys:
    """Two pairs of Ed25519 keys as OpenSSH writes them; the private ones are secret."""

    user_private: str
    user_public: str
    host_private: str
    host_public: str

    def files(self) -> Mapping[str, str]:
        """The files of the Secret, by the names under which pods find them."""
        texts = (
            self.user_private,
            f"{self.user_public}\n",
            self.host_private,
            f"{HOST_ALIAS} {self.host_public}\n",
        )
        return dict(zip(KEY_FILES, texts, strict=True))


def make_keys() -> SshKeys:
    """Make keys that nobody has yet."""
    return SshKeys(
        **dict(zip(("user_private", "user_public"), _pair())),
        **dict(zip(("host_private", "host_public"), _pair())),
    )


def _pair() -> tuple[str, str]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return private.decode(), public.decode()
