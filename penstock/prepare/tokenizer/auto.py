"""Checks whether transformers' `AutoTokenizer` produces the ids of `tokenizer.json` for a tokenizer's folder.

Some tokenizer classes take only the vocabulary from the file and build the normalizer and pre-tokenizer themselves, so
code that loads a model with `AutoTokenizer` may get different ids. Remote code is never run.

    python -m penstock.prepare.tokenizer.auto FOLDER TOKENIZER_JSON    prints a comparison as JSON

Importing transformers takes seconds and memory, so a build runs the comparison in a separate process and stores the
result in the cache. If `uses_file_as_is` holds, there is nothing to compare. Loading a large tokenizer twice takes
seconds too. Differences don't depend on the vocabulary, so the comparison first runs with a small part of it (0.1 to
0.4 s); only if that finds a difference is it repeated with all of it.
"""

from __future__ import annotations

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
from penstock.prepare.tokenizer.files import VOCABULARY_FILES

PLAIN_CLASSES: Final = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Files beside tokenizer.json that AutoTokenizer may look at.
CONFIG_FILES: Final = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
MERGES, ADDED = 2000, 100  # how many of each the reduced tokenizer keeps
BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
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
    """The differences, as text; empty where the ids agree."""

    name: str  # the tokenizer class, with the version of transformers
    difference: str = ""
    around: str = ""  # a difference only in the special tokens added around a text
    not_compared: str = ""  # why the comparison was impossible


@dataclass(frozen=True, slots=True)
class AutoBackend:
    """The tokenizer that AutoTokenizer builds."""

    name: str
    tokenizer_json: bytes
    special_tokens: dict[str, str]


def is_installed() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def uses_file_as_is(folder: Path) -> bool:
    """Whether AutoTokenizer loads `tokenizer.json` unchanged: no other class is named, here or by the model's type."""
    named = _read(folder / "tokenizer_config.json").get("tokenizer_class")
    return named in PLAIN_CLASSES or (named is None and not (folder / "config.json").exists())


def compare(folder: Path, tokenizer_json: bytes) -> Comparison:
    """Compare AutoTokenizer's ids for a folder with those of its completed tokenizer.json."""
    small = None if any((folder / name).exists() for name in VOCABULARY_FILES) else _reduced(tokenizer_json)
    if small is not None:
        with tempfile.TemporaryDirectory() as scratch:
            _copy_configs(folder, Path(scratch), small)
            (Path(scratch) / "tokenizer.json").write_bytes(small)
            found = _compare_folder(Path(scratch), small)
        if not found.difference and not found.around:
            return found
    return _compare_folder(folder, tokenizer_json)


def _copy_configs(folder: Path, target: Path, small: bytes) -> None:
    """Copy the configuration files, without the added tokens that the reduced tokenizer lacks."""
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)
    config = _read(folder / "tokenizer_config.json")
    declared = config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        kept = {token["content"] for token in orjson.loads(small)["added_tokens"]}
        config["added_tokens_decoder"] = {n: token for n, token in declared.items() if token.get("content") in kept}
        (target / "tokenizer_config.json").write_text(json.dumps(config))


def _reduced(tokenizer_json: bytes) -> bytes | None:
    """A BPE tokenizer reduced to single characters, the first merges and the added tokens; None for other models."""
    from penstock.prepare.tokenizer.vocabulary import parse_tokenizer

    config = parse_tokenizer(tokenizer_json)
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
    config["post_processor"] = None  # it refers to ids
    return orjson.dumps(config)


def _compare_folder(folder: Path, tokenizer_json: bytes) -> Comparison:
    try:
        auto = _load_auto_tokenizer(folder)
    except TokenizerError as error:
        return Comparison(f"AutoTokenizer of transformers {version('transformers')}", not_compared=str(error))
    from penstock.prepare.tokenizer.reference import backend

    ours, theirs = backend(tokenizer_json), auto.backend_tokenizer
    for one in (ours, theirs):
        one.no_truncation()
        one.no_padding()
    differing = [text for text in _probes(ours) if _ids(ours, text, around=False) != _ids(theirs, text, around=False)]
    around = next((text for text in PROBES if _ids(ours, text) != _ids(theirs, text)), None)
    difference = ""
    if differing:
        example = min(differing, key=_readability)
        difference = _describe(_first_difference(ours, theirs), ours, theirs, example, around=False)
    return Comparison(
        _name(auto),
        difference,
        _describe("special tokens added around a text", ours, theirs, around) if around and not differing else "",
    )


def load_auto(folder: Path) -> AutoBackend:
    """The tokenizer that AutoTokenizer builds from a folder."""
    if not is_installed():
        raise TokenizerError("--tokenizer-as auto needs transformers: install penstock[hub]")
    auto = _load_auto_tokenizer(folder)
    special = {key: str(value) for key, value in auto.special_tokens_map.items() if isinstance(value, str)}
    return AutoBackend(_name(auto), auto.backend_tokenizer.to_str().encode(), special)


def _load_auto_tokenizer(folder: Path) -> Any:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoTokenizer

    try:
        auto = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        auto.backend_tokenizer  # noqa: B018
    except Exception as error:  # however it fails, there are no ids to compare
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"AutoTokenizer can't load {folder} without remote code: {first}") from error
    return auto


def _name(auto: Any) -> str:
    return f"{type(auto).__name__} of transformers {version('transformers')}"


def _probes(tokenizer: Any) -> list[str]:
    """Plain texts, alone and next to added tokens."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.content]
    shown = added if len(added) <= 40 else added[:20] + added[-20:]
    around = ("{}a", "a {} b", "{} a", "{}\n", "{}{}")
    return [*PROBES, *(pattern.replace("{}", token) for token in shown for pattern in around), *added]


def _readability(text: str) -> tuple[bool, int]:
    return not text.isascii(), len(text)


def _ids(tokenizer: Any, text: str, *, around: bool = True) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=around).ids
    return ids


def _first_difference(ours: Any, theirs: Any) -> str:
    """Describe the first part that differs."""
    for part in PARTS:
        pair = [_state(getattr(one, part)) for one in (ours, theirs)]
        if pair[0] != pair[1]:
            return f"{part}: {_shown(pair[0])} in the file, {_shown(pair[1])} in transformers"
    for flag in FLAGS:
        pair = [getattr(one.model, flag, None) for one in (ours, theirs)]
        if pair[0] != pair[1]:
            return f"{flag}: {pair[0]!r} in the file, {pair[1]!r} in transformers"
    added = [{i: str(token) for i, token in one.get_added_tokens_decoder().items()} for one in (ours, theirs)]
    for number in sorted(added[0].keys() | added[1].keys()):
        if added[0].get(number) != added[1].get(number):
            mine, other = added[0].get(number), added[1].get(number)
            return f"added token {number}: {mine} in the file, {other} in transformers"
    return ""


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _shown(state: Any) -> str:
    text = json.dumps(state, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "…"


def _describe(what: str, ours: Any, theirs: Any, text: str, *, around: bool = True) -> str:
    one, other = (_ids(tokenizer, text, around=around) for tokenizer in (ours, theirs))
    at = next(
        (k for k, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )
    first = max(0, at - 1)
    shown = [
        f"{'…' if first else ''}{ids[first : first + 6]}{'…' if len(ids) > first + 6 else ''}" for ids in (one, other)
    ]
    example = f"for example {text!r} becomes {shown[0]} with the file and {shown[1]} with transformers"
    return f"{what}; {example}" if what else example


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def main() -> None:
    folder, tokenizer_json = map(Path, sys.argv[1:])
    out, sys.stdout = sys.stdout, sys.stderr  # keep library output apart from the result
    sys.modules["torch"] = None  # type: ignore[assignment]  # no tokenizer needs it, and importing it takes seconds
    print(json.dumps(asdict(compare(folder, tokenizer_json.read_bytes()))), file=out)


if __name__ == "__main__":
    main()
