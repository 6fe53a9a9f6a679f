"""Hostile tokenizers: each is served, or refused in one clear line, within 10 s of CPU time and 1 GB of memory."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import run

pytestmark = pytest.mark.slow

Files = dict[str, Any]  # name -> JSON value, or bytes
MEMORY = 1_000_000_000
SECONDS = 10
ROWS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} <|x_7|> é"}]}
    for text in ("a", "Hello there " * 500, "a" * 20_000)
]


def with_added(count: int, **more: Any) -> Callable[[Files], None]:
    """Adds tokens <|x_0|>, <|x_1|>, …; `more` are keys of each."""

    def change(files: Files) -> None:
        added = files["tokenizer.json"]["added_tokens"]
        first = 1 + max([*files["tokenizer.json"]["model"]["vocab"].values(), *(token["id"] for token in added)])
        for number in range(count):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
            added.append({"id": first + number, "content": f"<|x_{number}|>", **flags, **more})

    return change


def with_part(name: str, value: Any) -> Callable[[Files], None]:
    return lambda files: files["tokenizer.json"].update({name: value})


def with_config(**more: Any) -> Callable[[Files], None]:
    return lambda files: files["tokenizer_config.json"].update(more)


def with_model(**more: Any) -> Callable[[Files], None]:
    return lambda files: files["tokenizer.json"]["model"].update(more)


def with_file(data: bytes) -> Callable[[Files], None]:
    return lambda files: files.update({"tokenizer.json": data})


def with_token(number: object) -> Callable[[Files], None]:
    return lambda files: files["tokenizer.json"]["model"]["vocab"].update(zz=number)


def nested(levels: int) -> Callable[[Files], None]:
    """A normalizer of nested sequences; Python's own writer would not write it."""
    inner = b'{"type": "Sequence", "normalizers": [' * levels + b"]}" * levels

    def change(files: Files) -> None:
        files["tokenizer.json"]["normalizer"] = "NESTED"
        files["tokenizer.json"] = json.dumps(files["tokenizer.json"]).encode().replace(b'"NESTED"', inner)

    return change


def replacing(pattern: dict[str, str], content: str, times: int = 1) -> Callable[[Files], None]:
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return with_part("normalizer", {"type": "Sequence", "normalizers": [step] * times})


def prepending(text: str) -> Callable[[Files], None]:
    return with_part("normalizer", {"type": "Prepend", "prepend": text})


def with_table(*texts: bytes) -> Callable[[Files], None]:
    """A table as SentencePiece writes it: the size of a trie, the trie, and texts that end in a zero."""
    table = (4).to_bytes(4, "little") + bytes(4) + b"\0".join((*texts, b""))
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return with_part("normalizer", step)


def splitting(pattern: str) -> Callable[[Files], None]:
    step = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return with_part("pre_tokenizer", step)


def adding(tokens: int) -> Callable[[Files], None]:
    """A post-processor that puts tokens before a text."""
    piece = {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}
    special = {"<|im_end|>": {"id": "<|im_end|>", "ids": [0], "tokens": ["<|im_end|>"]}}
    single = [*[piece] * tokens, {"Sequence": {"id": "A", "type_id": 0}}]
    value = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    return with_part("post_processor", value)


SERVED = ""
ID = "expected a number from 0 to 16,777,215"
LONG = "xxxxxxxxxxxxxxxxxx'… has 10,000,000 characters; at most 10,000 are supported"
GROWS = "characters for one; at most 8 are supported"
INVALID = "not a valid tokenizer.json"
LOAD = "tokenizers can't load this tokenizer.json"
CASES: dict[str, tuple[Callable[[Files], None], str]] = {
    "100,000 added tokens": (with_added(100_000), SERVED),
    "100,000 added tokens that are not special": (with_added(100_000, special=False), SERVED),
    "an added id of 4,000,000,000": (with_added(1, id=4_000_000_000), f"'<|x_0|>' has the id 4,000,000,000; {ID}"),
    "an added id beyond 64 bits": (with_added(1, id=10**30), ID),
    "a negative added id": (with_added(1, id=-1), f"has the id -1; {ID}"),
    "an added id that is text": (with_added(1, id="one"), f"has the id 'one'; {ID}"),
    "an added id that is null": (with_added(1, id=None), ID),
    "an added token that is a number": (with_added(1, content=7), "expected a string"),
    "an added token of 10 MB": (with_added(1, content="x" * 10_000_000), f"the added token 'xx{LONG}"),
    "an empty added token": (with_added(1, content=""), SERVED),
    "added tokens that are an object": (with_part("added_tokens", {"a": 1}), INVALID),
    "an id of 4,000,000,000 in the vocabulary": (with_token(4_000_000_000), f"'zz' has the id 4,000,000,000; {ID}"),
    "an id that is text in the vocabulary": (with_token("one"), ID),
    "a vocabulary that is a number": (with_model(vocab=7), INVALID),
    "merges that are not in the vocabulary": (with_model(merges=["q qq"]), LOAD),
    "a model of an unknown type": (with_model(type="Oracle"), LOAD),
    "an eos_token of 10 MB": (with_config(eos_token="x" * 10_000_000), f"the eos_token 'xx{LONG}"),
    "an eos_token that is a list": (with_config(eos_token=["</s>"]), SERVED),
    "a declared token without an id": (with_config(added_tokens_decoder={"one": {"content": "x"}}), INVALID),
    "a declared token of 10 MB": (with_config(added_tokens_decoder={"7": {"content": "x" * 10_000_000}}), LONG),
    "a normalizer that writes a million times": (replacing({"String": "a"}, "b" * 1_000_000), f"1,000,000 {GROWS}"),
    "a normalizer that doubles 40 times": (replacing({"String": "a"}, "aa", times=40), f"16 {GROWS}"),
    "a normalizer that writes between characters": (replacing({"Regex": ""}, "b" * 10_000), f"10,000 {GROWS}"),
    "a normalizer that prepends 10 MB": (prepending("b" * 10_000_000), f"(Prepend) may write 10,000,000 {GROWS}"),
    "a normalizer that writes a little more": (replacing({"String": "a"}, "bbb"), SERVED),
    "a normalizer of 400 levels": (nested(400), LOAD),
    "a normalizer of 2,000 levels": (nested(2_000), INVALID),
    "a normalizer with a table of a megabyte": (with_table(b"a" * 1_000_000), "writes 1,000,000 bytes for a character"),
    "a pattern that backtracks": (splitting(r"(a+)+$|(a*)*b"), "rows.jsonl:3: tokenizers panics: Onig"),
    "a post-processor that adds 100,000 tokens": (adding(100_000), "adds 100,000 tokens to a text; at most 1,000"),
    "a file that is cut off": (with_file(b'{"model": {"vocab": {"a"'), INVALID),
    "a file that is not text": (with_file(bytes(range(256)) * 100), INVALID),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_served_or_refused_in_one_line(case: str, tokenizer: Path, tmp_path: Path) -> None:
    change, message = CASES[case]
    files: Files = {file.name: file.read_bytes() for file in tokenizer.iterdir() if file.is_file()}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        files[name] = json.loads(files[name])
    change(files)
    folder, rows = tmp_path / "tokenizer", tmp_path / "rows.jsonl"
    folder.mkdir()
    for name, value in files.items():
        (folder / name).write_bytes(value if isinstance(value, bytes) else json.dumps(value).encode())
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["prepare", rows, "--tokenizer", folder, "--cache", tmp_path / "cache", "--workers", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    done = run(*command, env=env, seconds=SECONDS, memory=MEMORY)
    if not message:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr) < 2000
    said = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    assert len(said) == 1 and message in said[0], done.stderr
    assert done.stderr.splitlines()[-1] == said[0]
