"""Server-sent events, which tell the page about changes to the list of jobs or to one job."""

from __future__ import annotations

import asyncio
import contextlib
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

__all__ = ["live_routes"]

POLL_S = 0.5
# How often a comment is sent, so that a broken connection is noticed.
COMMENT_S = 15.0


def live_routes(index: JobIndex, closing: asyncio.Event) -> list[Route]:
    """Return the routes of server-sent events.

    All streams end when ``closing`` is set, which means that the server ends.
    """

    def stream(kind: str, read: Callable[[], Mapping[str, Any]]) -> StreamingResponse:
        return StreamingResponse(
            _events(kind, read, closing),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )

    async def follow_jobs(request: Request) -> Response:
        return stream("jobs", lambda: {"version": index.version})

    async def follow_job(request: Request) -> Response:
        job = await run_in_threadpool(job_of, index, request)
        return stream("job", lambda: _job_values(index, job))

    return [
        Route("/api/live", follow_jobs, methods=["GET"]),
        Route("/api/jobs/{name}/live", follow_job, methods=["GET"]),
    ]


def _job_values(index: JobIndex, job: JobFolder) -> Mapping[str, Any]:
    view = index.view(job.name)
    return {
        "view": None if view is None else view_to_json(view),
        "metrics": last_json_line(job.metrics),
        "left_s": None if view is None else remaining_s(job, view),
        "log_end": log_end(job.log),
        "events": size_of(job.events),
    }


async def _events(
    kind: str, read: Callable[[], Mapping[str, Any]], closing: asyncio.Event
) -> AsyncIterator[str]:
    """Yield an event when the values change, and a comment if they don't change for long."""
    sent: Mapping[str, Any] = {}
    quiet_s = 0.0
    while not closing.is_set():
        current = await run_in_threadpool(read)
        changed = {name: value for name, value in current.items() if sent.get(name) != value}
        sent = current
        quiet_s += POLL_S
        if changed:
            quiet_s = 0.0
            yield f"event: {kind}\ndata: {json.dumps(changed)}\n\n"
        elif quiet_s >= COMMENT_S:
            quiet_s = 0.0
            yield ": no change\n\n"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing.wait(), POLL_S)
