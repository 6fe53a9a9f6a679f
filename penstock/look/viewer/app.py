"""The pages of the viewer and their server, which listens on loopback for a single user."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qsl, unquote_to_bytes, urlencode

import numpy as np
import orjson
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.arrays import Bool
from penstock.errors import PenstockError
from penstock.load.options import LossPolicy
from penstock.load.parts import PART_NAMES
from penstock.look.html import PAGES, link, render
from penstock.look.survey import Flag
from penstock.look.tokens import ROLE_NAMES, blocks, text_of, visible_text
from penstock.look.viewer.batch_page import Query, batch_page
from penstock.look.viewer.session import SORTS, Filters, Session
from penstock.prepare.chat.conversation import BODY_PARTS, Role

# ---- guard -----------------------------------------------------------------------------------------------------------
# Middleware that guards every page: read-only, for the user who started the viewer, with no foreign scripts.
#
# Every user of the machine can connect to a loopback port. The printed address therefore carries a random token, which
# the first request exchanges for a cookie; without either, nothing is served. Another site's page could request rows
# from a loopback server, directly or through a host name that resolves to loopback (DNS rebinding). The Host header
# must therefore be ours, and so must Origin if it is present. Rows contain HTML and scripts: a strict content security
# policy backs up the escaping.


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


# ---- app -------------------------------------------------------------------------------------------------------------


PER_PAGE: Final = 50
MOST_HITS: Final = 100  # per search, until more are requested
LOOPBACK: Final = "127.0.0.1"
STATIC: Final = {
    "look.css": "text/css",
    "viewer.css": "text/css",
    "look.js": "text/javascript",
    "viewer.js": "text/javascript",
}
ROLES: Final = [name for role, name in ROLE_NAMES.items() if role is not Role.NONE]
PARTS: Final = [PART_NAMES[part] for part in BODY_PARTS]
FLAGS: Final = [str(flag.name).lower() for flag in Flag]
Page = Callable[[Session, Request], Response]


def make_app(session: Session, port: int, token: str) -> Guard:
    """The application, guarded by a token; `port` is part of the host names it accepts."""
    pages: dict[str, Page] = {
        "/": rows_page,
        "/row/{row:int}": row_page,
        "/jump": jump,
        "/batch": batches,
        "/report": report_page,
        "/diff": diff_page,
    }
    routes = [Route(path, partial(_shown, page, session)) for path, page in pages.items()]
    routes += [Route("/search", partial(search, session)), Route("/static/{name}", static)]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    return Guard(app, (LOOPBACK, "localhost", "[::1]"), port, token)


async def _shown(page: Page, session: Session, request: Request) -> Response:
    """Render a page in a thread; invalid requests get a 4xx response that says why."""
    try:
        response = await run_in_threadpool(page, session, request)
    except PenstockError as error:
        return _error_page(400, str(error))
    response.background = BackgroundTask(session.catalog.start)  # after the response is sent
    return response


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"There is no page {request.url.path!r}." if error.detail == "Not Found" else error.detail
    return _error_page(error.status_code, detail)


def _error_page(status: int, text: str) -> Response:
    return HTMLResponse(render("error.html", status=status, text=text, title="Not possible", session=None), status)


def _page(template: str, session: Session, title: str, **values: Any) -> Response:
    return HTMLResponse(render(template, session=session, title=title, **values))


# -- rows -----------------------------------------------------------------------------------------------------------


def _filters(query: Query) -> Filters:
    return Filters(
        role=query.choice("role", ROLES),
        part=query.choice("part", PARTS),
        shortest=query.number("min"),
        longest=query.number("max"),
        least=query.number("share_min", high=100),
        most=query.number("share_max", high=100),
        warning=query.choice("warning", FLAGS),
        source=query.number("source"),
        sort=query.choice("sort", SORTS),
    )


def _asked(filters: Filters, text: str = "") -> dict[str, object]:
    """Filters from a query string."""
    names = ("role", "part", "min", "max", "share_min", "share_max", "warning", "source", "sort")
    return {"q": text, **dict(zip(names, filters, strict=True))}


def _query(request: Request) -> Query:
    return Query(request.query_params, request.query_params.multi_items())


def rows_page(session: Session, request: Request) -> Response:
    """The filtered list of rows; searches load it from `search`."""
    query = _query(request)
    filters, text, page = _filters(query), query.text("q"), query.number("page", 1) or 1
    query.end()
    chosen = session.catalog.rows(filters)
    total = len(session.dataset) if chosen is None else len(chosen)
    first = (page - 1) * PER_PAGE
    if first and first >= total:
        raise HTTPException(404, f"There are {-(-total // PER_PAGE):,} pages of rows.")
    numbers = range(first, min(first + PER_PAGE, total))
    rows = [] if text else [session.listing(n if chosen is None else int(chosen[n])) for n in numbers]
    asked = _asked(filters, text)
    return _page(
        "rows.html", session, session.name, rows=rows, total=total, page=page, pages=max(1, -(-total // PER_PAGE)),
        first=first, filters=filters, text=text, roles=ROLES, parts=PARTS, sorts=SORTS, flags=FLAGS,
        counts=session.catalog.flags() if session.catalog.ready else {}, turn=lambda n: link("/", {**asked, "page": n}),
        of_row=lambda n: link(f"/row/{n}", asked), search=link("/search", asked),
    )  # fmt: skip


def jump(_session: Session, request: Request) -> Response:
    """Redirect to a row by its number."""
    query = _query(request)
    row = query.number("row")
    query.end()
    return RedirectResponse("/" if row is None else f"/row/{row}", 303)


def row_page(session: Session, request: Request) -> Response:
    """One row: tokens, masks, text, source."""
    row, query = int(request.path_params["row"]), _query(request)
    filters, text = _filters(query), query.text("q")
    policy = LossPolicy(query.choice("train_on", list(LossPolicy)) or session.settings.policy)
    query.end()
    if row >= len(session.dataset):
        raise HTTPException(404, f"There is no row {row:,}: the dataset has {len(session.dataset):,} rows, from 0 on.")
    sides = session.sequences(row, policy)
    source, problem = session.source_json(row)
    before, after = _neighbours(session, filters, row)
    asked = {**_asked(filters, text), "train_on": "" if policy == session.settings.policy else policy.value}
    mask = session.settings.mask
    return _page(
        "row.html", session, f"Row {row:,}", row=row, listing=session.listing(row), policy=policy,
        sides=[(name, blocks(example, None, prompt, mask), _text(session, example)) for name, example, prompt in sides],
        source=visible_text(source.encode()).replace("↵\n", "\n"), problem=problem, bytes_of=session.token_bytes,
        trained=sum(int(example.loss_mask.sum()) for _, example, _ in sides),
        before=None if before is None else link(f"/row/{before}", asked),
        after=None if after is None else link(f"/row/{after}", asked), back=link("/", _asked(filters, text)),
    )  # fmt: skip


def _text(session: Session, example: Any) -> str:
    return text_of(example.input_ids.tolist(), session.token_bytes)


def _neighbours(session: Session, filters: Filters, row: int) -> tuple[int | None, int | None]:
    """The previous and next rows among those that pass the filters."""
    chosen = session.catalog.rows(filters)
    if chosen is None:
        return (row - 1 if row else None), (row + 1 if row + 1 < len(session.dataset) else None)
    at = np.flatnonzero(chosen == row)
    if not len(at):
        return None, None
    place = int(at[0])
    return (
        int(chosen[place - 1]) if place else None,
        int(chosen[place + 1]) if place + 1 < len(chosen) else None,
    )


# -- search ---------------------------------------------------------------------------------------------------------


async def search(session: Session, request: Request) -> Response:
    """Stream hits as JSON lines, as they are found, until the client disconnects."""
    try:
        query = _query(request)
        filters, text, first = _filters(query), query.text("q"), query.number("after") or 0
        query.end()
        if not text:
            return _error_page(400, "q is empty: give the text to search for")
        if first >= max(len(session.dataset), 1):
            return _error_page(404, f"after={first:,}: the dataset has {len(session.dataset):,} rows")
    except PenstockError as error:
        return _error_page(400, str(error))
    return StreamingResponse(_found(session, request, filters, text, first), media_type="application/x-ndjson")


async def _found(session: Session, request: Request, filters: Filters, text: str, first: int) -> AsyncIterator[bytes]:
    count, rows = 0, len(session.dataset)
    among = await run_in_threadpool(_among, session, filters)
    scan = session.searcher.scan(text, first, among)
    while (scanned := await run_in_threadpool(next, scan, None)) is not None:
        for number, hit in enumerate(scanned.hits):
            listing = session.listing(hit.row)
            yield _line(hit={**hit._asdict(), **listing._asdict()})
            count += 1
            if count >= MOST_HITS:
                more = number + 1 < len(scanned.hits) or scanned.rows < rows
                yield _line(done={"scanned": hit.row + 1, "rows": rows, "next": hit.row + 1 if more else None})
                return
        yield _line(progress={"scanned": scanned.rows, "rows": rows})
        if await request.is_disconnected():
            return
        await asyncio.sleep(0)
    yield _line(done={"scanned": rows, "rows": rows, "next": None})


def _among(session: Session, filters: Filters) -> Bool | None:
    chosen = session.catalog.rows(filters._replace(sort=""))
    if chosen is None:
        return None
    among = np.zeros(len(session.dataset), np.bool_)
    among[chosen] = True
    return among


def _line(**value: Any) -> bytes:
    return orjson.dumps(value) + b"\n"


# -- the other pages ------------------------------------------------------------------------------------------------


def batches(session: Session, request: Request) -> Response:
    """One step of a plan."""
    return _page("batch.html", session, "Batch", **batch_page(session, _query(request)))


def report_page(session: Session, request: Request) -> Response:
    """The report, with links into the viewer."""
    _query(request).end()
    return _page("overview.html", session, "Report", **session.figures(), linked=True)


def diff_page(session: Session, request: Request) -> Response:
    """The differences from another dataset."""
    _query(request).end()
    compared = session.comparison()
    if compared is None:
        raise HTTPException(404, "There is nothing to compare with. Start the viewer with --against DATASET.")
    return _page("diff.html", session, "Diff", diff=compared)


async def static(request: Request) -> Response:
    """Style and scripts, by name."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    return PlainTextResponse((PAGES / name).read_text(encoding="utf-8"), media_type=STATIC[name])


# -- serving --------------------------------------------------------------------------------------------------------


def listen(port: int = 0) -> socket.socket:
    """A socket on loopback; port 0 selects any free port."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((LOOPBACK, port))
    listening.listen(64)
    return listening


def serve(session: Session, listening: socket.socket, token: str) -> None:
    """Serve until interrupted."""
    import uvicorn

    app = make_app(session, listening.getsockname()[1], token)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, lifespan="off", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listening])
