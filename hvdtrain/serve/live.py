"""Server-sent events: what changes is told as it does, until the browser has enough."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hvdtrain.jobs.files import last_json_line
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import left_s
from hvdtrain.jobs.log import log_end
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import job_of, view_to_json

__all__ = ["LiveApi"]

POLL_S = 0.5
# Something is said now and then, so that a connection that is gone is noticed.
BEAT_S = 15.0


class LiveApi:
    """The routes of server-sent events, to which the page listens.

    Args:
        index: All jobs.
        closing: Set when the server ends: nothing is told from then on.
    """

    def __init__(self, index: JobIndex, closing: asyncio.Event) -> None:
        self._index = index
        self._closing = closing

    def routes(self) -> list[Route]:
        """All routes, with the methods that they have."""
        return [
            Route("/api/live", self.jobs, methods=["GET"]),
            Route("/api/jobs/{name}/live", self.job, methods=["GET"]),
        ]

    async def jobs(self, request: Request) -> Response:
        """Tell that the list of jobs has changed."""
        return _stream(self._jobs())

    async def job(self, request: Request) -> Response:
        """Tell of one job: its state, its newest metrics, and how long its log is."""
        job = await run_in_threadpool(job_of, self._index, request)
        return _stream(self._job(job))

    async def _jobs(self) -> AsyncIterator[str]:
        told = None
        async for _ in self._beats():
            if (version := self._index.version) != told:
                told = version
                yield _event("jobs", {"version": version})
            else:
                yield ""

    async def _job(self, job: JobFolder) -> AsyncIterator[str]:
        told: Mapping[str, Any] = {}
        async for _ in self._beats():
            now = await run_in_threadpool(self._look, job)
            changed = {name: value for name, value in now.items() if told.get(name) != value}
            told = now
            yield _event("job", changed) if changed else ""

    def _look(self, job: JobFolder) -> Mapping[str, Any]:
        view = self._index.view(job.name)
        return {
            "view": None if view is None else view_to_json(view),
            "metrics": last_json_line(job.metrics),
            "left_s": None if view is None else left_s(job, view),
            "log_end": log_end(job.log),
            "events": job.events.stat().st_size if job.events.exists() else 0,
        }

    async def _beats(self) -> AsyncIterator[None]:
        while not self._closing.is_set():
            yield None
            try:
                await asyncio.wait_for(self._closing.wait(), POLL_S)
            except TimeoutError:
                continue


def _stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(
        _with_beats(events), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


async def _with_beats(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, and where there is none for long a comment."""
    quiet_s = 0.0
    async for event in events:
        quiet_s = 0.0 if event else quiet_s + POLL_S
        if event:
            yield event
        elif quiet_s >= BEAT_S:
            quiet_s = 0.0
            yield ": still here\n\n"


def _event(kind: str, content: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(content)}\n\n"
