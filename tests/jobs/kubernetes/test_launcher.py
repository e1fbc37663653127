from __future__ import annotations

import socket
import threading
import time

import pytest

from hvdtrain.jobs.kubernetes import launcher
from hvdtrain.jobs.kubernetes.launcher import await_own_name, await_workers


def test_workers_are_waited_for_until_they_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names come late, and sshd later."""
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
        assert await_workers(["there", "late"], lambda: False)
    assert known.is_set()
    assert capsys.readouterr().out == (
        "hvdtrain: waits for 1 of 2 workers (late: its name is not known yet)\n"
    )
    stop_at = time.monotonic() + 0.3
    assert not await_workers(["there"], lambda: time.monotonic() > stop_at)
    assert "Connection refused" in capsys.readouterr().out


@pytest.mark.parametrize("before", [[], ["10.0.0.1"]], ids=["unknown", "of_the_pod_before"])
def test_the_launcher_waits_until_workers_can_know_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], before: list[str]
) -> None:
    """Its own /etc/hosts has its name from the start."""
    known = {"x-launcher": ["10.0.0.2"], "x-launcher.x-launcher": before}

    def resolve(host: str, port: None) -> list[object]:
        if not known[host]:
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in known[host]]

    monkeypatch.setattr(launcher, "POLL_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert await_own_name("x-launcher", lambda: False), "in the network of its node"
    monkeypatch.setattr(socket, "gethostname", lambda: "x-launcher")
    threading.Timer(0.3, known.update, [{"x-launcher.x-launcher": ["10.0.0.2"]}]).start()
    assert await_own_name("x-launcher", lambda: False)
    assert known["x-launcher.x-launcher"] == ["10.0.0.2"]
    assert capsys.readouterr().out == "hvdtrain: waits for DNS to know its own name, x-launcher\n"
