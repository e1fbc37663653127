"""The page as an ASGI application: routes, and the guard before them."""

from __future__ import annotations

import asyncio
import os
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
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from hvdtrain.serve.index import JobIndex
from hvdtrain.serve.job_api import JobApi
from hvdtrain.serve.live import LiveApi
from hvdtrain.serve.metrics_export import export
from hvdtrain.serve.policy import Policy
from hvdtrain.serve.security import COOKIE, SESSION_S, Guard, Keys
from hvdtrain.serve.static_files import StaticFiles
from hvdtrain.serve.tensorboard_api import TensorBoardApi
from hvdtrain.serve.tensorboard_site import AtHost, TensorBoardSite
from hvdtrain.serve.tensorboards import TensorBoards
from hvdtrain.version import __version__

__all__ = ["make_app"]

STATIC = Path(__file__).with_name("static")
_MOST_FORM = 4096


def make_app(
    index: JobIndex,
    keys: Keys,
    policy: Policy,
    *,
    hosts: Collection[str],
    scheme: str = "http",
    environ: Mapping[str, str] | None = None,
    tensorboard_host: str = "",
    rank_metrics: bool = False,
) -> Starlette:
    """Make the ASGI application of the page and its API.

    Args:
        index: All jobs.
        keys: Tell who may see them.
        policy: What may be started.
        hosts: What may stand in the header Host.
        scheme: http or https.
        environ: Variables for what is started; those of this process if not given.
        tensorboard_host: The name, with the port, at which browsers find TensorBoards; empty where
            they find none.
        rank_metrics: Whether Prometheus is told of each rank, too.
    """
    boards = TensorBoards()
    site = TensorBoardSite(boards, keys, f"{scheme}://{tensorboard_host}")
    closing = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        index.start()
        yield
        closing.set()
        index.close()
        await boards.close()

    files = StaticFiles(STATIC)
    session = _Session(keys, policy, files, secure=scheme == "https")
    jobs = JobApi(index, policy, os.environ if environ is None else environ)

    async def index_page(_: Request) -> Response:
        return files.page("index.html")

    async def metrics(_: Request) -> Response:
        text = await run_in_threadpool(export, index, with_ranks=rank_metrics)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/", index_page, methods=["GET"]),
            *session.routes(),
            *jobs.routes(),
            *LiveApi(index, closing).routes(),
            *TensorBoardApi(index, policy, boards, site if tensorboard_host else None).routes(),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/static/{path:path}", files.answer, methods=["GET"]),
        ],
        middleware=[
            *([Middleware(AtHost, other=site, host=tensorboard_host)] if tensorboard_host else []),
            Middleware(Guard, keys=keys, hosts=hosts, scheme=scheme),
        ],
        lifespan=lifespan,
    )


class _Session:
    """Logging in and out."""

    def __init__(self, keys: Keys, policy: Policy, files: StaticFiles, *, secure: bool) -> None:
        self._keys = keys
        self._files = files
        self._policy = policy
        self._secure = secure

    def routes(self) -> list[Route]:
        return [
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/logout", self.logout, methods=["POST"]),
            Route("/api/session", self.about, methods=["GET"]),
        ]

    async def login(self, request: Request) -> Response:
        """Ask for the token, or take it for a cookie; the link of ``--open`` brings it along."""
        given = request.query_params.get("token", "")
        if request.method == "POST":
            body = bytearray()
            async for chunk in request.stream():
                body += chunk
                if len(body) > _MOST_FORM:
                    return Response("That is too long.\n", 413)
            given = parse_qs(body.decode("ascii", "replace")).get("token", [""])[0].strip()
        if self._keys.is_token(given):
            answer = RedirectResponse("/", 303)
            answer.set_cookie(
                COOKIE,
                self._keys.session(time.time()),
                max_age=SESSION_S,
                httponly=True,
                samesite="strict",
                secure=self._secure,
            )
            return answer
        return self._files.page("login.html", 403 if given else 200)

    async def logout(self, _: Request) -> Response:
        """Forget the cookie."""
        answer = JSONResponse({})
        answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=self._secure)
        return answer

    async def about(self, request: Request) -> Response:
        """Answer with what a page needs to know to ask for more."""
        policy = self._policy
        return JSONResponse(
            {
                "csrf": self._keys.csrf(request.cookies.get(COOKIE, "")),
                "version": __version__,
                "now": time.time(),
                "folders": [str(path) for path in policy.folders],
                "programs": list(policy.programs),
                "backends": list(policy.backends),
                "read_only": not policy.allows_something,
            }
        )
