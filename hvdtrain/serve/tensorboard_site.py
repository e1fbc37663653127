"""TensorBoards of jobs under a name of their own, to which the page opens the door.

What TensorBoard shows comes from event files, and its scripts need rights that the page's own do
not have. So it has another origin than the page, ``tensorboard.localhost`` at the same port:
nothing that runs there can read the page, its cookie or the word that changes something, and the
page's guard refuses what it asks. Who has logged in to the page gets a key to it, which fits once.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping

import httpx2
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from hvdtrain.serve.security import READING, Keys, OneTimeCodes
from hvdtrain.serve.tensorboards import TensorBoards, prefix_of

__all__ = ["AtHost", "TensorBoardSite"]

HOST = "tensorboard.localhost"
COOKIE = "hvdtrain_tensorboard"
KEY_S = 60.0
COOKIE_S = 12 * 3600
_PATH = re.compile(r"/jobs/([^/]+)/tensorboard(?:/.*)?", re.DOTALL)
_MOST_BODY = 8 << 20
# TensorBoard sends a policy of its own as well, and both hold.
_HEADERS = {
    "content-security-policy": "default-src 'self' data: blob:; "
    "script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline' data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'self'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
# What is between two of three, or none of TensorBoard's business.
_NOT_ASKED = {
    *("host", "cookie", "authorization", "origin", "referer", "content-length"),
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect"),
}
_NOT_ANSWERED = {"connection", "keep-alive", "transfer-encoding", "set-cookie", "server", "date"}


class AtHost:
    """An ASGI middleware that has one name answered by another application.

    Args:
        app: Answers to all other names.
        other: Answers to that one.
        host: The name, with the port.
    """

    def __init__(self, app: ASGIApp, other: ASGIApp, host: str) -> None:
        self._app = app
        self._other = other
        self._host = host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        named = scope["type"] == "http" and Headers(scope=scope).get("host", "").lower()
        await (self._other if named == self._host else self._app)(scope, receive, send)


class TensorBoardSite:
    """An ASGI application: the door, and behind it the TensorBoards.

    Args:
        boards: Those that run.
        keys: Sign the cookie.
        origin: Under which browsers reach it.
    """

    def __init__(self, boards: TensorBoards, keys: Keys, origin: str) -> None:
        self._boards = boards
        self._keys = keys
        self._origin = origin
        # Each stands for the name of a job.
        self._doors = OneTimeCodes(KEY_S)

    def link(self, name: str) -> str:
        """A link to the TensorBoard of a job that lets somebody in, once and soon."""
        return f"{self._origin}/enter?key={self._doors.issue(name)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        answer = await self._answer(request)
        for name, value in _HEADERS.items():
            answer.headers.append(name, value)
        answer.headers.setdefault("cache-control", "no-store")
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if request.method not in (*READING, "POST"):
            return PlainTextResponse("There is no such method here.\n", 405)
        # TensorBoard reads by POST as well. Nothing here changes anything, and nobody else may ask.
        if request.headers.get("origin", self._origin).lower() != self._origin:
            return PlainTextResponse("Other pages may not ask here.\n", 403)
        if request.url.path == "/enter":
            return self._enter(request.query_params.get("key", ""))
        cookie = request.cookies.get(COOKIE, "")
        if not self._keys.is_sealed("tensorboard", cookie, time.time()):
            return PlainTextResponse("Open it from the job's page.\n", 401)
        found = _PATH.fullmatch(request.url.path)
        client = self._boards.client(found[1]) if found else None
        if found is None or client is None:
            said = "It has ended, as nobody looked. Open it from the job's page again.\n"
            return PlainTextResponse(said, 404)
        return await self._ask(client, found[1], request)

    def _enter(self, key: str) -> Response:
        name = self._doors.redeem(key)
        if name is None:
            return PlainTextResponse("This link was used. Open it from the job's page.\n", 403)
        answer = RedirectResponse(f"{prefix_of(name)}/", 303)
        answer.set_cookie(
            COOKIE,
            self._keys.sealed("tensorboard", time.time() + COOKIE_S),
            max_age=COOKIE_S,
            httponly=True,
            # A strict one would not come along from the page, which is another site.
            samesite="lax",
        )
        return answer

    async def _ask(self, client: httpx2.AsyncClient, name: str, request: Request) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BODY:
                return PlainTextResponse("That is too long.\n", 413)
        target: bytes = request.scope["raw_path"]
        if request.scope["query_string"]:
            target += b"?" + request.scope["query_string"]
        asked = client.build_request(
            request.method,
            httpx2.URL(scheme="http", host=HOST, raw_path=target),
            headers=_without(request.headers, _NOT_ASKED),
            content=bytes(body),
        )
        try:
            answer = await client.send(asked, stream=True)
        except httpx2.TransportError as error:
            words = self._boards.last_words(name) or str(error)
            return PlainTextResponse(
                f"TensorBoard does not answer. Its last words:\n{words}\n", 502
            )
        return StreamingResponse(
            _content(answer), answer.status_code, headers=_without(answer.headers, _NOT_ANSWERED)
        )


async def _content(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def _without(headers: Mapping[str, str], names: set[str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in names}
