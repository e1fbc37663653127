"""Access to the page: checks of who may talk to it, before any route, on every method.

What a browser is told by another page, or by a name that leads here, is refused: Host and Origin
must be among those that are allowed. Who shows the token gets a cookie that no script can read and
that no other site can send; what changes something needs a second word as well, which only
a page from here can know. Cookies are signed with the token, so that they outlive this process, and
end with the token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hvdtrain.errors import ConfigurationError

__all__ = [
    "COOKIE",
    "CSRF_HEADER",
    "READING",
    "Guard",
    "Keys",
    "OneTimeCodes",
    "allowed_hosts",
    "read_token",
]

COOKIE = "hvdtrain_session"
CSRF_HEADER = "x-csrf-token"
SESSION_S = 30 * 86400
READING = ("GET", "HEAD")
# Reached without a cookie: where one is given out, and what the page that asks for it looks like.
_OPEN = ("/login", "/favicon.ico")
# The only routes that accept POST with --read-only: they change nothing but the cookie.
_SESSION = ("/login", "/logout")
_STATIC = "/static/"
_METHODS = (*READING, "POST")
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def read_token(path: Path) -> str:
    """The token in a file, which is made if it isn't there.

    Raises:
        ConfigurationError: The file can be read by others, or not at all.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"{path} can be read by others; remove it, and a new token is made."
                ) from None
        else:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token in {path} can't be used: {error}") from None
    if len(token) < 16:
        raise ConfigurationError(f"{path} holds no token; remove it, and a new one is made.")
    return token


def allowed_hosts(host: str, port: int, names: Collection[str] = ()) -> frozenset[str]:
    """Return what the header Host may hold: what is listened on or in ``names``, with the port."""
    own = {"127.0.0.1", "localhost", "[::1]"}
    if host not in ("0.0.0.0", "::"):
        own.add(f"[{host}]" if ":" in host else host)
    return frozenset(f"{name}:{port}" for name in own | set(names))


@dataclass(frozen=True)
class Keys:
    """The token, and what is signed with it."""

    token: str

    def is_token(self, given: str) -> bool:
        """Whether this is the token."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def session(self, now_s: float) -> str:
        """Return a new cookie, valid for ``SESSION_S`` seconds."""
        until = f"{int(now_s + SESSION_S)}-{secrets.token_hex(8)}"
        return f"{until}.{self._sign(f'session {until}')}"

    def is_session(self, cookie: str, now_s: float) -> bool:
        """Return whether ``session`` made this cookie, and it has not expired."""
        until, _, signature = cookie.partition(".")
        expected = self._sign(f"session {until}")
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return False
        return int(until.partition("-")[0]) > now_s

    def csrf(self, cookie: str) -> str:
        """The word that goes with a cookie."""
        return self._sign(f"csrf {cookie}")

    def _sign(self, text: str) -> str:
        return hmac.new(self.token.encode(), text.encode(), hashlib.sha256).hexdigest()


class OneTimeCodes:
    """Codes for links; each is valid once, for a limited time, in this process alone.

    Args:
        valid_s: Seconds until an unused code expires.
    """

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._expires: dict[str, float] = {}

    def issue(self) -> str:
        """Return a new code."""
        now = time.monotonic()
        self._expires = {code: until for code, until in self._expires.items() if until > now}
        code = secrets.token_urlsafe(32)
        self._expires[code] = now + self._valid_s
        return code

    def redeem(self, code: str) -> bool:
        """Return whether a code is valid, and invalidate it."""
        return time.monotonic() < self._expires.pop(code, 0.0)


class Guard:
    """An ASGI middleware that lets nobody in but those who may come.

    Args:
        app: What is behind it.
        keys: Tell who may.
        hosts: What may stand in Host, and with ``scheme`` before it in Origin.
        scheme: http or https.
        read_only: Whether to refuse every request that could change something, whatever its route.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        hosts: Collection[str],
        scheme: str,
        *,
        read_only: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._read_only = read_only
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(f"{scheme}://{host}" for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            # There are no web sockets here.
            return
        refusal = self._refusal(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                # After an update the files of the page are to fit each other.
                static = scope["path"].startswith(_STATIC)
                headers.setdefault("cache-control", "no-cache" if static else "no-store")
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to somebody who is not let in; None for somebody who is."""
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self._hosts:
            return _refuse("This name is not one of those that hvdtrain serve answers to.", 421)
        if scope["method"] not in _METHODS:
            return _refuse("There is no such method here.", 405)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            return _refuse("Other pages may not ask here.", 403)
        path: str = scope["path"]
        if path in _OPEN or path.startswith(_STATIC):
            return None
        if refusal := self._without_session(scope, headers):
            return refusal
        if self._read_only and scope["method"] not in READING and path not in _SESSION:
            words = "hvdtrain serve runs with --read-only: it starts, stops and changes nothing."
            return JSONResponse({"error": words}, 403)
        return None

    def _without_session(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._keys.is_token(given.strip()):
            # Programs: no browser sends that by itself.
            return None
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if not self._keys.is_session(cookie, time.time()):
            wants_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
            return RedirectResponse("/login", 303) if wants_page else _refuse("Log in first.", 401)
        if scope["method"] not in READING:
            given = headers.get(CSRF_HEADER, "")
            if not hmac.compare_digest(given.encode(), self._keys.csrf(cookie).encode()):
                return _refuse("This was not asked by a page from here; load it again.", 403)
        return None


def _refuse(words: str, code: int) -> Response:
    return PlainTextResponse(words + "\n", code)
