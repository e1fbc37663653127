"""The class ``KubernetesCluster``: a cluster of one node, and how programs run beside it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.harness.jobs import REPOSITORY, Completed, clean_environment
from tests.kubernetes.image import IMAGE
from tests.kubernetes.node import API_ADDRESS, TOKEN
from tests.testbed.requirements import find_command

__all__ = ["KubernetesCluster"]

_POLL_S = 0.2


class KubernetesCluster:
    """A cluster of one node; a context manager that leaves nothing behind.

    Args:
        programs: The folder of its programs.

    Attributes:
        folder: Which the machine, the node and pods share under this name.
    """

    folder: Path

    def __init__(self, programs: Path) -> None:
        self._programs = programs

    def __enter__(self) -> KubernetesCluster:
        self._state = tempfile.TemporaryDirectory(prefix="hvdtrain-kubernetes-", dir="/tmp")
        self.folder = Path(self._state.name) / "shared"
        self.folder.mkdir()
        argv = [
            find_command("unshare"),
            *("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"),
            *(sys.executable, "-m", "tests.kubernetes.node"),
            *(self._state.name, str(self._programs)),
        ]
        with (Path(self._state.name) / "node.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment(),
                cwd=REPOSITORY,
                start_new_session=True,
            )
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != b"ready\n":
            said = (Path(self._state.name) / "node.log").read_text()
            self.close()
            raise RuntimeError(f"the test's Kubernetes did not come up:\n{said[-6000:]}")
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._node = int(children.read_text().split()[0])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the node, and with it all its processes; remove its folder."""
        self._unshare.communicate(timeout=30)
        self._state.cleanup()
        # Of pods that are no more; the kernel keeps those that somebody is still in.
        for folder in Path("/sys/fs/cgroup").glob("**/k8s.io"):
            for group, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(group)

    @property
    def kubeconfig(self) -> Path:
        """The configuration of its clients, for programs that run on the node."""
        return Path(self._state.name) / "kubeconfig"

    def run(
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        timeout_s: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        input: str | None = None,
    ) -> Completed:
        """Run a program on the node to its end; it sees the cluster as its user does."""
        words = [os.fspath(word) for word in argv]
        begun = time.monotonic()
        done = subprocess.run(
            [*self._entering, *words],
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env=clean_environment({"KUBECONFIG": str(self.kubeconfig), **(env or {})}),
            cwd=cwd or self.folder,
            timeout=timeout_s,
        )
        return Completed(
            argv=tuple(words),
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            seconds=time.monotonic() - begun,
            timed_out=False,
        )

    def ask(self, path: str, content: Any = None, *, method: str = "") -> Any:
        """Ask the API server; with ``content`` something is created, unless ``method`` is given."""
        method = method or ("GET" if content is None else "POST")
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        argv = ["curl", "--silent", "--insecure", "--max-time", "20", "--request", method]
        argv += ["--header", f"Authorization: Bearer {TOKEN}"]
        argv += ["--header", f"Content-Type: {kind}"]
        argv += [] if content is None else ["--data-binary", "@-"]
        text = None if content is None else json.dumps(content)
        done = self.run([*argv, f"https://{API_ADDRESS}{path}"], input=text)
        try:
            return json.loads(done.stdout)
        except ValueError:
            # What it does not know at all it refuses in plain words.
            return {"kind": "Status", "message": done.stdout}

    def pod_template(self) -> dict[str, Any]:
        """A pod into which the machine's programs are mounted; its image has none."""
        shared = {
            "usr": "/usr",
            "repository": str(REPOSITORY),
            "environment": sys.prefix,
            "python": sys.base_prefix,
        }
        reads = {"readOnly": True}
        mounts = [{"name": name, "mountPath": path, **reads} for name, path in shared.items()]
        volumes = [{"name": name, "hostPath": {"path": path}} for name, path in shared.items()]
        mounts.append({"name": "shared", "mountPath": str(self.folder)})
        volumes.append({"name": "shared", "hostPath": {"path": str(self.folder)}})
        variables = {
            "PYTHONPATH": str(REPOSITORY),
            # A new pod need not look at all fonts again.
            "MPLCONFIGDIR": str(self.folder / "matplotlib"),
        }
        environ = [{"name": name, "value": value} for name, value in variables.items()]
        container = {
            "name": "hvdtrain",
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "volumeMounts": mounts,
            "env": environ,
        }
        return {"spec": {"containers": [container], "volumes": volumes}}

    def wait_for(self, what: str, path: str, ready: Any, timeout_s: float = 240.0) -> Any:
        """Ask until ``ready`` says so of the answer, and return that."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.ask(path)
            if ready(found):
                return found
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what}: {json.dumps(found)[-3000:]}")
            time.sleep(_POLL_S)

    @property
    def _entering(self) -> list[str]:
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return [find_command("nsenter"), "--target", str(self._node), *namespaces, "--"]
