"""The node of the tests' Kubernetes: ``python -m tests.kubernetes.node FOLDER PROGRAMS``.

It is the first process in its own namespaces (network, mounts, processes, names), starts the
cluster's daemons, prints ``ready`` and waits for the end of its standard input. When it ends, the
kernel ends all other processes of the namespace.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kubernetes.image import IMAGE, write_image

__all__ = ["API_ADDRESS", "GUEST", "NODE", "TOKEN"]

NODE = "node-1"
# The address of the service `kubernetes`, an address of the node here.
API_ADDRESS = "10.78.0.1"
TOKEN = "test"
# A user without permissions, and the context of this user.
GUEST = "guest"
_PODS = "10.79.0.0/24"
_GATEWAY = "10.79.0.1"
_ETCD = "http://127.0.0.1:2379"
_ETCD_PEERS = "http://127.0.0.1:2380"
_TIMEOUT_S = 180.0
# Folders with fixed names that programs write to.
_OWN_FOLDERS = ("/run", "/var/lib", "/var/log")


class Node:
    """The daemons and their files."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder, self.programs = folder, programs
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.certs = folder / "certs"

    def start(self) -> None:
        """Start all daemons in order of their dependencies."""
        _do("mount", "--no-mtab", "-t", "proc", "proc", "/proc")
        for path in _OWN_FOLDERS:
            _do("mount", "--no-mtab", "-t", "tmpfs", "-o", "mode=755", "tmpfs", path)
        for path in ("/run/lock", "/var/lib/kubelet", "/var/log/pods"):
            Path(path).mkdir()
        hosts = self._write("hosts", f"127.0.0.1 localhost\n{_GATEWAY} {NODE}\n")
        _do("mount", "--no-mtab", "--bind", str(hosts), "/etc/hosts")
        socket.sethostname(NODE)
        _do("ip", "link", "set", "lo", "up")
        _do("ip", "addr", "add", f"{API_ADDRESS}/32", "dev", "lo")
        # The kubelet needs an address of the node before the first pod creates the bridge.
        _do("ip", "link", "add", "cni0", "type", "bridge")
        _do("ip", "addr", "add", f"{_GATEWAY}/24", "dev", "cni0")
        _do("ip", "link", "set", "cni0", "up")
        _do("ip", "route", "add", "default", "dev", "cni0")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        _limit_pods()
        self._start_etcd()
        self._start_containerd()
        self._start_control_plane()
        self._start_kubelet()
        self._daemon("dns", sys.executable, "-m", "tests.kubernetes.names", _GATEWAY)
        self._await(f"node {NODE}", self._is_node_ready)

    def _start_etcd(self) -> None:
        self._daemon(
            "etcd",
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={_ETCD}",
            f"--advertise-client-urls={_ETCD}",
            f"--listen-peer-urls={_ETCD_PEERS}",
            # The data is not needed after the test.
            "--unsafe-no-fsync",
        )

    def _start_control_plane(self) -> None:
        users = f"{TOKEN},admin,1,system:masters\n{GUEST},{GUEST},2\n"
        tokens = self._write("tokens.csv", users)
        key = self.folder / "service-accounts.key"
        _do("openssl", "genrsa", "-out", str(key), "2048")
        self._await("etcd", lambda: _listens(2379))
        self._daemon(
            "kube-apiserver",
            str(self.programs / "kube-apiserver"),
            f"--etcd-servers={_ETCD}",
            f"--cert-dir={self.certs}",
            "--bind-address=0.0.0.0",
            f"--advertise-address={_GATEWAY}",
            "--secure-port=443",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={key}",
            f"--service-account-key-file={key}",
            "--service-cluster-ip-range=10.78.0.0/24",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--allow-privileged",
        )
        self._await("kube-apiserver", lambda: self._ask("/readyz") == b"ok")
        config = str(self._write_kubeconfig())
        self._daemon(
            "kube-controller-manager",
            str(self.programs / "kube-controller-manager"),
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--port=0",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.certs / 'apiserver.crt'}",
            # Detect lost nodes within the time of a test.
            "--node-monitor-grace-period=12s",
            "--pod-eviction-timeout=5s",
        )
        self._daemon(
            "kube-scheduler",
            str(self.programs / "kube-scheduler"),
            f"--kubeconfig={config}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--port=0",
        )

    def _start_containerd(self) -> None:
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": True,
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{"subnet": _PODS}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }
        self._write("cni/pods.conflist", json.dumps(network))
        config = f"""\
version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{self.folder}/cni"
"""
        path = self._write("containerd.toml", config)
        self._daemon("containerd", "containerd", f"--config={path}")
        image = self.folder / "image.tar"
        write_image(image)
        ctr = ("ctr", "--address=/run/containerd.sock", "--namespace=k8s.io", "images", "import")
        self._await("containerd", lambda: _succeeds(*ctr, str(image)))

    def _start_kubelet(self) -> None:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "failSwapOn": False,
            # Only kube-proxy needs them.
            "makeIPTablesUtilChains": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "evictionHard": {"memory.available": "50Mi"},
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "clusterDNS": [_GATEWAY],
            "clusterDomain": "cluster.local",
            "nodeStatusUpdateFrequency": "2s",
            "syncFrequency": "5s",
        }
        path = self._write("kubelet.json", json.dumps(config))
        self._daemon(
            "kubelet",
            str(self.programs / "kubelet"),
            f"--kubeconfig={self.folder / 'kubeconfig'}",
            f"--config={path}",
            f"--root-dir={self.folder / 'kubelet'}",
            "--container-runtime=remote",
            "--container-runtime-endpoint=unix:///run/containerd.sock",
            f"--hostname-override={NODE}",
            f"--node-ip={_GATEWAY}",
        )

    def _write_kubeconfig(self) -> Path:
        ca = base64.b64encode((self.certs / "apiserver.crt").read_bytes()).decode()
        server = f"https://{API_ADDRESS}:443"
        cluster = {"server": server, "certificate-authority-data": ca}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [
                {"name": "admin", "user": {"token": TOKEN}},
                {"name": GUEST, "user": {"token": GUEST}},
            ],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "admin"}},
                {"name": GUEST, "context": {"cluster": "test", "user": GUEST}},
            ],
            "current-context": "test",
        }
        return self._write("kubeconfig", json.dumps(config))

    def _is_node_ready(self) -> bool:
        node = json.loads(self._ask(f"/api/v1/nodes/{NODE}") or b"{}")
        if node.get("kind") != "Node":
            return False
        conditions = node["status"].get("conditions", ())
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

    def _ask(self, path: str) -> bytes:
        argv = ["curl", "--silent", "--insecure", "--max-time", "2"]
        argv += ["--header", f"Authorization: Bearer {TOKEN}", f"https://{API_ADDRESS}{path}"]
        return subprocess.run(argv, stdout=subprocess.PIPE, timeout=10).stdout

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def _daemon(self, name: str, *argv: str) -> None:
        # Killed daemons leave files here.
        own = self.folder / "tmp"
        own.mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("wb") as log:
            self.daemons[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": str(own)},
                start_new_session=True,
            )

    def _await(self, what: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not ready():
            ended = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {name}\n{(self.folder / f'{name}.log').read_text()[-1500:]}"
                    for name in ended or self.daemons
                )
                sys.exit(f"{what} did not start; ended: {ended}\n{logs}")
            time.sleep(0.1)


def _limit_pods() -> None:
    """Set the CPU shares of all pods to those of eight processes."""
    controllers = Path("/sys/fs/cgroup")
    for group, share, value in (
        (controllers / "cpu" / "k8s.io", "cpu.shares", "8192"),
        (controllers / "k8s.io", "cpu.weight", "800"),
    ):
        if group.parent.joinpath("cgroup.procs").exists():
            group.mkdir(exist_ok=True)
            if group.joinpath(share).exists():
                group.joinpath(share).write_text(value)


def _do(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=20, capture_output=True)


def _succeeds(*argv: str) -> bool:
    return subprocess.run(argv, timeout=60, capture_output=True).returncode == 0


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def main(arguments: Sequence[str]) -> None:
    """Run the node until standard input ends."""
    node = Node(Path(arguments[0]), Path(arguments[1]))
    node.start()
    # Orphans become children of this process, which must reap them.
    signal.signal(signal.SIGCHLD, lambda *_: _reap(node))
    print("ready", flush=True)
    while os.read(0, 1):
        pass


def _reap(node: Node) -> None:
    known = {daemon.pid for daemon in node.daemons.values()}
    with contextlib.suppress(ChildProcessError):
        while True:
            # WNOWAIT leaves daemons to Popen.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in known:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


if __name__ == "__main__":
    main(sys.argv[1:])
