"""The page as an ASGI application: routes, and the guard before them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hvdtrain.jobs.spec import BackendKind
from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import JobApi
from hvdtrain.serve.live import LiveApi
from hvdtrain.serve.metrics_export import export
from hvdtrain.serve.security import COOKIE, SESSION_S, Guard, Keys, OneTimeCodes
from hvdtrain.version import __version__

__all__ = ["make_app"]

STATIC = Path(__file__).with_name("static")
_MOST_FORM = 4096
# With the icon, as browsers would ask for another.
_ENTER = """\
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
    """Make the ASGI application of the page and its API.

    Args:
        index: All jobs.
        keys: Tell who may see them.
        hosts: What may stand in the header Host.
        scheme: http or https.
        codes: Codes that log in once each.
        read_only: Whether nothing may be started, stopped or changed.
        environ: Variables for what is started; those of this process if not given.
        rank_metrics: Whether Prometheus is told of each rank, too.
    """
    closing = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        index.start()
        yield
        closing.set()
        index.close()

    session = _Session(
        keys, codes or OneTimeCodes(0), secure=scheme == "https", read_only=read_only
    )
    jobs = JobApi(index, os.environ if environ is None else environ)

    async def index_page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(export, index, with_ranks=rank_metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/", index_page, methods=["GET"]),
            *session.routes(),
            *jobs.routes(),
            *LiveApi(index, closing).routes(),
            Route("/metrics", metrics, methods=["GET"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, keys=keys, hosts=hosts, scheme=scheme, read_only=read_only)],
        lifespan=lifespan,
    )


class _Session:
    """Logging in and out."""

    def __init__(
        self,
        keys: Keys,
        codes: OneTimeCodes,
        *,
        secure: bool,
        read_only: bool,
    ) -> None:
        self._keys = keys
        self._codes = codes
        self._secure = secure
        self._read_only = read_only

    def routes(self) -> list[Route]:
        return [
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Route("/api/session", self.about, methods=["GET"]),
        ]

    async def login(self, request: Request) -> Response:
        """Give a cookie for the token in a form, or for the one-time code in a link of ``--open``.

        The token itself is not accepted in a URL, which browsers keep and other users may see.
        """
        if request.method == "POST":
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_FORM:
                    return Response("That is too long.\n", 413)
            given = parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()
            if self._keys.is_token(given):
                return self._let_in(RedirectResponse("/", 303))
        else:
            given = request.query_params.get("code", "")
            if request.method == "GET" and self._codes.redeem(given):
                # A redirect would not do: the link may come from a file, and where another site
                # began a chain of redirects, browsers send no strict cookie.
                return self._let_in(Response(_ENTER, media_type="text/html"))
        return FileResponse(STATIC / "login.html", 403 if given else 200)

    def _let_in(self, answer: Response) -> Response:
        answer.set_cookie(
            COOKIE,
            self._keys.session(time.time()),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=self._secure,
        )
        return answer

    async def logout(self, _: Request) -> Response:
        """Forget the cookie."""
        answer = JSONResponse({})
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._secure)
        return answer

    async def about(self, request: Request) -> Response:
        """Answer with what a page needs to know to ask for more."""
        return JSONResponse(
            {
                "csrf": self._keys.csrf(request.cookies.get(COOKIE, "")),
                "version": __version__,
                "now": time.time(),
                "folder": os.getcwd(),
                "backends": _backends(),
                "read_only": self._read_only,
            }
        )


def _backends() -> list[BackendKind]:
    """The backends that jobs can be submitted to from here."""
    found: list[BackendKind] = ["local"]
    if shutil.which("sbatch"):
        found.append("slurm")
    if importlib.util.find_spec("kubernetes"):
        found.append("kubernetes")
    return found
