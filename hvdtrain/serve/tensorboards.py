"""The TensorBoards of jobs: started when somebody looks, ended when nobody does any more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from hvdtrain.serve.private_folder import PrivateFolder
from hvdtrain.serve.tensorboard_child import child_argv

__all__ = ["TensorBoards", "prefix_of"]

IDLE_S = 900.0
# Each takes some hundred MiB.
MOST = 4
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 3.0
_LAST_WORDS = 5


def prefix_of(name: str) -> str:
    """The path under which the TensorBoard of a job is."""
    return f"/jobs/{name}/tensorboard"


@dataclass(kw_only=True)
class _Board:
    """A TensorBoard that was started."""

    logdir: Path
    process: Process
    client: httpx2.AsyncClient
    words: Path
    used_at: float = field(default_factory=time.monotonic)


class TensorBoards:
    """The children of this process; to be asked from its event loop."""

    def __init__(self) -> None:
        self._boards: dict[str, _Board] = {}
        self._folder: PrivateFolder | None = None
        self._started = 0
        self._tidying: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    async def start(self, name: str, logdir: Path) -> None:
        """Have a TensorBoard of a job, which shows a folder; it takes some seconds to answer.

        Raises:
            OSError: It can't be started.
        """
        async with self._lock:
            board = self._boards.get(name)
            if board is not None and board.logdir == logdir and board.process.returncode is None:
                board.used_at = time.monotonic()
                return
            if board is not None:
                await self._end(name)
            while len(self._boards) >= MOST:
                await self._end(min(self._boards, key=lambda one: self._boards[one].used_at))
            self._boards[name] = await self._launch(name, logdir)
            self._tidying = self._tidying or asyncio.create_task(self._tidy())

    def client(self, name: str) -> httpx2.AsyncClient | None:
        """Return a client that asks the TensorBoard of a job; None where there is none."""
        board = self._boards.get(name)
        if board is None:
            return None
        board.used_at = time.monotonic()
        return board.client

    def last_words(self, name: str) -> str:
        """Return what a TensorBoard that does not answer said last; empty for nothing."""
        board = self._boards.get(name)
        if board is None:
            return ""
        lines = board.words.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-_LAST_WORDS:])

    async def close(self) -> None:
        """End all of them."""
        if self._tidying is not None:
            self._tidying.cancel()
        for name in list(self._boards):
            await self._end(name)
        if self._folder is not None:
            self._folder.remove()

    async def _launch(self, name: str, logdir: Path) -> _Board:
        self._folder = self._folder or PrivateFolder("hvdtrain-tensorboard-")
        self._started += 1
        path = self._folder.path / f"{self._started}.socket"
        words = path.with_suffix(".txt")
        # Who connects to it before the child is ready waits; once the child is gone nobody does.
        with socket.socket(socket.AF_UNIX) as listener, words.open("wb") as said:
            listener.bind(str(path))
            listener.listen(64)
            number = listener.fileno()
            process = await asyncio.create_subprocess_exec(
                *child_argv(number, str(path), str(logdir), prefix_of(name)),
                pass_fds=(number,),
                stdin=DEVNULL,
                stdout=said,
                stderr=said,
            )
        client = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds=str(path)), timeout=START_TIMEOUT_S
        )
        return _Board(logdir=logdir, process=process, client=client, words=words)

    async def _end(self, name: str) -> None:
        board = self._boards.pop(name)
        await board.client.aclose()
        with contextlib.suppress(ProcessLookupError):
            board.process.terminate()
            try:
                await asyncio.wait_for(board.process.wait(), END_TIMEOUT_S)
            except TimeoutError:
                board.process.kill()
                await board.process.wait()

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(IDLE_S / 10)
            async with self._lock:
                old = time.monotonic() - IDLE_S
                for name in [name for name, one in self._boards.items() if one.used_at < old]:
                    await self._end(name)
