"""Real servers on loopback: moto's S3, a proxy before it that counts bytes and injects faults, a plain web server."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server; yields its endpoint."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Without TCP_NODELAY, answers written in two parts take 40 ms each.
    code = (
        "import socketserver, sys; socketserver.StreamRequestHandler.disable_nagle_algorithm = True; "
        "from moto.server import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **KEYS})
        try:
            for _ in range(600):
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def make_bucket(endpoint: str, name: str) -> None:
    """Create a bucket."""
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")).close()


@dataclass
class Request:
    """A request that passed the proxy, and the bytes of the answer's body."""

    method: str
    path: str
    range: str
    status: int
    bytes: int


Fault = Callable[[str, str, int], str | None]  # (method, path, number of the request) -> a fault or None


@dataclass
class Proxy:
    """A proxy that records requests and injects faults.

    A fault is "503" or another status, "cut" (half of the body, then the connection closes), "drop" (closed before an
    answer), "delay:SECONDS", or "expired" (S3's answer to an expired token).
    """

    endpoint: str
    bucket: str = ""
    requests: list[Request] = field(default_factory=list)
    fault: Fault = lambda method, path, number: None
    latency: float = 0.0  # seconds before each answer
    bandwidth: float = 0.0  # bytes per second of all bodies together; 0: unlimited

    @property
    def bytes_read(self) -> int:
        """The bytes of all bodies of GET requests for objects."""
        return sum(r.bytes for r in self.requests if r.method == "GET" and "list-type" not in r.path)

    def clear(self) -> None:
        """Forget the requests and faults."""
        self.requests.clear()
        self.fault = lambda method, path, number: None


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A proxy before a server."""
    host = urllib.parse.urlsplit(target).netloc
    proxy = Proxy("")
    lock, link = threading.Lock(), threading.Lock()
    seen = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                number = seen[0]
                seen[0] += 1
            fault = proxy.fault(self.command, self.path, number) or ""
            kind, _, amount = fault.partition(":")
            if proxy.latency or kind == "delay":
                time.sleep(float(amount) if kind == "delay" else proxy.latency)
            if kind == "drop":
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if kind == "expired":
                self.answer(400, {}, b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>")
                return
            if kind.isdigit():
                self.answer(int(kind), {}, b"<Error><Code>SlowDown</Code></Error>")
                return
            server = http.client.HTTPConnection(host)
            server.request(self.command, self.path, body, dict(self.headers.items()))
            answer = server.getresponse()
            data = answer.read()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
            server.close()
            self.answer(answer.status, headers, data, cut=kind == "cut")

        def answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
            sent = data[: len(data) // 2] if cut else data
            with lock:
                wanted = self.headers.get("Range", "")
                proxy.requests.append(Request(self.command, self.path, wanted, status, len(sent)))
            self.send_response_only(status)
            if self.command != "HEAD":
                headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
                headers["Content-Length"] = str(len(data))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                if proxy.bandwidth:
                    with link:
                        time.sleep(len(sent) / proxy.bandwidth)
                self.wfile.write(sent)
                self.wfile.flush()
            if cut:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: object) -> None:
            return

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    with _serving(Handler) as port:
        proxy.endpoint = f"http://127.0.0.1:{port}"
        yield proxy


@contextmanager
def web_server(folder: Path, *, ranges: bool = True, etags: bool = True) -> Iterator[str]:
    """A plain web server for the files of a folder; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = folder / urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data, found = path.read_bytes(), path.stat()
            tag = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
            if etags and self.headers.get("If-Match", tag) != tag:
                self.send_response(412)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            wanted = self.headers.get("Range") if ranges else None
            total = len(data)
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), min(int(last) + 1 if last else total, total)
                data = data[start:end]
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
            else:
                self.send_response(200)
            if etags:
                self.send_header("ETag", tag)
            self.send_header("Last-Modified", self.date_time_string(int(found.st_mtime)))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    with _serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # clients that hang up are part of the tests
            return

    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def hub_server(files: dict[str, bytes], repo: str = "owner/chats") -> Iterator[str]:
    """The part of the Hugging Face Hub's API that reading a dataset repository takes; yields its address."""
    commit = "c0ffee" * 6 + "cafe"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            api, resolve = f"/api/datasets/{repo}", f"/datasets/{repo}/resolve/{commit}/"
            if path in (f"{api}/revision/main", f"{api}/revision/v2", api):
                self.answer({"id": repo, "sha": commit, "siblings": [], "tags": []})
            elif path.startswith(f"{api}/tree/{commit}"):
                below = path.removeprefix(f"{api}/tree/{commit}").strip("/")
                names = [name for name in files if name.startswith(f"{below}/" if below else "")]
                self.answer([self.entry(name) for name in names]) if names else self.refuse("EntryNotFound")
            elif path.startswith(resolve) and path.removeprefix(resolve) in files:
                data = files[path.removeprefix(resolve)]
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                self.answer(data[int(first) : int(last) + 1], 206)
            else:
                self.refuse("RepoNotFound" if repo not in path else "RevisionNotFound")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            given = urllib.parse.parse_qs(body).get("paths") or json.loads(body)["paths"]
            self.answer([self.entry(name) for name in given if name in files])

        def entry(self, name: str) -> dict[str, object]:
            return {"type": "file", "path": name, "size": len(files[name]), "oid": f"{zlib.crc32(files[name]):040x}"}

        def answer(self, value: object, status: int = 200) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with _serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"
