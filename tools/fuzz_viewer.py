"""Fuzzes the viewer: random requests, valid and hostile, on a dataset of hostile rows.

No request may fail on the server's side, and no content of a row may reach a page unescaped.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

import penstock as ps
from penstock.look.options import LookOptions
from penstock.look.viewer.app import make_app
from penstock.look.viewer.session import Session
from tools.fuzz_text import SCRIPT, conversation, text

App = Callable[
    [MutableMapping[str, Any], Callable[..., Awaitable[Any]], Callable[..., Awaitable[None]]], Awaitable[None]
]
ROOT = Path(__file__).parent.parent
PORT, TOKEN = 8000, "token"
TRICKS = (
    "..", "%2e%2e", "....//", "%c0%ae", "%ff%fe", "%00", "\\..\\", "etc/passwd", "%252e", "~root", ";", "<script>",
)  # fmt: skip
NUMBERS = ("-1", "99999999", "9" * 40, "1e9", "0x10", "NaN", "٣", "%F0%9F%99%82", "1;2", "%201")
NAMES = (
    "page",
    "min",
    "max",
    "share_min",
    "share_max",
    "source",
    "step",
    "batch_size",
    "capacity",
    "seed",
    "after",
    "q",
)


def hostile_path(choose: random.Random) -> str:
    """A request that must be refused."""
    match choose.randrange(6):
        case 0:
            return "/" + "/".join(choose.choice(TRICKS) for _ in range(choose.randrange(1, 8)))
        case 1:
            return f"/row/{quote(choose.choice(NUMBERS), safe='%')}"
        case 2:
            return f"/?{choose.choice(NAMES[:6])}={quote(choose.choice(['-1', '9' * 40, 'x', '%ff', '1e9']), safe='%')}"
        case 3:
            return f"/batch?{choose.choice(NAMES[6:10])}={quote(choose.choice(['-1', '9' * 40, 'x', '%ff']), safe='%')}"
        case 4:
            return f"/static/{quote(choose.choice(TRICKS), safe='%/')}look.css"
    return (
        f"/search?q={choose.choice(['%ff', '%c3%28', ''])}&{choose.choice(['after=-1', 'nothing=1', 'sort=up', 'q=2'])}"
    )


def any_path(choose: random.Random, rows: int) -> str:
    """A request that may be valid."""
    match choose.randrange(7):
        case 0:
            return (
                f"/row/{choose.randrange(rows)}?train_on={choose.choice(('all_tokens', 'last_assistant_message', 'x'))}"
            )
        case 1:
            return f"/search?q={quote(text(choose, 3))}"
        case 2:
            return f"/batch?step={choose.randrange(9)}&capacity={choose.choice((64, 256, 4096))}&batch_size=2"
        case 3:
            return f"/?{choose.choice(NAMES[:6])}={choose.randrange(100)}&role={quote(text(choose, 2))}"
        case 4:
            return choose.choice(("/report", "/", "/diff", "/static/look.css", "/batch", "/jump?row=3"))
        case 5:
            return f"/{quote(text(choose, 4), safe='/%')}"
    return hostile_path(choose)


@contextmanager
def viewer_app() -> Iterator[tuple[App, int]]:
    """The viewer of a dataset of hostile rows, and their number."""
    choose = random.Random(0)  # noqa: S311
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(conversation(choose)) + "\n" for _ in range(200)))
        dataset = ps.prepare(
            file, tokenizer=str(ROOT / "examples" / "tokenizer"), cache=Path(folder, "cache"), progress=False,
            dropped_tool_calls="keep", on_bad_row="quarantine",
        )  # fmt: skip
        yield make_app(Session(dataset, LookOptions(max_length=128), dataset), PORT, TOKEN), len(dataset)


def differences(app: App, path: str, counts: Counter[str]) -> list[str]:
    """What is wrong with the answer to a request."""
    status, headers, body = asyncio.run(_ask(app, path))
    counts["requests"] += 1
    counts[f"answered {status // 100}xx"] += 1
    wrong = [f"status {status}"] if status >= 500 else []
    if b"Traceback" in body:
        wrong.append("a traceback in the answer")
    if headers.get("content-type", "").startswith("text/html") and (SCRIPT.encode() in body or b"<img src=x" in body):
        wrong.append("a row's content is not escaped")
    if status == 200 and "content-security-policy" not in headers:
        wrong.append("no content security policy")
    return wrong


async def _ask(app: App, path: str) -> tuple[int, dict[str, str], bytes]:
    bare, _, query = path.partition("?")
    raw = bare.encode("utf-8", "surrogatepass")
    scope: dict[str, Any] = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": unquote_to_bytes(raw).decode("latin-1"), "raw_path": raw, "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", f"127.0.0.1:{PORT}".encode()), (b"cookie", f"penstock-{PORT}={TOKEN}".encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", PORT),
    }  # fmt: skip
    status, headers, body = 0, {}, b""
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.sleep(3600)  # until the answer is complete
        asked = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status, headers, body
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception as error:
        return 599, {}, repr(error).encode()
    return status, headers, body
