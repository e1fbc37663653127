from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdtrain.pods import cluster_api, launcher
from hvdtrain.pods.cluster_api import ClusterApi
from hvdtrain.pods.launcher import release_workers, wait_for_own_name, wait_for_workers


def test_wait_for_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = threading.Event()
    resolve = socket.getaddrinfo

    def late(host: str, *rest: object, **more: object) -> object:
        if host == "late" and not known.is_set():
            raise socket.gaierror("Name or service not known")
        return resolve("127.0.0.1", *rest, **more)  # type: ignore[arg-type]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(launcher, "SSH_PORT", port)
        monkeypatch.setattr(launcher, "POLL_S", 0.05)
        monkeypatch.setattr(socket, "getaddrinfo", late)
        threading.Timer(0.3, known.set).start()
        assert wait_for_workers(["there", "late"], lambda: False)
    assert known.is_set()
    assert capsys.readouterr().out == (
        "hvdtrain: waiting for 1 of 2 workers (late: its name is not in DNS yet)\n"
    )
    stop_at = time.monotonic() + 0.3
    assert not wait_for_workers(["there"], lambda: time.monotonic() > stop_at)
    assert "Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize("previous", [[], ["10.0.0.1"]], ids=["unknown", "previous_pod"])
def test_wait_for_own_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], previous: list[str]
) -> None:
    known = {"x-launcher": ["10.0.0.2"], "x-launcher.x-launcher": previous}

    def resolve(host: str, port: None) -> list[object]:
        if not known[host]:
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(launcher, "POLL_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert wait_for_own_name("x-launcher", lambda: False), "the pod uses the network of its node"
    monkeypatch.setattr(socket, "gethostname", lambda: "x-launcher")
    threading.Timer(0.3, known.update, [{"x-launcher.x-launcher": ["10.0.0.2"]}]).start()
    assert wait_for_own_name("x-launcher", lambda: False)
    assert known["x-launcher.x-launcher"] == ["10.0.0.2"]
    assert capsys.readouterr().out == "hvdtrain: waiting for the name x-launcher in DNS\n"


def test_a_stop_while_the_process_starts_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    # The watching thread has seen no process, and records the stop after the process has started.
    appends, checked = threading.Event(), threading.Event()
    sent: list[int] = []

    class Signals(list[int]):
        def append(self, number: int) -> None:
            appends.set()
            checked.wait(0.5)
            super().append(number)

        def __len__(self) -> int:
            checked.set()
            return super().__len__()

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    child = launcher.RunProcess()
    child._signals = Signals()
    watch = threading.Thread(target=child.stop, kwargs={"save": True})

    def wait() -> int:
        watch.join(10)
        return 0

    def start(*_: object, **_more: object) -> SimpleNamespace:
        watch.start()
        assert appends.wait(10)
        return SimpleNamespace(send_signal=sent.append, wait=wait)

    monkeypatch.setattr(subprocess, "Popen", start)
    assert child.run(["run"], {}) == 0
    assert sent == [signal.SIGTERM]


class ApiServer:
    """An API server that fails at first.

    Attributes:
        failures: The status codes of the first responses; 0 closes the connection.
        requests: The method, path and content of each request.
    """

    def __init__(self) -> None:
        self.failures: list[int] = []
        self.requests: list[tuple[str, str, object]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                content = json.loads(self.rfile.read(size)) if size else None
                server.requests.append((self.command, self.path.partition("?")[0], content))
                code = server.failures.pop(0) if server.failures else 200
                if not code:
                    return
                answer: object = {"message": f"error {code}"}
                if code == 200:
                    answer = {"items": [], "spec": {"replicas": 2}, "metadata": {}}
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_PATCH = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    kubernetes = pytest.importorskip("kubernetes")
    server = ApiServer()

    def of_pod() -> ClusterApi:
        configuration = cluster_api._configuration()
        configuration.host = f"http://127.0.0.1:{server.http.server_address[1]}"
        client = kubernetes.client.ApiClient(configuration)
        return ClusterApi(cluster_api._dynamic_client(client), "here")

    monkeypatch.setattr(ClusterApi, "of_pod", of_pod)
    monkeypatch.setattr(launcher, "POLL_S", 0.02)
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_failing_requests_are_retried_at_the_start(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(launcher, "_HOSTS", tmp_path / "hosts.json")
    # The StatefulSet and the permissions may be created after the launcher's pod.
    server.failures = [0, 503, 404, 403, 200, 500]
    child: Any = SimpleNamespace(is_stopped=False)
    watch = launcher._watch_workers("train", 1, child)
    assert watch is not None
    assert watch.addresses == ["train-worker-0.train", "train-worker-1.train"]


def test_workers_are_released_once_the_cluster_answers(
    server: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failures = [503, 0, 500, 200, 503]
    release_workers("train", has_failed=True, give_up=lambda: False)
    scale = "/apis/apps/v1/namespaces/here/statefulsets/train-worker/scale"
    job = "/apis/batch/v1/namespaces/here/jobs/train"
    assert server.requests == [
        *[("PATCH", scale, {"spec": {"replicas": 0}})] * 4,
        *[("PATCH", job, {"spec": {"backoffLimit": 0}})] * 2,
    ]
    assert "still hold their resources" not in capsys.readouterr().err


def test_missing_rights_end_the_retries(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "REFUSED_S", 0.1)
    server.failures = [403] * 1000
    release_workers("train", has_failed=False, give_up=lambda: False)
    error = capsys.readouterr().err
    assert "Release them with: kubectl scale statefulset train-worker --replicas 0" in error
    assert len(server.requests) > 1
    # A pod that has to end gives up.
    server.failures, before = [503] * 1000, len(server.requests)
    release_workers("train", has_failed=False, give_up=lambda: True)
    assert len(server.requests) == before + 1
