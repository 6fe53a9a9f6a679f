"""Compares the ids of the tokenizer in use with those of `AutoTokenizer`, in parallel with the build.

The comparison runs in a separate process (`prepare.tokenizer.auto`), so that importing transformers costs the build
neither time nor memory. The result is cached under the digests of all files that decide it and the versions of the
libraries, so each tokenizer is compared once. A difference stops the build at the next slice, at the latest before the
manifest is written; with `--tokenizer-as file`, it is a warning.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from penstock import child
from penstock.build.workers.process import ONE_THREAD
from penstock.digests import bytes_digest, canonical, digest, file_digest
from penstock.errors import StoreError, TokenizerError
from penstock.prepare.modes import TokenizerAs
from penstock.prepare.tokenizer.auto import (
    CONFIG_FILES,
    Comparison,
    compare,
    is_installed,
    load_auto,
    uses_file_as_is,
)
from penstock.prepare.tokenizer.files import VOCABULARY_FILES, TokenizerFiles
from penstock.store.cache import Cache
from penstock.store.files import read_regular

VERSION = 1  # of the comparison


class AutoCheck:
    """The comparison that belongs to one build."""

    def __init__(self, cache: Cache, model: TokenizerFiles, given: TokenizerAs | None, *, plain: bool) -> None:
        self._cache, self._model, self._given, self._plain = cache, model, given, plain
        self._process: subprocess.Popen[bytes] | None = None
        self._found: Comparison | None = None
        self.summary = ""  # one line; '' before the result is known
        self.warning = ""

    def start(self) -> None:
        """Starts the comparison. The tokenizer must be in the cache."""
        if self._given is TokenizerAs.AUTO:
            self.summary = "ids of AutoTokenizer"
        elif self._model.is_object:
            self.summary = "ids of the tokenizer object"
        elif self._model.folder is None:
            self.summary = "not compared with AutoTokenizer: the file is not called tokenizer.json"
        elif uses_file_as_is(self._model.folder):
            self.summary = "no class is named for it: AutoTokenizer goes by tokenizer.json, too"
        elif not is_installed():
            self.summary = "not compared with AutoTokenizer: transformers is not installed"
        else:
            self._found = _cached(self._cache, self._model)
            if self._found is None:
                self._launch(self._model.folder)

    def _launch(self, folder: Path) -> None:
        if "transformers" in sys.modules:
            self._store(compare(folder, self._model.tokenizer_json))
            return
        file = self._cache.tokenizer_path(bytes_digest(self._model.tokenizer_json))
        self._process = subprocess.Popen(
            child.command("penstock.prepare.tokenizer.auto", str(folder), str(file)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child.environment(ONE_THREAD),
        )

    def poll(self, *, wait: bool = False) -> None:
        """Raises TokenizerError if the comparison has found a difference; with `wait`, lets it finish first."""
        if self._process is not None and (wait or self._process.poll() is not None):
            data, _ = self._process.communicate()
            failed, self._process = self._process.returncode, None
            if failed:
                self._found = Comparison("AutoTokenizer", not_compared=f"the comparison ended with exit code {failed}")
            else:
                self._store(Comparison(**orjson.loads(data)))
        if self._found is not None and not self.summary:
            self._judge(self._found)

    def close(self) -> None:
        """Stops the comparison if it is still running."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _judge(self, found: Comparison) -> None:
        if found.not_compared:
            self.summary = f"not compared with AutoTokenizer: {found.not_compared}"
            return
        difference = found.difference or (found.around if self._plain else "")
        if not difference:
            self.summary = f"AutoTokenizer ({found.name}) gives the same ids"
            return
        self.warning = (
            f"{self._model.name}: tokenizer.json and AutoTokenizer ({found.name}) give different ids. {difference}. "
            "Code that loads the tokenizer with AutoTokenizer sees other ids than a model trained on the file's."
        )
        if self._given is None:
            raise TokenizerError(
                f"{self.warning} Choose: --tokenizer-as auto takes AutoTokenizer's ids; --tokenizer-as file takes the "
                'file\'s, which AutoTokenizer follows if tokenizer_config.json has "tokenizer_class": '
                '"PreTrainedTokenizerFast".'
            )
        self.summary = f"AutoTokenizer ({found.name}) gives other ids than tokenizer.json, which is used"

    def _store(self, found: Comparison) -> None:
        self._found = found
        _write(self._cache, _memo(self._cache, self._model, "compared"), asdict(found))


def auto_model(cache: Cache, model: TokenizerFiles) -> TokenizerFiles:
    """Returns the tokenizer as AutoTokenizer builds it, from the cache if possible."""
    if model.folder is None:
        raise TokenizerError(
            f"--tokenizer-as auto: {model.name} is not called tokenizer.json, so AutoTokenizer can't load it"
        )
    memo = _memo(cache, model, "made") if is_installed() else None
    if memo is not None:
        try:
            known = orjson.loads(read_regular(memo))
            data = read_regular(cache.tokenizer_path(known["tokenizer"]))
            if bytes_digest(data) == known["tokenizer"]:
                return replace(model, tokenizer_json=data, special_tokens=known["special_tokens"])
        except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
            pass  # missing or unreadable: build it
    auto = load_auto(model.folder)
    loaded = replace(model, tokenizer_json=auto.tokenizer_json, special_tokens=auto.special_tokens)
    if memo is not None:
        try:
            known = {
                "tokenizer": cache.store_tokenizer(loaded.tokenizer_json),
                "special_tokens": dict(auto.special_tokens),
            }
            _write(cache, memo, known)
        except StoreError:
            pass  # optional: the cache may be read-only
    return loaded


def _cached(cache: Cache, model: TokenizerFiles) -> Comparison | None:
    try:
        return Comparison(**orjson.loads(read_regular(_memo(cache, model, "compared"))))
    except (OSError, orjson.JSONDecodeError, TypeError):
        return None


def _write(cache: Cache, path: Path, value: dict[str, Any]) -> None:
    try:
        cache.files.write(cache.files.relative(path), canonical(value), "memo", durable=False)
    except StoreError:
        pass  # optional: without it, the comparison runs again


def _memo(cache: Cache, model: TokenizerFiles, what: str) -> Path:
    """Returns the path of a cached result. Its name is a digest of everything that decides the result."""
    assert model.folder is not None
    files = {
        n: file_digest(model.folder / n) for n in (*CONFIG_FILES, *VOCABULARY_FILES) if (model.folder / n).is_file()
    }
    versions = [version("transformers"), version("tokenizers"), VERSION]
    name = digest(canonical(["auto tokenizer", what, versions, files, bytes_digest(model.tokenizer_json)]))
    return cache.root / "memo" / name[3:5] / f"{name}.json"
