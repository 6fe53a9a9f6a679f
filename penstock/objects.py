"""Reads and writes objects in S3, Google Cloud Storage, Azure, on web servers and in local folders, through obstore.

Credentials and endpoints come from the environment variables of each cloud's own tools. Requests that fail in passing
(5xx, refused or cut connections, time-outs) are retried with exponential back-off; what then still fails is an
`ObjectError` with the URL, the cause and the remedy. Reads that name an ETag never mix the bytes of two versions of an
object. obstore is imported on first use.
"""

from __future__ import annotations

import builtins
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from penstock.addresses import AZURE_SCHEMES, OBJECT_SCHEMES, scheme_of
from penstock.errors import ObjectChanged, ObjectError, ObjectMissing, RangesUnsupported, UsageError

T = TypeVar("T")

PIECE_BYTES = 4 << 20  # of a stream; each piece is a request of its own
PIECES_AHEAD = 4  # pieces requested ahead of the one being read
CUT_RETRIES = 4  # of a body that ends early, beyond obstore's own retries
SETTINGS = ("AWS_", "GOOGLE_", "AZURE_", "PENSTOCK_STORE_")  # environment variables that configure clients
LOOPBACK = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])([:/]|$)")
AZURE_HOST = re.compile(r"(?P<container>[^@]+)@(?P<account>[^.]+)\..+")


class ObjectInfo(NamedTuple):
    """An object as its store describes it. `etag` and `version` are empty where the store has none."""

    path: str
    size: int
    etag: str = ""
    version: str = ""
    modified: datetime | None = None


class ObjectUrl(NamedTuple):
    """A URL taken apart: what identifies the store, and the decoded path in it."""

    scheme: str
    bucket: str  # the bucket, container or host; empty for files
    path: str
    account: str = ""  # of Azure
    query: str = ""  # of http and https

    def __str__(self) -> str:
        return f"{self.base}{self.quoted(self.path)}{self.query and '?' + self.query}"

    @property
    def base(self) -> str:
        """What comes before the path."""
        return f"{self.scheme}://{self.bucket}/"

    def quoted(self, path: str) -> str:
        """A path as it appears in URLs of this scheme: those of web servers and files are percent-encoded."""
        return quote(path, safe="/~!$&'()*+,;=:@") if self.scheme in ("http", "https", "file") else path


def parse_url(url: str) -> ObjectUrl:
    """Take a URL apart; UsageError for schemes that no store serves."""
    scheme = scheme_of(url).lower()
    if scheme not in OBJECT_SCHEMES:
        raise UsageError(
            f"{url}: {scheme or 'these'} addresses are not supported. Supported are s3://, gs://, az://, https:// and "
            "file:// addresses."
        )
    rest = url.partition(":")[2].lstrip("/")
    if scheme == "file":
        return ObjectUrl(scheme, "", unquote(rest))
    if scheme in ("http", "https"):
        parts = urlsplit(f"{scheme}://{rest}")
        return ObjectUrl(scheme, parts.netloc, unquote(parts.path).lstrip("/"), query=parts.query)
    bucket, _, path = rest.partition("/")
    if not bucket:
        raise UsageError(f"{url}: names no bucket. Write it as {scheme}://bucket/path.")
    if scheme in AZURE_SCHEMES and (found := AZURE_HOST.fullmatch(bucket)):
        return ObjectUrl(scheme, found["container"], path, found["account"])
    return ObjectUrl(scheme, bucket, path)


def open_object_store(url: str) -> tuple[ObjectStore, str]:
    """The store that a URL addresses, and the path in it."""
    found = parse_url(url)
    settings = frozenset(item for item in os.environ.items() if item[0].startswith(SETTINGS))
    return _store(found._replace(path=""), settings), found.path


@lru_cache(64)
def _store(place: ObjectUrl, _settings: frozenset[tuple[str, str]]) -> ObjectStore:
    """One client, and so one pool of connections, per store, process and set of credentials."""
    return ObjectStore(place)


@cache
def _first_process() -> int:
    """The process that used a client first."""
    return os.getpid()


class ObjectStore:
    """One bucket, container, web server or the local disk. Paths are relative to it, and decoded."""

    def __init__(self, place: ObjectUrl) -> None:
        self._place = place
        self._module = _import_obstore(place)
        self._store = _open(place)

    @property
    def _obstore(self) -> Any:
        """The client. Its threads don't survive a fork: requests of a forked process would wait for them forever."""
        if _first_process() != os.getpid():
            raise ObjectError(
                f"{self._place.base}: this process was forked from one that uses object stores, whose client does not "
                "survive a fork. Start it by spawning: multiprocessing_context='spawn' for a DataLoader."
            )
        return self._module

    def url(self, path: str) -> str:
        """The URL of an object, without the query, which may hold a secret."""
        return self._place.base + self._place.quoted(path)

    # -- reading ----------------------------------------------------------------------------------------------------

    def head(self, path: str) -> ObjectInfo:
        """What the store says of an object; ObjectMissing if there is none."""
        try:
            return _info(self._obstore.head(self._store, path))
        except Exception as error:  # the answer to HEAD has no body that states the cause: ask again with GET
            if isinstance(error, FileNotFoundError) or not re.search(r"status code: (40[0135]|501)", str(error)):
                raise self._explained(path, error) from error
        return self._try(path, lambda: _info(self._obstore.get(self._store, path).meta))

    def get(self, path: str) -> bytes:
        """A whole object."""
        return self._body(path, {}, None)

    def get_range(self, path: str, start: int, end: int, etag: str = "") -> bytes:
        """Bytes start:end of an object. With an ETag, ObjectChanged if the object no longer has it."""
        if start >= end:
            return b""
        options: dict[str, Any] = {"range": (start, end)}
        if etag and not etag.startswith("W/"):  # a weak ETag never matches; it is compared with that of the answer
            options["if_match"] = etag
        return self._body(path, options, end - start, etag)

    def get_stream(self, path: str) -> Iterator[bytes]:
        """A whole object in chunks, by one request, for servers that serve no ranges. Ends early if the answer does."""
        answer = self._try(path, lambda: self._obstore.get(self._store, path))
        chunks = iter(answer.stream(min_chunk_size=PIECE_BYTES))
        while chunk := self._try(path, lambda: next(chunks, b"")):
            yield bytes(chunk)

    def stream(self, path: str, start: int = 0, info: ObjectInfo | None = None) -> Iterator[bytes]:
        """The bytes of an object from `start` on, in pieces that are requested ahead; all of one version."""
        info = info or self.head(path)
        starts = iter(range(start, info.size, PIECE_BYTES))
        with ThreadPoolExecutor(PIECES_AHEAD, "penstock-objects") as threads:

            def request(first: int) -> Future[bytes]:
                return threads.submit(self.get_range, path, first, min(first + PIECE_BYTES, info.size), info.etag)

            waiting = [request(first) for first, _ in zip(starts, range(PIECES_AHEAD), strict=False)]
            try:
                while waiting:
                    piece = waiting.pop(0).result()
                    waiting += [request(first) for first, _ in zip(starts, range(1), strict=False)]
                    yield piece
            finally:
                for future in waiting:
                    future.cancel()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder, by path."""
        found = self._try(prefix, lambda: self._obstore.list(self._store, prefix or None).collect())
        yield from sorted(_info(meta) for meta in found)

    def list_some(self, prefix: str, most: int) -> builtins.list[ObjectInfo] | None:
        """The objects below a folder, or None if there are more than `most`: then not all of them were listed."""

        def collect() -> builtins.list[ObjectInfo] | None:
            found: builtins.list[ObjectInfo] = []
            for part in self._obstore.list(self._store, prefix or None, chunk_size=1000):
                found += map(_info, part)
                if len(found) > most:
                    return None
            return found

        return self._try(prefix, collect)

    def children(self, folder: str = "") -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """The objects directly in a folder, and its subfolders."""
        found = self._try(folder, lambda: self._obstore.list_with_delimiter(self._store, folder or None))
        return sorted(_info(meta) for meta in found["objects"]), sorted(found["common_prefixes"])

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes | memoryview, if_absent: bool = False) -> bool:
        """Write an object. With `if_absent`, returns False and writes nothing if it exists.

        A request that is retried after its answer was lost finds its own object: where it matters who wrote it, compare
        the content after False.
        """
        mode = "create" if if_absent else "overwrite"
        try:
            self._obstore.put(self._store, path, data, mode=mode, use_multipart=False)
        except Exception as error:
            if type(error).__name__ == "AlreadyExistsError" and if_absent and self._exists(path):
                return False  # a 409 without an object is a conflict of two requests
            raise self._explained(path, error) from error
        return True

    def _exists(self, path: str) -> bool:
        try:
            self.head(path)
        except ObjectMissing:
            return False
        return True

    def replace(self, path: str, data: bytes | memoryview, etag: str, version: str = "") -> bool:
        """Write an object if its current version has this ETag; else return False and write nothing.

        Google Cloud Storage compares versions instead, which `head` returns.
        """
        expected = {"e_tag": etag, "version": version} if version else {"e_tag": etag}
        try:
            self._obstore.put(self._store, path, data, mode=expected, use_multipart=False)
        except Exception as error:
            if type(error).__name__ == "PreconditionError" or isinstance(error, FileNotFoundError):
                return False
            raise self._explained(path, error) from error
        return True

    def delete(self, path: str) -> None:
        """Delete an object; one that does not exist is no error."""
        try:
            self._obstore.delete(self._store, path)
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._explained(path, error) from error

    # -- errors -----------------------------------------------------------------------------------------------------

    def _body(self, path: str, options: dict[str, Any], size: int | None, etag: str = "") -> bytes:
        """The body of an answer, requested again if it ends early."""
        for attempt in range(CUT_RETRIES + 1):
            answer = self._try(path, lambda: self._obstore.get(self._store, path, options=options))
            if etag and (found := _etag(answer.meta)) != etag:
                raise self._changed(path, f"its ETag was {etag} and is {found or 'gone'}")
            if size is None:
                size = answer.meta["size"]
            try:
                body = bytes(answer.bytes())
                if len(body) == size:
                    return body
                how = f"{len(body):,} of {size:,} bytes arrived"
            except Exception as error:  # obstore has retried it, too
                how = _first_line(error)
            time.sleep(0.1 * 2**attempt * (0.5 + random.random() / 2))  # noqa: S311 (spreads retries)
        raise ObjectError(
            f"{self.url(path)}: the answer ended early {CUT_RETRIES + 1} times in a row ({how}). "
            "Check the network, and whether the object is complete; then run again."
        )

    def _try(self, path: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except Exception as error:
            raise self._explained(path, error) from error

    def _changed(self, path: str, how: str) -> ObjectChanged:
        return ObjectChanged(
            f"{self.url(path)}: the object changed while it was read ({how}). Run again once nothing writes to it."
        )

    def _explained(self, path: str, error: Exception) -> ObjectError:
        """An error of obstore in our words."""
        if isinstance(error, ObjectError):
            return error
        if type(error).__name__ == "PreconditionError":
            return self._changed(path, "its ETag differs")
        return explain(self._place, self.url(path), error)


def explain(place: ObjectUrl, url: str, error: Exception) -> ObjectError:
    """The cause and the remedy of an error of obstore."""
    text, debug = _first_line(error), str(error)
    status = re.search(r"status code: (\d{3})", text)
    code = status[1] if status else ""
    cause = re.search(r"<Code>(\w+)</Code>", text)
    said = f"{code} {cause[1]}" if cause else code
    bucket = f"{place.scheme}://{place.bucket}"
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return ObjectMissing(f"{url}: there is no bucket {bucket}. Check its name, the region and the endpoint.")
    if isinstance(error, FileNotFoundError) or code == "404":
        return ObjectMissing(f"{url}: no such object. Check the path and the bucket.")
    if re.search(r"Expired|TokenRefreshRequired", text):
        return ObjectError(f"{url}: the credentials have expired ({said}). {_renewal(place)}")
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return ObjectError(f"{url}: no credentials found. {_renewal(place)}")
    if code in ("401", "403") or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return ObjectError(f"{url}: access denied ({said or text}). {_renewal(place)}")
    if "BadScheme" in debug:
        return ObjectError(
            f"{url}: the endpoint is not encrypted (http). Use an https endpoint, or set AWS_ALLOW_HTTP=true."
        )
    if "Range request not supported" in text:
        return RangesUnsupported(f"{url}: the server sends only whole files. Download it and name the copy.")
    retries = re.search(r"after (\d+) retries", text)
    tries = f", also after {retries[1]} retries" if retries else ""
    if "TimedOut" in debug or "kind: Timeout" in debug or "timed out" in text:
        return ObjectError(
            f"{url}: the store did not answer within {_seconds('PENSTOCK_STORE_TIMEOUT', 30):g} s{tries}. Check the "
            "network and run again; PENSTOCK_STORE_TIMEOUT sets the seconds to wait."
        )
    if code == "501":
        return ObjectError(
            f"{url}: the store does not support this request ({said}). Penstock needs conditional writes "
            "(If-None-Match, If-Match), range reads and listings: use a store that has them."
        )
    if code == "409":
        return ObjectError(
            f"{url}: another request changes it at the same time ({said}){tries}. Run again; if it stays, the store or "
            "bucket refuses the request."
        )
    if code.startswith("5") or code == "429":
        return ObjectError(f"{url}: the store answers {said}{tries}. It is overloaded or down: run again later.")
    if isinstance(error, ValueError):
        return ObjectError(f"{url}: {text}. Rename the object.")
    if "error sending request" in text:
        return ObjectError(f"{url}: the store can't be reached{tries}. Check the endpoint, the region and the network.")
    return ObjectError(f"{url}: {text}. Check the store and run again.")


def _first_line(error: Exception) -> str:
    """What obstore says, without its debug output."""
    return str(error).partition("\n\nDebug source")[0].strip()


def _renewal(place: ObjectUrl) -> str:
    """How to supply credentials to a store."""
    if place.scheme.startswith("s3"):
        return (
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN for temporary ones), or "
            "AWS_PROFILE with boto3 installed; AWS_SKIP_SIGNATURE=true reads a public bucket."
        )
    if place.scheme == "gs":
        return "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS."
    if place.scheme in AZURE_SCHEMES:
        return "Set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY."
    return "Check the permissions."


# -- clients --------------------------------------------------------------------------------------------------------


def _import_obstore(place: ObjectUrl) -> Any:
    try:
        import obstore
    except ImportError as error:
        raise ObjectError(
            f"{place.base}: reading {place.scheme}:// addresses needs the package 'obstore'. "
            "Install it: pip install 'penstock[stores]'."
        ) from error
    return obstore


def _open(place: ObjectUrl) -> Any:
    from obstore import store

    wait = timedelta(seconds=_seconds("PENSTOCK_STORE_TIMEOUT", 30))
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    total = timedelta(days=1) if place.scheme in ("http", "https") else 20 * wait  # a file may come in one answer
    client: Any = {"connect_timeout": min(wait, timedelta(seconds=10)), "read_timeout": wait, "timeout": total}
    if place.scheme == "http" or (place.scheme.startswith("s3") and LOOPBACK.match(endpoint)):
        client["allow_http"] = True
    retry: Any = {
        "max_retries": int(_seconds("PENSTOCK_STORE_RETRIES", 10)),
        "retry_timeout": max(6 * wait, timedelta(seconds=1)),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15), "base": 2},
    }
    try:
        if place.scheme == "file":
            return store.LocalStore("/")
        if place.scheme in ("http", "https"):
            return store.HTTPStore(
                f"{place.base}{place.query and '?' + place.query}", client_options=client, retry_config=retry
            )
        if place.scheme == "gs":
            return store.GCSStore(place.bucket, client_options=client, retry_config=retry)
        if place.scheme in AZURE_SCHEMES:
            account: Any = {"account_name": place.account} if place.account else {}
            return store.AzureStore(place.bucket, config=account, client_options=client, retry_config=retry)
        return store.S3Store(
            place.bucket, client_options=client, retry_config=retry, credential_provider=_aws_profile(place)
        )
    except Exception as error:
        raise explain(place, place.base, error) from error


def _aws_profile(place: ObjectUrl) -> Any:
    """Credentials of a profile of ~/.aws, which obstore leaves to boto3; None if the environment has others."""
    elsewhere = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    folder = Path.home() / ".aws"
    has_files = (folder / "credentials").is_file() or (folder / "config").is_file()
    named = "AWS_PROFILE" in os.environ
    if os.environ.get("AWS_SKIP_SIGNATURE") or any(name in os.environ for name in elsewhere):
        return None
    if not named and not has_files:
        return None
    try:
        from boto3 import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise ObjectError(
            f"{place.base}: the profiles in {folder} need the package 'boto3'. Install it (pip install boto3), "
            'or put the keys in the environment: eval "$(aws configure export-credentials --format env)".'
        ) from error
    return Boto3CredentialProvider(Session())


def _seconds(name: str, default: float) -> float:
    try:
        return float(os.environ.get(name, default))
    except ValueError:
        raise UsageError(f"{name}={os.environ[name]!r} is not a number.") from None


def _info(meta: Any) -> ObjectInfo:
    return ObjectInfo(meta["path"], meta["size"], _etag(meta), meta["version"] or "", meta["last_modified"])


def _etag(meta: Any) -> str:
    """The ETag; in quotes also where Azure leaves them out, in its listings."""
    etag: str = meta["e_tag"] or ""
    return f'"{etag}"' if etag.startswith("0x") else etag
