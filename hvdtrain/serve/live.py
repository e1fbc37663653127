"""Server-sent events, with which the page follows the list of jobs and single jobs."""

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
from hvdtrain.jobs.job_view import remaining_s
from hvdtrain.jobs.log import log_end
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import job_of, view_to_json

__all__ = ["LiveApi"]

POLL_S = 0.5
# How often a comment is sent, so that a broken connection is noticed.
COMMENT_S = 15.0


class LiveApi:
    """The routes of server-sent events.

    Args:
        index: The jobs.
        closing: Set when the server ends, which ends all streams.
    """

    def __init__(self, index: JobIndex, closing: asyncio.Event) -> None:
        self._index = index
        self._closing = closing

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/api/live", self._follow_jobs, methods=["GET"]),
            Route("/api/jobs/{name}/live", self._follow_job, methods=["GET"]),
        ]

    async def _follow_jobs(self, request: Request) -> Response:
        return self._stream("jobs", lambda: {"version": self._index.version})

    async def _follow_job(self, request: Request) -> Response:
        job = await run_in_threadpool(job_of, self._index, request)
        return self._stream("job", lambda: self._job_values(job))

    def _job_values(self, job: JobFolder) -> Mapping[str, Any]:
        view = self._index.view(job.name)
        return {
            "view": None if view is None else view_to_json(view),
            "metrics": last_json_line(job.metrics),
            "left_s": None if view is None else remaining_s(job, view),
            "log_end": log_end(job.log),
            "events": size_of(job.events),
        }

    def _stream(self, kind: str, values: Callable[[], Mapping[str, Any]]) -> StreamingResponse:
        return StreamingResponse(
            self._events(kind, values),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def _events(
        self, kind: str, values: Callable[[], Mapping[str, Any]]
    ) -> AsyncIterator[str]:
        """Yield changed values as events, and comments if nothing changes."""
        sent: Mapping[str, Any] = {}
        quiet_s = 0.0
        while not self._closing.is_set():
            current = await run_in_threadpool(values)
            changed = {name: value for name, value in current.items() if sent.get(name) != value}
            sent = current
            quiet_s += POLL_S
            if changed:
                quiet_s = 0.0
                yield f"event: {kind}\ndata: {json.dumps(changed)}\n\n"
            elif quiet_s >= COMMENT_S:
                quiet_s = 0.0
                yield ": no change\n\n"
            try:
                await asyncio.wait_for(self._closing.wait(), POLL_S)
            except TimeoutError:
                continue
