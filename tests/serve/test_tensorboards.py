"""Real TensorBoards, as children of a server."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hvdtrain.jobs.folder import create_job
from hvdtrain.jobs.spec import JobSpec
from hvdtrain.serve import tensorboards
from hvdtrain.serve.tensorboards import TensorBoards
from tests.serve.server import Server

pytest.importorskip("tensorboard")


def _children(folder: Path) -> list[Path]:
    """The processes that show a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"hvdtrain.serve.tensorboard_child" in words and bytes(folder) in words:
            found.append(path.parent)
    return found


def _until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 20
    while left := _children(folder):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _write_loss(folder: Path) -> None:
    """An event file, made without what would load TensorFlow."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    value = Summary.Value(tag="loss", simple_value=0.5)
    event = Event(wall_time=1.0, step=1, summary=Summary(value=[value])).SerializeToString()
    length = struct.pack("<Q", len(event))
    sums = [struct.pack("<I", masked_crc32c(data)) for data in (length, event)]
    folder.mkdir()
    path = folder / "events.out.tfevents.1.host"
    path.write_bytes(length + sums[0] + event + sums[1])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> None:
        return None


@pytest.mark.slow
def test_one_answers_at_its_own_name_and_dies_with_the_server(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    _write_loss(logs)
    spec = JobSpec(options=(), program=("a.py", "logs"), folder=str(tmp_path), created_s=1.0)
    job = create_job(tmp_path / "jobs", spec)

    server = Server(tmp_path / "jobs")
    try:
        path = f"/api/jobs/{job.name}/tensorboard"
        with server.get(path) as answer:
            assert json.load(answer) == {"folder": str(logs), "why": ""}
        url = server.post(path, {"folder": str(logs)})["url"]
        # Browsers know that this name is this host.
        named = url.removeprefix("http://").partition("/")[0]
        opener = urllib.request.build_opener(_NoRedirects)
        asked = urllib.request.Request(url.replace(named, server.url.removeprefix("http://")))
        asked.add_header("host", named)
        with pytest.raises(urllib.error.HTTPError) as entered:
            opener.open(asked, timeout=20)
        cookie = entered.value.headers["set-cookie"].partition(";")[0]
        entered.value.close()

        def ask(rest: str) -> bytes:
            to = f"{server.url}/jobs/{job.name}/tensorboard/{rest}"
            asked = urllib.request.Request(to, headers={"host": named, "cookie": cookie})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.read()

        assert b"<tb-webapp" in ask("")
        deadline = time.monotonic() + 30
        while "loss" not in str(tags := json.loads(ask("data/plugin/scalars/tags"))):
            assert time.monotonic() < deadline, tags
            time.sleep(0.2)
        assert len(_children(logs)) == 1
        [socket] = Path(_children(logs)[0] / "cmdline").read_bytes().split(b"\0")[5:6]
        assert Path(socket.decode()).parent.stat().st_mode & 0o777 == 0o700
        server.kill()
        _until_gone(logs)
    finally:
        server.kill()


def test_those_that_nobody_needs_are_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tensorboards, "MOST", 2)
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()

    async def use() -> None:
        boards = TensorBoards()
        try:
            await boards.start("first", folders[0])
            [child] = _children(folders[0])
            await boards.start("first", folders[0])
            assert _children(folders[0]) == [child], "it runs already"
            await boards.start("second", folders[1])
            assert boards.client("first") is not None
            await boards.start("third", folders[2])
            assert boards.client("second") is None, "the one that was used least of late"
            _until_gone(folders[1])
        finally:
            await boards.close()

    asyncio.run(use())
    for folder in folders:
        _until_gone(folder)


def test_one_that_nobody_looks_at_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tensorboards, "IDLE_S", 0.5)

    async def leave_alone() -> None:
        boards = TensorBoards()
        try:
            await boards.start("job", tmp_path)
            deadline = time.monotonic() + 20
            while _children(tmp_path):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert boards.client("job") is None
        finally:
            await boards.close()

    asyncio.run(leave_alone())
