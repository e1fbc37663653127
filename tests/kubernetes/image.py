"""An image that needs no registry, with busybox and mount points for the machine's folders."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

__all__ = ["IMAGE", "PAUSE", "USER_ID", "write_image"]

IMAGE = "localhost/hvdtrain:test"
# The command of the container that holds a pod's network.
PAUSE = ["/busybox", "sleep", "1000000"]
USER_ID = 1000
_BUSYBOX = Path("/usr/bin/busybox")
_FOLDERS = ("usr", "etc/ssh/ssh_config.d", "dev", "proc", "sys", "run", "var/log", "root", "home")
_LINKS = {name: f"usr/{name}" for name in ("bin", "lib", "lib64", "sbin")}
_FILES = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n"
        f"train:x:{USER_ID}:{USER_ID}:train:/home/train:/bin/sh\n"
    ),
    "etc/group": f"root:x:0:\ntrain:x:{USER_ID}:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/ssh/ssh_config": "Include /etc/ssh/ssh_config.d/*.conf\n",
}


def write_image(path: Path) -> None:
    """Write an OCI archive for containerd."""
    layer = _layer()
    blobs: dict[str, bytes] = {}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": PAUSE, "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    oci = "application/vnd.oci.image"
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{oci}.manifest.v1+json",
        "config": _keep(blobs, json.dumps(config).encode(), f"{oci}.config.v1+json"),
        "layers": [_keep(blobs, layer, f"{oci}.layer.v1.tar")],
    }
    kept = _keep(blobs, json.dumps(manifest).encode(), f"{oci}.manifest.v1+json")
    names = {"io.containerd.image.name": IMAGE, "org.opencontainers.image.ref.name": IMAGE}
    index = {"schemaVersion": 2, "manifests": [{**kept, "annotations": names}]}
    with tarfile.open(path, "w") as archive:
        _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(archive, "index.json", json.dumps(index).encode())
        for digest, content in blobs.items():
            _add(archive, f"blobs/sha256/{digest.partition(':')[2]}", content)


def _layer() -> bytes:
    with io.BytesIO() as buffer:
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name in _FOLDERS:
                for part in reversed([Path(name), *Path(name).parents][:-1]):
                    _add_folder(archive, str(part))
            _add_folder(archive, "home/train", owner=USER_ID)
            _add_folder(archive, "tmp", mode=0o1777)
            for name, target in _LINKS.items():
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, target
                archive.addfile(link)
            for name, text in _FILES.items():
                _add(archive, name, text.encode())
            _add(archive, "busybox", _BUSYBOX.read_bytes(), mode=0o755)
        return buffer.getvalue()


def _add_folder(archive: tarfile.TarFile, name: str, mode: int = 0o755, owner: int = 0) -> None:
    folder = tarfile.TarInfo(name)
    folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, mode, owner, owner
    archive.addfile(folder)


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    file = tarfile.TarInfo(name)
    file.size, file.mode, file.mtime = len(content), mode, int(time.time())
    archive.addfile(file, io.BytesIO(content))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _keep(blobs: dict[str, bytes], content: bytes, kind: str) -> dict[str, Any]:
    digest = _digest(content)
    blobs[digest] = content
    return {"mediaType": kind, "digest": digest, "size": len(content)}
