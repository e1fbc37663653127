"""A Kubernetes cluster with one node."""

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
    """A Kubernetes cluster with one node, as a context manager.

    Args:
        programs: Folder of its programs.

    Attributes:
        folder: Folder that the machine, the node and pods share under the same path.
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
            log_text = (Path(self._state.name) / "node.log").read_text()
            self.close()
            raise RuntimeError(f"the test's Kubernetes did not start:\n{log_text[-6000:]}")
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
        """End the node with all its processes, and remove its folder."""
        self._unshare.communicate(timeout=30)
        self._state.cleanup()
        # Control groups of ended pods; the kernel keeps groups with processes.
        for folder in Path("/sys/fs/cgroup").glob("**/k8s.io"):
            for group, _, _ in os.walk(folder, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(group)

    @property
    def kubeconfig(self) -> Path:
        """The configuration for clients on the node."""
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
        """Run a program on the node to its end, with the cluster's kubeconfig."""
        if self._unshare.poll() is not None:
            raise RuntimeError("the node has ended")
        command = [os.fspath(argument) for argument in argv]
        start = time.monotonic()
        done = subprocess.run(
            [*self._entering, *command],
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
            argv=tuple(command),
            returncode=done.returncode,
            stdout=done.stdout,
            stderr=done.stderr,
            seconds=time.monotonic() - start,
            timed_out=False,
        )

    def ask(self, path: str, content: Any = None, *, method: str = "") -> Any:
        """Send a request to the API server: GET, POST with ``content``, or ``method``."""
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
            # Unknown paths are answered in plain text.
            return {"kind": "Status", "message": done.stdout}

    def pod_template(self) -> dict[str, Any]:
        """Return a pod that mounts the machine's programs, which its image lacks."""
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
            # Cache fonts between pods.
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
        """Request ``path`` until ``ready(response)`` is true, and return the response."""
        deadline = time.monotonic() + timeout_s
        while True:
            response = self.ask(path)
            if ready(response):
                return response
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} is not ready: {json.dumps(response)[-3000:]}")
            time.sleep(_POLL_S)

    @property
    def _entering(self) -> list[str]:
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid")
        return [find_command("nsenter"), "--target", str(self._node), *namespaces, "--"]
