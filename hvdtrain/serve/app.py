"""The ASGI application of the web page: routes, sessions, and events about changes of jobs."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hvdtrain.jobs.files import last_json_line, size_of
from hvdtrain.jobs.folder import JobFolder
from hvdtrain.jobs.job_view import remaining_s
from hvdtrain.jobs.log import log_end
from hvdtrain.jobs.spec import BackendKind
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import JobApi, job_of, view_to_json
from hvdtrain.serve.metrics_export import export
from hvdtrain.serve.security import COOKIE, SESSION_S, Guard, Keys, OneTimeCodes
from hvdtrain.version import __version__

__all__ = ["make_app"]

STATIC = Path(__file__).with_name("static")
_MOST_FORM_BYTES = 4096
POLL_S = 0.5
# How often a comment is sent, so that a broken connection is noticed.
COMMENT_S = 15.0
# The page names its icon, because browsers would otherwise request /favicon.ico.
_LOGGED_IN = """\
<!doctype html>
<meta http-equiv="refresh" content="0; url=/">
<link rel="icon" href="/static/icon.svg" type="image/svg+xml">
<title>hvdtrain</title>
"""


def make_app(
    index: JobIndex,
    keys: Keys,
    *,
    hosts: Collection[str],
    scheme: str = "http",
    codes: OneTimeCodes | None = None,
    read_only: bool = False,
    environ: Mapping[str, str] | None = None,
    rank_metrics: bool = False,
) -> Starlette:
    """Return the ASGI application.

    Args:
        index: The jobs.
        keys: The token, and the signatures made with it.
        hosts: Allowed Host headers.
        scheme: http or https.
        codes: One-time login codes.
        read_only: Whether requests that change something are refused.
        environ: The environment of submitted jobs; by default ``os.environ``.
        rank_metrics: Whether ``/metrics`` includes each rank.
    """
    closing = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        index.start()
        yield
        closing.set()
        index.close()

    async def index_page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(export, index, with_ranks=rank_metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    session = _session_routes(
        keys, codes or OneTimeCodes(0), secure=scheme == "https", read_only=read_only
    )
    return Starlette(
        routes=[
            Route("/", index_page, methods=["GET"]),
            *session,
            *JobApi(index, os.environ if environ is None else environ).routes(),
            *_live_routes(index, closing),
            Route("/metrics", metrics, methods=["GET"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, keys=keys, hosts=hosts, scheme=scheme, read_only=read_only)],
        lifespan=lifespan,
    )


def _session_routes(
    keys: Keys, codes: OneTimeCodes, *, secure: bool, read_only: bool
) -> list[Route]:
    """Return the routes for logging in and out."""

    async def login(request: Request) -> Response:
        """Set the session cookie if a form has the token, or a link has a one-time code.

        The token is not accepted in a URL, because browsers store URLs and other users may see
        them.
        """
        if request.method == "POST":
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_FORM_BYTES:
                    return Response("The form is too large.\n", 413)
            given = parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()
            if keys.is_token(given):
                return log_in(RedirectResponse("/", 303))
        else:
            given = request.query_params.get("code", "")
            if request.method == "GET" and codes.redeem(given):
                # This is not a redirect, because the link comes from a file. Browsers don't send a
                # strict cookie after a redirect that started on a different site.
                return log_in(Response(_LOGGED_IN, media_type="text/html"))
        return FileResponse(STATIC / "login.html", 403 if given else 200)

    def log_in(response: Response) -> Response:
        session = keys.session(time.time())
        response.set_cookie(
            COOKIE, session, SESSION_S, httponly=True, samesite="strict", secure=secure
        )
        return response

    async def logout(_: Request) -> Response:
        response = JSONResponse({})
        response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=secure)
        return response

    async def session(request: Request) -> Response:
        """Return what the page needs when it is loaded, such as its CSRF token."""
        backends: list[BackendKind] = ["local"]
        if shutil.which("sbatch"):
            backends.append("slurm")
        if importlib.util.find_spec("kubernetes"):
            backends.append("kubernetes")
        return JSONResponse(
            {
                "csrf": keys.csrf(request.cookies.get(COOKIE, "")),
                "version": __version__,
                "now": time.time(),
                "folder": os.getcwd(),
                "backends": backends,
                "read_only": read_only,
            }
        )

    return [
        Route("/login", login, methods=["GET", "POST"]),
        Route("/logout", logout, methods=["POST"]),
        Route("/api/session", session, methods=["GET"]),
    ]


def _live_routes(index: JobIndex, closing: asyncio.Event) -> list[Route]:
    """Return the routes of server-sent events, which end when ``closing`` is set."""

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
