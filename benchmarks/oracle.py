"""The reference: text, tokens and masks of transformers' `apply_chat_template`, for many conversations at once.

Text is rendered by transformers' own `render_jinja_template`, one conversation at a time. Tokens come from the
tokenizer's backend in batches, called as `apply_chat_template` calls it, once per distinct text, since templates often
agree. If a template has {% generation %}, the mask is derived from its spans and the tokens' offsets as
`apply_chat_template` does. The first conversations of every template also go through `apply_chat_template` itself, to
check this batched version with each template and tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from benchmarks.clock import stop_clock

Bool = npt.NDArray[np.bool_]
Spans = list[tuple[int, int]]
BATCH = 256
CHECKED = 20  # conversations per template that also go through apply_chat_template


@dataclass(frozen=True)
class Expected:
    """The result of transformers for a conversation."""

    error: str | None = None  # why it refuses the conversation
    tokens: bytes = b""  # hash of the ids
    mask: Bool | None = None
    encoding: Any = None  # set, along with spans, if there is a mask
    spans: Spans = field(default_factory=Spans)

    def repaired_mask(self) -> Bool:
        """The mask without transformers' known bugs: every token with a character in a tagged block is trained.

        In transformers' mask an empty block trains a token that spans it; if the last character is split over several
        tokens, only the first is trained; and if a block's first character has no token of its own, the rest of the row
        is untrained.
        """
        mask = np.zeros(len(self.encoding), bool)
        starts, ends = np.asarray(self.encoding.offsets, np.int64).reshape(-1, 2).T
        for start, end in self.spans:
            mask |= np.maximum(starts, start) < np.minimum(ends, end)
        return mask


def token_hash(ids: Any) -> bytes:
    """A hash of a row's tokens."""
    return xxhash.xxh3_128_digest(np.asarray(ids, np.uint32).tobytes())


def reference_tokenizer(folder: Path) -> Any:
    """The tokenizer exactly as in its file, loaded with transformers' class for a bare tokenizer.json."""
    from transformers import AddedToken, PreTrainedTokenizerFast

    from penstock.prepare.tokenizer.files import load_tokenizer

    config = json.loads((folder / "tokenizer_config.json").read_text())
    declared = {int(k): AddedToken(**v) for k, v in (config.get("added_tokens_decoder") or {}).items()}
    tokens = load_tokenizer(folder).special_tokens
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, added_tokens_decoder=declared, **tokens)


class Oracle:
    """Computes expected results with one tokenizer, and remembers the tokens of every text."""

    def __init__(self, folder: Path) -> None:
        stop_clock()
        self.tokenizer = reference_tokenizer(folder)
        self._backend = self.tokenizer.backend_tokenizer
        self._tokens: dict[bytes, bytes] = {}  # by hash of the text

    def expected(self, sides: Sequence[dict[str, Any]], template: str, masks: bool) -> Iterator[Expected]:
        """Yields transformers' results for conversations, in order."""
        for first in range(0, len(sides), BATCH):
            yield from self._batch(sides[first : first + BATCH], template, masks)

    def check(self, sides: Sequence[dict[str, Any]], template: str, masks: bool) -> int:
        """The number of differences from `apply_chat_template` among the first conversations."""
        differing = 0
        for side, found in zip(sides[:CHECKED], self.expected(sides[:CHECKED], template, masks), strict=True):
            try:
                whole = self.tokenizer.apply_chat_template(
                    side["messages"], tools=side["tools"], chat_template=template, tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=masks, **side["variables"],
                )  # fmt: skip
            except Exception:
                differing += found.error is None and not has_null_content(side)
                continue
            same = found.error is None and found.tokens == token_hash(whole["input_ids"])
            differing += not same or (masks and not np.array_equal(found.mask, whole["assistant_masks"]))
        return differing

    def render(self, side: dict[str, Any], template: str, masks: bool = False) -> tuple[str, Spans]:
        """The text of a conversation and the spans of {% generation %} blocks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables = {**self.tokenizer.special_tokens_map, **side["variables"]}
        texts, spans = render_jinja_template(
            [side["messages"]], tools=side["tools"], chat_template=template, return_assistant_tokens_mask=masks,
            **variables,
        )  # fmt: skip
        return texts[0], spans[0] if masks else []

    def _batch(self, sides: Sequence[dict[str, Any]], template: str, masks: bool) -> list[Expected]:
        errors: dict[int, str] = {}
        texts, spans = [""] * len(sides), [Spans()] * len(sides)
        for number, side in enumerate(sides):
            try:
                texts[number], spans[number] = self.render(side, template, masks)
            except Exception as error:
                errors[number] = str(error)
        keys = [xxhash.xxh3_128_digest(text.encode()) for text in texts]
        if masks:
            encodings = self._backend.encode_batch(texts, add_special_tokens=False)
            self._tokens.update(zip(keys, (token_hash(encoding.ids) for encoding in encodings), strict=True))
            found = [
                Expected(None, self._tokens[key], stock_mask(encoding, own), encoding, own)
                for key, encoding, own in zip(keys, encodings, spans, strict=True)
            ]
        else:
            new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._tokens}
            encodings = self._backend.encode_batch_fast(list(new.values()), add_special_tokens=False)
            self._tokens.update(zip(new, (token_hash(encoding.ids) for encoding in encodings), strict=True))
            found = [Expected(None, self._tokens[key]) for key in keys]
        return [Expected(errors[number]) if number in errors else one for number, one in enumerate(found)]


def has_null_content(side: dict[str, Any]) -> bool:
    """Whether a message has null content, which the adapter adds beside calls for templates that print none without it
    (DeepSeek's). From 5.23 on, `apply_chat_template` drops it, and these templates fail on any calls."""
    return any(message.get("content", "") is None for message in side["messages"])


def stock_mask(encoding: Any, spans: Spans) -> Bool:
    """The mask as `apply_chat_template` derives it, bugs included."""
    mask = np.zeros(len(encoding), bool)
    for start, end in spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1) if end else None
        if first is None:
            break
        mask[first : last + 1 if last else len(mask)] = True
    return mask
