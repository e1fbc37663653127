"""Server-sent events: changes are pushed until the browser leaves or the server ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hvdtrain.jobs.files import last_json_line, size_of
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import left_s
from hvdtrain.jobs.log import log_end
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import job_of, view_to_json

__all__ = ["LiveApi"]

POLL_S = 0.5
# A comment is sent this often, so that a broken connection is noticed.
BEAT_S = 15.0


class LiveApi:
    """The routes of server-sent events, to which the page listens.

    Args:
        index: All jobs.
        closing: Set when the server ends; it ends all streams.
    """

    def __init__(self, index: JobIndex, closing: asyncio.Event) -> None:
        self._index = index
        self._closing = closing

    def routes(self) -> list[Route]:
        """Return all routes, with their methods."""
        return [
            Route("/api/live", self.jobs, methods=["GET"]),
            Route("/api/jobs/{name}/live", self.job, methods=["GET"]),
        ]

    async def jobs(self, request: Request) -> Response:
        """Push an event when the list of jobs has changed."""
        return self._stream("jobs", lambda: {"version": self._index.version})

    async def job(self, request: Request) -> Response:
        """Push changes of a job: its state, its newest metrics, and the length of its log."""
        job = await run_in_threadpool(job_of, self._index, request)
        return self._stream("job", lambda: self._look(job))

    def _look(self, job: JobFolder) -> Mapping[str, Any]:
        view = self._index.view(job.name)
        return {
            "view": None if view is None else view_to_json(view),
            "metrics": last_json_line(job.metrics),
            "left_s": None if view is None else left_s(job, view),
            "log_end": log_end(job.log),
            "events": size_of(job.events),
        }

    def _stream(self, kind: str, look: Callable[[], Mapping[str, Any]]) -> StreamingResponse:
        return StreamingResponse(
            self._events(kind, look),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _events(self, kind: str, look: Callable[[], Mapping[str, Any]]) -> AsyncIterator[str]:
        """Yield the changed values as events, and comments when nothing changes."""
        sent: Mapping[str, Any] = {}
        quiet_s = 0.0
        while not self._closing.is_set():
            now = await run_in_threadpool(look)
            changed = {name: value for name, value in now.items() if sent.get(name) != value}
            sent = now
            quiet_s += POLL_S
            if changed:
                quiet_s = 0.0
                yield f"event: {kind}\ndata: {json.dumps(changed)}\n\n"
            elif quiet_s >= BEAT_S:
                quiet_s = 0.0
                yield ": no change\n\n"
            try:
                await asyncio.wait_for(self._closing.wait(), POLL_S)
            except TimeoutError:
                continue
