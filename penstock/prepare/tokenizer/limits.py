"""Limits on tokenizers, far above those of real ones: a file of a few bytes must not reserve gigabytes.

`tokenizers` aborts the process if memory runs out, so what multiplies text is refused before it encodes anything.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import TokenizerError

MAX_ID = (1 << 24) - 1
MAX_CHARACTERS = 10_000  # of a token
MAX_GROWTH = 8  # characters that a normalizer may write for one
MAX_MAPPED = 256  # bytes that a table of SentencePiece may write for a character; T5's writes up to 33


def check_content(content: object, what: str) -> None:
    """Raises TokenizerError if a token is longer than any text it could be found in."""
    if isinstance(content, str) and len(content) > MAX_CHARACTERS:
        raise TokenizerError(
            f"{what} {content[:20]!r}… has {len(content):,} characters; at most {MAX_CHARACTERS:,} are supported. "
            "Check the tokenizer's files."
        )


def check_ids(tokens: Iterable[str], numbers: Sequence[object]) -> None:
    """Raises TokenizerError unless all ids are numbers within the limit: tables are as long as the largest id."""
    if {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) <= MAX_ID:  # type: ignore[type-var, operator]
        return
    for content, number in zip(tokens, numbers, strict=True):
        if type(number) is not int or not 0 <= number <= MAX_ID:
            shown = f"{number:,}" if type(number) is int else repr(number)
            raise TokenizerError(
                f"the token {content[:40]!r} has the id {shown:.40}; expected a number from 0 to {MAX_ID:,}. Check "
                "tokenizer.json."
            )


def growth(steps: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many characters a normalizer may write for one. Raises TokenizerError if they are too many."""
    factor = 1
    for step in steps:
        match step.get("type"):
            case "Replace":
                factor *= _replaced(step)
            case "Prepend":
                factor *= max(1, len(str(step.get("prepend"))))  # before each text between added tokens
            case "Precompiled":
                _check_table(str(step.get("precompiled_charsmap")))
        if factor > MAX_GROWTH:
            raise TokenizerError(
                f"the tokenizer's normalizer ({step['type']}) may write {factor:,} characters for one; at most "
                f"{MAX_GROWTH} are supported, because a row could take any amount of memory. Check tokenizer.json."
            )
    return factor


def _replaced(step: Mapping[str, Any]) -> int:
    """Returns the growth of a replacement; an expression may match single characters."""
    pattern = step.get("pattern")
    size = len(str(pattern["String"])) if isinstance(pattern, Mapping) and "String" in pattern else 1
    return max(1, -(-len(str(step.get("content"))) // max(1, size)))


def _check_table(charsmap: str) -> None:
    """Checks the texts that SentencePiece's table writes: they follow its trie, separated by zeros."""
    try:
        table = base64.b64decode(charsmap)
    except binascii.Error:
        return  # refused by `tokenizers`
    texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    longest = max(map(len, texts))
    if longest > MAX_MAPPED:
        raise TokenizerError(
            f"the tokenizer's normalizer (Precompiled) writes {longest:,} bytes for a character; at most {MAX_MAPPED} "
            "are supported. Check tokenizer.json."
        )
