"""An address is refused by its scheme wherever only a path will do; nothing is ever made in a folder called `s3:`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.addresses import scheme_of
from penstock.cli import main
from penstock.errors import PenstockError, UsageError
from penstock.train.config import read_config
from penstock.train.lint.config_values import read_file

SFT: dict[str, Any] = {"model": {"path": "m"}, "data": {"sources": ["a.jsonl"]}}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(call: Callable[[], object], scheme: str) -> None:
    with pytest.raises(PenstockError, match=rf": {re.escape(scheme)} addresses") as caught:
        call()
    assert f"{scheme}:/" in str(caught.value)
    assert not list(Path().glob("*:*"))


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://b", "hf://datasets/x", "file:///tmp/x", "az+tls://b/x"])
def test_prepare_and_open(address: str, examples: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme, source = address.partition(":")[0], examples / "data" / "chats.jsonl"
    for path in (address, Path(address)):
        refused(lambda path=path: ps.prepare(source, tokenizer=path, no_cache=True), scheme)
        if scheme in ("hf", "file", "az+tls"):
            refused(lambda path=path: ps.prepare(source, tokenizer=tokenizer, cache=path), scheme)
        refused(lambda path=path: ps.prepare(source, tokenizer=tokenizer, quarantine_file=path), scheme)
        refused(lambda path=path: ps.prepare(source, tokenizer=tokenizer, template=path, no_cache=True), scheme)
        if scheme in ("hf", "file", "az+tls"):
            refused(lambda path=path: ps.open(path), scheme)
            refused(lambda path=path: ps.open("b3-0", cache=path), scheme)
    if scheme in ("hf", "file", "az+tls"):
        monkeypatch.setenv("PENSTOCK_CACHE", address)
        refused(lambda: ps.prepare(source, tokenizer=tokenizer), scheme)
        refused(lambda: ps.open("b3-0"), scheme)


@pytest.mark.parametrize("address", ["ftp://server/x.jsonl", "az+tls://b/x", "memory://x", "S4://b/x"])
def test_sources_of_other_schemes(address: str, tokenizer: Path) -> None:
    scheme = address.partition(":")[0].lower()
    for path in (address, Path(address)):
        with pytest.raises(UsageError, match=rf"{re.escape(scheme)} addresses are not supported.*s3://, gs://"):
            ps.prepare(path, tokenizer=tokenizer, cache="c")
    with pytest.raises(UsageError, match=rf"^sources.path {re.escape(address)}: {re.escape(scheme)} addresses"):
        read_config(SFT, [f"data.sources={address}"])


def test_commands(
    examples: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(examples / "data" / "chats.jsonl")
    for arguments in (
        ["prepare", source, "--tokenizer", "s3://b/c"],
        ["train", "sft", "s3://b/c.yaml"],
        ["lint", "s3://b/c.yaml", "--for", "trl.SFTConfig"],
        ["verify", "--target", "x:y", "--output", "s3://b/c"],
    ):
        monkeypatch.setattr("sys.argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code in (1, 2)
        assert "s3 addresses" in capsys.readouterr().err.replace("\n", " "), arguments
    assert not list(Path().glob("*:*"))


@pytest.mark.parametrize(
    "override",
    [
        "output=s3://b/run",
        "model.path=s3://b/model",
        "model.init=s3://b/config.json",
        "model.tokenizer=s3://b/t",
        "data.sources.0.prepare.template=s3://b/c",
    ],
)
def test_keys_of_training(override: str) -> None:
    refused(lambda: read_config(SFT, [override]), "s3")


def test_what_is_no_address() -> None:
    for path in ("a/b", "/a:b/c", "C:/data", "org/name", "~/x", "train[:10]", "a:b", "b3-0"):
        assert scheme_of(path) == ""
    with pytest.raises(PenstockError, match="no such file|No such file"):
        read_file(Path("a.yaml"))
