"""Small Unigram tokenizers in the configurations that are in use, trained on a few sentences."""

from __future__ import annotations

import json
import struct
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "Hello there, how are you? I'm fine… thanks! 1234 things cost 99 €",
    "def f(x):\n\treturn {'a': [x, x + 1]}  # code with   runs of spaces",
    "Grüße aus Zürich, señor; café naïve",
    "Привет, мир! Как дела? 你好，世界！我们很好。 नमस्ते दुनिया, कैसे हैं आप?",
    "हम ठीक हैं हम ठीक हैं, مرحبا بالعالم 안녕하세요 세계 สวัสดีชาวโลก",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>", "<|x|>"]
COLLAPSE = normalizers.Replace(Regex(" {2,}"), " ")
TO_BAR = normalizers.Replace(Regex(" {2,}"), "▁")
# What SentencePiece's own table does, on a few characters.
TABLE = {
    "\t": " ", "\n": " ", "\r": " ", "\x01": "", "\u00a0": " ", "\u200b": " ", "▁": " ", "ﬁ": "fi", "…": "...",
    "Ａ": "A", "①": "1", "e\u0301": "é", "ｶ": "カ", "\u00a8": " \u0308", "\u0958": "\u0915\u093c", "㍿": "株式会社",
    "\u212b": "Å",
}  # fmt: skip


def charsmap(table: dict[str, str]) -> bytes:
    """A table as SentencePiece writes it: a double array of the keys, and the texts that they become."""
    texts = bytearray()
    values: dict[bytes, int] = {}
    for key, text in table.items():
        values[key.encode()] = len(texts)
        texts += text.encode() + b"\0"
    units: dict[int, int] = {0: 0}
    taken: set[int] = {0}

    def place(node: int, prefix: bytes) -> None:
        labels = sorted({key[len(prefix)] for key in values if len(key) > len(prefix) and key.startswith(prefix)})
        children = [0, *labels] if prefix in values else labels
        offset = next(
            base for base in range(256, 1 << 20) if not taken & {base ^ child for child in children} and node ^ base
        )
        offset_bits = node ^ offset
        assert offset_bits < 1 << 21
        units[node] |= offset_bits << 10 | (prefix in values) << 8
        taken.update(offset ^ child for child in children)
        for child in children:
            units[offset ^ child] = child if child else values[prefix] | 1 << 31
        for label in labels:
            place(offset ^ label, prefix + bytes([label]))

    place(0, b"")
    array = struct.pack(f"<{max(units) + 256}I", *(units.get(k, 0) for k in range(max(units) + 256)))
    return struct.pack("<I", len(array)) + array + bytes(texts)


def metaspace(scheme: str = "always", *, split: bool = True) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def words(scheme: str = "always") -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace(scheme)])


def precompiled() -> Any:
    return normalizers.Precompiled(charsmap(TABLE))


SHAPES: dict[str, tuple[Any, Any, bool]] = {  # normalizer, pre-tokenizer, byte fallback
    "t5": (precompiled(), words(), False),
    "t5, first": (precompiled(), words("first"), False),
    "mt5": (normalizers.Sequence([precompiled(), normalizers.Strip(False, True), TO_BAR]), metaspace(), False),
    "precompiled": (precompiled(), metaspace("first"), True),
    "collapsing": (normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), COLLAPSE]), metaspace(), True),
    "lower case": (
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
        metaspace("never"),
        False,
    ),
    "nfc": (normalizers.NFC(), words(), True),
    "nfkd": (normalizers.NFKD(), metaspace(), False),
    "plain": (None, metaspace(), True),
    "plain, first": (None, metaspace("first"), False),
    "whole": (None, metaspace(split=False), True),
    "llama": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None, True),
    "bare": (None, None, False),
    "white space": (None, pre_tokenizers.WhitespaceSplit(), False),
}


@cache
def unigram(name: str) -> bytes:
    """The tokenizer.json of a shape."""
    normalizer, splitting, fallback = SHAPES[name]
    tokenizer = Tokenizer(models.Unigram())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitting or metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=170, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    config = json.loads(tokenizer.to_str())
    if splitting is None:
        config["pre_tokenizer"] = None
    if fallback:
        lowest = min(score for _, score in config["model"]["vocab"])
        config["model"]["vocab"] += [[f"<0x{byte:02X}>", lowest - 1] for byte in range(256)]
        config["model"]["byte_fallback"] = True
    made = Tokenizer.from_str(json.dumps(config))
    made.add_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    return made.to_str().encode()
