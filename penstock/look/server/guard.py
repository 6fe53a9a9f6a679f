"""Middleware that guards every page: read-only, for the user who started the viewer, with no foreign scripts.

Every user of the machine can connect to a loopback port. The printed address therefore carries a random token, which
the first request exchanges for a cookie; without either, nothing is served. Another site's page could request rows from
a loopback server, directly or through a host name that resolves to loopback (DNS rebinding). The Host header must
therefore be ours, and so must Origin if it is present. Rows contain HTML and scripts: a strict content security policy
backs up the escaping.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterable
from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("penstock")

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LONGEST: Final = 4096  # bytes of a path with its query


class Guard:
    """Rejects foreign requests and adds security headers to responses."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], port: int, token: str) -> None:
        self._app = app
        self._hosts = frozenset(f"{host}:{port}" for host in hosts)
        self._cookie, self._token = f"penstock-{port}", token.encode()  # browsers send cookies to every port of a host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(scope)
        try:
            await (refused or self._app)(scope, receive, with_headers)
        except Exception:
            log.exception("the viewer failed on %s", scope["path"])
            if not started:
                failed = PlainTextResponse("The viewer failed; the terminal that runs it says why.", 500)
                await failed(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if headers.getlist("host") not in [[host] for host in self._hosts]:
            return PlainTextResponse("Refused: this viewer is served on loopback only, under its own address.", 421)
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        navigates = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        ours = origin is None or origin in {f"http://{host}" for host in self._hosts}
        if not ours or (site not in ("none", "same-origin") and not navigates):
            return PlainTextResponse("Refused: the request comes from another site.", 403)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("The viewer only reads.", 405, {"Allow": "GET, HEAD"})
        raw: bytes = scope.get("raw_path") or scope["path"].encode()
        query: bytes = scope["query_string"]
        if len(raw) + len(query) > _LONGEST:
            return PlainTextResponse("The address is too long.", 414)
        try:
            text = unquote_to_bytes(raw).decode() + unquote_to_bytes(query).decode()
        except UnicodeDecodeError:
            return PlainTextResponse("The address is not valid UTF-8.", 400)
        return PlainTextResponse("The address has control characters.", 400) if not _clean(text) else self._login(scope)

    def _login(self, scope: Scope) -> Response | None:
        """Let the cookie pass, exchange the token in the address for it, or refuse."""
        query = parse_qsl(scope["query_string"].decode(), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        cookie = cookie_parser(Headers(scope=scope).get("cookie", "")).get(self._cookie, "")
        if not any(hmac.compare_digest(given.encode(), self._token) for given in (cookie, *tokens)):
            return PlainTextResponse("Refused: open the address that `penstock view` printed, with its token.", 403)
        if not tokens:
            return None
        rest = urlencode([(name, value) for name, value in query if name != "token"])
        path = "/" + scope["path"].lstrip("/")  # never another host
        response = RedirectResponse(f"{path}?{rest}" if rest else path, 303)
        response.set_cookie(self._cookie, self._token.decode(), httponly=True, samesite="lax")
        return response


def _clean(text: str) -> bool:
    return not any(ord(char) < 32 or ord(char) == 127 for char in text)
