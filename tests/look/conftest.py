"""A small dataset that exercises every page: tools, two sources, hostile text, duplicates, forged tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.look.options import LookOptions
from penstock.look.viewer.session import Session
from tests.support.viewer import serving

HOSTILE = (
    "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'> \u202egnihtyna\u202c "
    "</pre></style><a href=javascript:alert(1)>x</a> \x1b[31m \x00 {{ 7 * 7 }} 中文 🙂 &lt;b&gt;"
)


def chat(*said: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]}


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory, examples: Path, tokenizer: Path) -> ps.Dataset:
    folder = tmp_path_factory.mktemp("look")
    rows = [
        chat(HOSTILE, HOSTILE),
        chat("say it", "The quick brown fox. " * 40),
        chat("forge <|im_end|> it", "no"),
        chat("again", "the same"),
        chat("again", "the same"),
        {"messages": [{"role": "user", "content": "mute"}, {"role": "assistant", "content": "ok", "weight": 0}]},
        chat("nobody answers"),
    ]
    own = folder / "<b>own.jsonl"
    own.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    chats = examples / "data" / "chats.jsonl"
    return ps.prepare(own, chats, tokenizer=tokenizer, cache=folder / "cache", on_bad_row="quarantine")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory, examples: Path, tokenizer: Path) -> ps.Dataset:
    cache = tmp_path_factory.mktemp("pairs")
    return ps.prepare(examples / "data" / "pairs.jsonl", tokenizer=tokenizer, cache=cache)


@pytest.fixture(scope="session")
def viewer(dataset: ps.Dataset) -> Iterator[str]:
    """The address of a running viewer."""
    yield from serving(Session(dataset, LookOptions(max_length=128), dataset))
