"""What transformers' `AutoTokenizer` makes of a tokenizer's folder, and whether it gives the ids of `tokenizer.json`.

Some of its classes take only the vocabulary from the file and build normaliser and pre-tokenizer themselves, so that
code which loads a model with `AutoTokenizer` may see other ids than the file says. Remote code is never run.

    python -m penstock.sources.auto_tokenizer FOLDER TOKENIZER_JSON    prints a comparison as JSON

Importing transformers takes seconds and memory, so a build compares in a process of its own beside its work, and keeps
the result in the cache. Where `takes_the_file` says so, there is nothing to compare. Loading a large tokenizer twice
takes seconds, too; what may differ does not lie in the vocabulary, so it is first tried with a small part of it (0.1 to
0.4 s), and only a difference found there is looked at with all of it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.errors import TokenizerError

PLAIN_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Files beside tokenizer.json that AutoTokenizer may look at.
CONFIGS: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
VOCABULARIES: Final = (
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
MERGES, ADDED = 2000, 100  # of these, so many are tried
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
PARTS: Final = ("normalizer", "pre_tokenizer")
FLAGS: Final = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "unk_id")
PROBES: Final = (
    *("Hello, world! It's 12345.67 — “quoted” (don't)…", "  indented\t\ttabs  \r\nCRLF \u00a0nbsp ", " leading"),
    *("trailing ", "a  b   c", "\n\n\n", "\n  x\n", "def f(x):\n    return x**2  # 100%", "HTTPServer camelCase WE'LL"),
    *("Grüße, señor; café. Привет, мир! مرحبا بالعالم ١٢٣. नमस्ते दुनिया. สวัสดี", "你好，世界！日本語、한국어。 ㍿ ﬁ ½ ①"),
    *("😀👩‍👩‍👧‍👦 zero\u200bwidth e\u0301", "▁ ▁▁a Ġ <0x0A>", "x", "1", "2024-01-01 1,000,000", "a\u0300b ＡＢ"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs, in words; '' where ids agree."""

    name: str  # of AutoTokenizer's class, with transformers' version
    difference: str = ""
    around: str = ""  # a difference in what is put around plain text alone
    not_compared: str = ""  # why


@dataclass(frozen=True, slots=True)
class AutoBackend:
    """The tokenizer that AutoTokenizer makes."""

    name: str
    tokenizer_json: bytes
    special_tokens: dict[str, str]


def is_installed() -> bool:
    """Whether there is a transformers to compare with."""
    return importlib.util.find_spec("transformers") is not None


def takes_the_file(folder: Path) -> bool:
    """Whether AutoTokenizer goes by `tokenizer.json`: no class is named, neither here nor by the model's type."""
    named = _read(folder / "tokenizer_config.json").get("tokenizer_class")
    return named in PLAIN_CLASSES or (named is None and not (folder / "config.json").exists())


def compare(folder: Path, tokenizer_json: bytes) -> Comparison:
    """Compare AutoTokenizer's ids of a folder with those of its tokenizer.json, completed."""
    small = None if any((folder / name).exists() for name in VOCABULARIES) else _reduced(tokenizer_json)
    if small is not None:
        with tempfile.TemporaryDirectory() as scratch:
            _copy_configs(folder, Path(scratch), small)
            (Path(scratch) / "tokenizer.json").write_bytes(small)
            found = _compared(Path(scratch), small)
        if not found.difference and not found.around:
            return found
    return _compared(folder, tokenizer_json)


def _copy_configs(folder: Path, target: Path, small: bytes) -> None:
    """The configurations, without the added tokens that the small tokenizer does not have."""
    for name in CONFIGS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    config = _read(folder / "tokenizer_config.json")
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        kept = {token["content"] for token in orjson.loads(small)["added_tokens"]}
        config["added_tokens_decoder"] = {n: token for n, token in declared.items() if token.get("content") in kept}
        (target / "tokenizer_config.json").write_text(json.dumps(config))


def _reduced(tokenizer_json: bytes) -> bytes | None:
    """A BPE tokenizer with single characters, the first merges and the added tokens alone; None for other models."""
    config = _parsed(tokenizer_json)
    model, added = config["model"], config.get("added_tokens") or []
    added = added if len(added) <= 2 * ADDED else added[:ADDED] + added[-ADDED:]
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not isinstance(merges, list):
        return None
    kept = {token for token in vocab if len(token) == 1} | BYTE_TOKENS & vocab.keys()
    kept |= {token["content"] for token in added} | {model.get("unk_token") or ""} & vocab.keys()
    first = []
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        if left in kept and right in kept and left + right in vocab:
            kept.add(left + right)
            first.append(merge)
            if len(first) == MERGES:
                break
    numbers = {token["content"]: token["id"] for token in added}
    numbers |= {token: vocab[token] for token in kept if token in vocab}
    model["vocab"] = {token: number for number, token in enumerate(sorted(kept, key=numbers.__getitem__))}
    model["merges"] = first
    config["added_tokens"] = [{**token, "id": model["vocab"][token["content"]]} for token in added]
    config["post_processor"] = None  # it names ids
    return orjson.dumps(config)


def _parsed(tokenizer_json: bytes) -> dict[str, Any]:
    """The file's JSON, parsed without the cyclic collector, which half a million merges (each a list) keep busy."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        config: dict[str, Any] = orjson.loads(tokenizer_json)
    finally:
        if was_on:
            gc.enable()
    return config


def _compared(folder: Path, tokenizer_json: bytes) -> Comparison:
    from tokenizers import Tokenizer

    try:
        auto = _loaded(folder)
    except TokenizerError as error:
        return Comparison(f"AutoTokenizer of transformers {version('transformers')}", not_compared=str(error))
    ours, theirs = Tokenizer.from_str(tokenizer_json.decode()), auto.backend_tokenizer
    for one in (ours, theirs):
        one.no_truncation()
        one.no_padding()
    differing = [text for text in _probes(ours) if _ids(ours, text, around=False) != _ids(theirs, text, around=False)]
    around = next((text for text in PROBES if _ids(ours, text) != _ids(theirs, text)), None)
    return Comparison(
        _name(auto),
        _words(_shape(ours, theirs), ours, theirs, min(differing, key=_strangeness), around=False) if differing else "",
        _words("what is put around a text", ours, theirs, around) if around and not differing else "",
    )


def load_auto(folder: Path) -> AutoBackend:
    """The tokenizer that AutoTokenizer makes of a folder."""
    if not is_installed():
        raise TokenizerError("--tokenizer-as auto needs transformers: install penstock[hub]")
    auto = _loaded(folder)
    special = {key: str(value) for key, value in auto.special_tokens_map.items() if isinstance(value, str)}
    return AutoBackend(_name(auto), auto.backend_tokenizer.to_str().encode(), special)


def _loaded(folder: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    try:
        auto = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        auto.backend_tokenizer  # noqa: B018
    except Exception as error:  # in whatever way it fails, it gives no ids
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"AutoTokenizer can't load {folder} without remote code: {first}") from error
    return auto


def _name(auto: Any) -> str:
    return f"{type(auto).__name__} of transformers {version('transformers')}"


def _probes(tokenizer: Any) -> list[str]:
    """Plain texts, alone and beside added tokens."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    shown = added if len(added) <= 40 else added[:20] + added[-20:]
    around = ("{}a", "a {} b", "{} a", "{}\n", "{}{}")
    return [*PROBES, *(pattern.replace("{}", token) for token in shown for pattern in around), *added]


def _strangeness(text: str) -> tuple[bool, int]:
    return not text.isascii(), len(text)


def _ids(tokenizer: Any, text: str, *, around: bool = True) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=around).ids
    return ids


def _shape(ours: Any, theirs: Any) -> str:
    """The first part that differs, in words."""
    for part in PARTS:
        pair = [_state(getattr(one, part)) for one in (ours, theirs)]
        if pair[0] != pair[1]:
            return f"{part}: {_shown(pair[0])} in the file, {_shown(pair[1])} there"
    for flag in FLAGS:
        pair = [getattr(one.model, flag, None) for one in (ours, theirs)]
        if pair[0] != pair[1]:
            return f"{flag}: {pair[0]!r} in the file, {pair[1]!r} there"
    added = [{i: str(token) for i, token in one.get_added_tokens_decoder().items()} for one in (ours, theirs)]
    for number in sorted(added[0].keys() | added[1].keys()):
        if added[0].get(number) != added[1].get(number):
            return f"added token {number}: {added[0].get(number)} in the file, {added[1].get(number)} there"
    return ""


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _shown(state: Any) -> str:
    text = json.dumps(state, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "…"


def _words(shape: str, ours: Any, theirs: Any, text: str, *, around: bool = True) -> str:
    one, other = (_ids(tokenizer, text, around=around) for tokenizer in (ours, theirs))
    at = next(
        (k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    first = max(0, at - 1)
    shown = [
        f"{'…' if first else ''}{ids[first : first + 6]}{'…' if len(ids) > first + 6 else ''}" for ids in (one, other)
    ]
    return f"{shape + '; ' if shape else ''}for example {text!r} becomes {shown[0]} by the file and {shown[1]} there"


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def main() -> None:
    folder, tokenizer_json = map(Path, sys.argv[1:])
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints must not mix with the result
    print(json.dumps(asdict(compare(folder, tokenizer_json.read_bytes()))), file=out)


if __name__ == "__main__":
    main()
