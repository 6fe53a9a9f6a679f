"""Files of repositories on the Hugging Face Hub: `hf://datasets/owner/name@revision/path`, through huggingface_hub.

A revision is resolved to its commit once, so that a build reads one state of the repository. Files of a commit never
change; a file's ETag is its object id, or its SHA-256 if it is stored in LFS or Xet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from penstock.errors import ObjectError, ObjectMissing, UsageError
from penstock.objects import ObjectInfo

T = TypeVar("T")
URL = re.compile(
    r"hf:/+(?P<kind>datasets|models|spaces)/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<path>.*))?"
)
COMMIT = re.compile(r"[0-9a-f]{40}")
RETRIES = 5


class HubAddress(NamedTuple):
    """A URL of the Hub, taken apart."""

    kind: str  # datasets, models or spaces
    repo: str
    revision: str
    path: str


def parse_hub_url(url: str, revision: str | None = None) -> HubAddress:
    """Take a URL of the Hub apart."""
    found = URL.fullmatch(url)
    if found is None:
        raise UsageError(f"{url}: not an address of the Hub. Write it as hf://datasets/owner/name/path/to/file.jsonl.")
    if found["revision"] and revision:
        raise UsageError(f"{url}: names a revision, and so does --revision {revision!r}. Give one of them.")
    return HubAddress(found["kind"], found["repo"], found["revision"] or revision or "main", found["path"] or "")


def open_hub_store(url: str, revision: str | None = None) -> tuple[HubStore, str]:
    """The repository of a URL, at the commit of its revision, and the path in it."""
    kind, repo, revision, path = parse_hub_url(url, revision)
    if COMMIT.fullmatch(revision):
        return _store(kind, repo, revision), path
    return HubStore(kind, repo, revision), path  # a branch may have moved


@lru_cache(64)
def _store(kind: str, repo: str, commit: str) -> HubStore:
    return HubStore(kind, repo, commit)


class HubStore:
    """One repository at one commit."""

    def __init__(self, kind: str, repo: str, revision: str) -> None:
        from huggingface_hub import HfApi

        self._kind, self._repo, self._revision = kind, repo, revision
        self._type = kind.removesuffix("s")
        self._api = HfApi()
        self.commit = revision if COMMIT.fullmatch(revision) else self._try("", self._resolve)

    def _resolve(self) -> str:
        info = self._api.repo_info(self._repo, repo_type=self._type, revision=self._revision)
        return str(info.sha)

    def url(self, path: str) -> str:
        """The URL of a file, with the commit."""
        return f"hf://{self._kind}/{self._repo}@{self.commit}/{path}"

    def head(self, path: str) -> ObjectInfo:
        """What the Hub says of a file; ObjectMissing if there is none."""

        def request() -> Any:
            return self._api.get_paths_info(self._repo, [path], revision=self.commit, repo_type=self._type)

        files = [entry for entry in self._try(path, request) if hasattr(entry, "blob_id")]
        if not files:
            raise ObjectMissing(f"{self.url(path)}: no such file in the repository at this commit. Check the path.")
        return _file_info(files[0])

    def get_range(self, path: str, start: int, end: int, etag: str = "") -> bytes:
        """Bytes start:end of a file."""
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import http_backoff

        if start >= end:
            return b""
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}

        def request() -> bytes:
            answer = http_backoff("GET", self._address(path), headers=headers, follow_redirects=True, timeout=60)
            answer.raise_for_status()
            return answer.content[start:end] if answer.status_code == 200 else answer.content

        for _ in range(RETRIES):
            data = self._try(path, request)
            if len(data) == end - start:
                return data
        raise ObjectError(f"{self.url(path)}: {len(data):,} of {end - start:,} bytes arrived. Run again later.")

    def get_stream(self, path: str) -> Iterator[bytes]:
        """A whole file in chunks. Unused, since the Hub serves ranges."""
        yield self.get_range(path, 0, self.head(path).size)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All files below a folder, by path."""

        def request() -> Any:
            tree = self._api.list_repo_tree(
                self._repo, prefix or None, recursive=True, revision=self.commit, repo_type=self._type
            )
            return [*tree]

        try:
            found = self._try(prefix, request)
        except ObjectMissing:
            return
        yield from sorted(_file_info(entry) for entry in found if hasattr(entry, "blob_id"))

    def children(self, folder: str = "") -> tuple[Sequence[ObjectInfo], Sequence[str]]:
        """The files directly in a folder, and its subfolders."""
        start = f"{folder}/" if folder else ""
        inside = [(info, info.path.removeprefix(start)) for info in self.list(folder)]
        folders = dict.fromkeys(start + name.partition("/")[0] for _, name in inside if "/" in name)
        return [info for info, name in inside if "/" not in name], [*folders]

    def _address(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self._repo, path, repo_type=self._type, revision=self.commit)

    def _try(self, path: str, request: Callable[[], T]) -> T:
        from huggingface_hub import errors

        where = f"hf://{self._kind}/{self._repo}@{self._revision}/{path}"
        try:
            return request()
        except errors.GatedRepoError as error:
            raise ObjectError(f"{where}: access to the repository must be requested on the Hub first.") from error
        except errors.RepositoryNotFoundError as error:
            raise ObjectMissing(
                f"{where}: there is no such repository, or it is private. Check the name; log in with `hf auth login`."
            ) from error
        except errors.RevisionNotFoundError as error:
            raise ObjectMissing(f"{where}: the repository has no revision {self._revision!r}.") from error
        except errors.EntryNotFoundError as error:
            raise ObjectMissing(f"{where}: no such file in the repository. Check the path.") from error
        except Exception as error:  # httpx's, and whatever the Hub's client makes of an answer
            text = str(error).strip().partition("\n")[0]
            raise ObjectError(
                f"{where}: the Hub can't be read: {type(error).__name__}: {text}. Check the network and HF_ENDPOINT, "
                "then run again."
            ) from error


def _file_info(entry: Any) -> ObjectInfo:
    lfs = getattr(entry, "lfs", None)
    return ObjectInfo(entry.path, entry.size, lfs.sha256 if lfs else entry.blob_id)
