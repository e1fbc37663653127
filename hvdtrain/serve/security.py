"""Access control for all routes and methods of the page.

Only certain Host and Origin headers are allowed. This prevents requests from other sites and DNS
rebinding. Users exchange the token for a session cookie. Scripts can't read the cookie, and
browsers don't send it with requests from other sites. Requests that change something also need a
CSRF token. Cookies are signed with the token, so they stay valid when the server restarts, and a
new token invalidates them.
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
# Paths that need no session, in addition to static files.
_OPEN = ("/login", "/favicon.ico")
# The only routes that accept POST with --read-only, because they only change the cookie.
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
    """Return the token in a file. If the file does not exist, create it with a new token.

    Raises:
        ConfigurationError: If other users can read the file, or it is not valid.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if path.stat().st_mode & 0o077:
                raise ConfigurationError(
                    f"{path} is readable by other users; remove it to create a new token."
                ) from None
        else:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token in {path} can't be read: {error}") from None
    if len(token) < 16:
        raise ConfigurationError(f"{path} contains no token; remove it to create a new one.")
    return token


def allowed_hosts(host: str, port: int, names: Collection[str] = ()) -> frozenset[str]:
    """Return the allowed Host headers with the port: loopback, ``host`` and each of ``names``."""
    own = {"127.0.0.1", "localhost", "[::1]"}
    if host not in ("0.0.0.0", "::"):
        own.add(f"[{host}]" if ":" in host else host)
    return frozenset(f"{name}:{port}" for name in own | set(names))


@dataclass(frozen=True)
class Keys:
    """The token, and the signatures made with it."""

    token: str

    def is_token(self, given: str) -> bool:
        """Return whether ``given`` is the token."""
        return hmac.compare_digest(given.encode(), self.token.encode())

    def session(self, now_s: float) -> str:
        """Return a new session cookie, valid for ``SESSION_S`` seconds."""
        until = f"{int(now_s + SESSION_S)}-{secrets.token_hex(8)}"
        return f"{until}.{self._sign(f'session {until}')}"

    def is_session(self, cookie: str, now_s: float) -> bool:
        """Return whether a session cookie is valid and has not expired."""
        until, _, signature = cookie.partition(".")
        expected = self._sign(f"session {until}")
        if not hmac.compare_digest(signature.encode(), expected.encode()):
            return False
        return int(until.partition("-")[0]) > now_s

    def csrf(self, cookie: str) -> str:
        """Return the CSRF token that belongs to a session cookie."""
        return self._sign(f"csrf {cookie}")

    def _sign(self, text: str) -> str:
        return hmac.new(self.token.encode(), text.encode(), hashlib.sha256).hexdigest()


class OneTimeCodes:
    """Login codes for links. Each is valid once, for a limited time, and only in this process."""

    def __init__(self, valid_s: float) -> None:
        self._valid_s = valid_s
        self._expires: dict[str, float] = {}

    def issue(self) -> str:
        """Return a new login code."""
        now = time.monotonic()
        self._expires = {code: until for code, until in self._expires.items() if until > now}
        code = secrets.token_urlsafe(32)
        self._expires[code] = now + self._valid_s
        return code

    def redeem(self, code: str) -> bool:
        """Return whether a code is valid, and invalidate it."""
        return time.monotonic() < self._expires.pop(code, 0.0)


class Guard:
    """ASGI middleware that refuses requests that are not allowed.

    Args:
        app: The application.
        keys: The token, and the signatures made with it.
        hosts: Allowed Host headers. Prefixed with ``scheme``, they are the allowed origins.
        scheme: http or https.
        read_only: Whether to refuse all requests that could change something, on every route.
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
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                # Browsers revalidate static files, so that an update replaces all of them.
                static = scope["path"].startswith(_STATIC)
                headers.setdefault("cache-control", "no-cache" if static else "no-store")
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the error response to a request; None if the request is allowed."""
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self._hosts:
            return _refuse("Unknown Host header; add it with hvdtrain serve --name.", 421)
        if scope["method"] not in _METHODS:
            return _refuse("Method not allowed.", 405)
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            return _refuse("Requests from other sites are refused.", 403)
        path: str = scope["path"]
        if path in _OPEN or path.startswith(_STATIC):
            return None
        if refusal := self._session_refusal(scope, headers):
            return refusal
        if self._read_only and scope["method"] not in READING and path not in _SESSION:
            message = "hvdtrain serve runs with --read-only; jobs can't be changed."
            return JSONResponse({"error": message}, 403)
        return None

    def _session_refusal(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and self._keys.is_token(given.strip()):
            # No CSRF token is needed, because browsers never send this header on their own.
            return None
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if not self._keys.is_session(cookie, time.time()):
            wants_page = scope["method"] == "GET" and "text/html" in headers.get("accept", "")
            return RedirectResponse("/login", 303) if wants_page else _refuse("Log in first.", 401)
        if scope["method"] not in READING:
            given = headers.get(CSRF_HEADER, "")
            if not hmac.compare_digest(given.encode(), self._keys.csrf(cookie).encode()):
                return _refuse("Invalid CSRF token; reload the page.", 403)
        return None


def _refuse(message: str, code: int) -> Response:
    return PlainTextResponse(message + "\n", code)
