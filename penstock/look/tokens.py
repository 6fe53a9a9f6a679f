"""Renders one example as HTML: a block per message, a span per token, and each run's mask under every loss policy.

`visible_text` replaces unprintable characters by escape sequences, and `escape` neutralises markup. A token carries its
id, and its bytes only if the text doesn't show them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Final, NamedTuple

import numpy as np
from markupsafe import Markup

from penstock.errors import PenstockError
from penstock.load.example import Cut, Example, Pair, cut_example, place_of
from penstock.load.options import LossMask, LossPolicy
from penstock.load.policy import Float32, Runs, run_weights
from penstock.prepare.chat.conversation import Part, Role
from penstock.printable import escaped
from penstock.store.dataset import Dataset

# ---- visible ---------------------------------------------------------------------------------------------------------
# Converts token bytes to text that is safe to print in a terminal or a page.
#
# Escape sequences, control and format characters, unusual white space and invalid UTF-8 are printed as escapes
# (`\\x1b`, `\\u202e`), so that data can't control the terminal, reorder a line or hide.


NEWLINE = "↵"
NEWLINE_BREAKS = "↵\n"
TAB = "⇥"
TRAILING_SPACE = "·"


def visible_lines(data: bytes) -> list[str]:
    """The text as lines; each newline is shown as ↵ and ends a line."""
    lines = data.decode("utf-8", "backslashreplace").split("\n")
    ended = [_visible(line) + NEWLINE for line in lines[:-1]]
    return [*ended, _visible(lines[-1])] if lines[-1] or not ended else ended


def visible_text(data: bytes) -> str:
    """The text of a token or a row; each newline is shown as ↵ and breaks the line."""
    return NEWLINE_BREAKS.join(map(_printable, data.decode("utf-8", "backslashreplace").split("\n")))


def _printable(line: str) -> str:
    return line if line.isprintable() else "".join(char if char.isprintable() else _escaped(char) for char in line)


def _visible(line: str) -> str:
    text = _printable(line)
    bare = text.rstrip(" ")
    return bare + TRAILING_SPACE * (len(text) - len(bare))


def _escaped(char: str) -> str:
    match char:
        case "\t":
            return TAB
        case "\r":
            return "\\r"
    return escaped(char)


# ---- tokens ----------------------------------------------------------------------------------------------------------


ROLE_NAMES: Final[Mapping[Role, str]] = {role: "template" if role is Role.NONE else role.name.lower() for role in Role}
CONTINUED: Final = "‿"  # a token that continues the character of the token before it
TokenBytes = Sequence[bytes]
_DEFAULT: Final = LossMask(LossPolicy.ALL_ASSISTANT_MESSAGES)
_SPLIT: Final = 16  # tokens that share characters; more are not looked at


class TokenRun(NamedTuple):
    """Consecutive tokens of one part of one message with one weight."""

    message: int
    role: Role
    part: Part
    start: int
    ids: tuple[int, ...]
    weight: float
    weights: tuple[float, ...]  # under each loss policy

    @property
    def trained(self) -> bool:
        """Whether the run counts in the loss."""
        return self.weight > 0


class MessageBlock(NamedTuple):
    """All runs of one message, or of the text between two messages."""

    message: int
    role: str
    tokens: int
    trained: int
    runs: tuple[TokenRun, ...]
    hidden: int = 0  # tokens omitted to keep the page small


def example_of(dataset: Dataset, sequence: int, mask: LossMask) -> Example:
    """A complete token sequence of a dataset, numbered over all shards (a pair counts as two)."""
    ends = np.cumsum(dataset.shards.examples)
    shard = int(np.searchsorted(ends, sequence, side="right"))
    number = sequence - int(ends[shard] - dataset.shards.examples[shard])
    columns = dataset.shards.columns(shard)
    length = int(columns.id_offsets[number + 1] - columns.id_offsets[number])
    place = place_of(dataset, sequence // 2 if dataset.is_preference else sequence)
    return cut_example(columns, number, Cut(0, length), mask, place, dataset)


def blocks(example: Example, most: int | None = None, prompt: int = 0, mask: LossMask = _DEFAULT) -> list[MessageBlock]:
    """The messages of an example. After `most` tokens, runs are omitted and counted. The `prompt` is never trained.

    `mask` says which parts the weights under every policy are of.
    """
    found, left = [], len(example) if most is None else most
    for (message, role), group in groupby(_runs(example, prompt, mask), key=lambda run: (run.message, run.role)):
        own, shown = list(group), list[TokenRun]()
        for run in own:
            if left > 0:
                shown.append(run._replace(ids=run.ids[:left]))
                left -= len(run.ids)
        tokens, kept = sum(len(run.ids) for run in own), sum(len(run.ids) for run in shown)
        trained = sum(len(run.ids) for run in own if run.trained)
        found.append(MessageBlock(message, ROLE_NAMES[role], tokens, trained, tuple(shown), tokens - kept))
    return found


def _runs(example: Example, prompt: int, mask: LossMask) -> Iterator[TokenRun]:
    runs, weights = example.runs, example.loss_weights
    policies = _policy_weights(runs, mask)
    owner = np.repeat(np.arange(len(runs.roles)), runs.lengths)
    changes = np.flatnonzero((owner[1:] != owner[:-1]) | (weights[1:] != weights[:-1])) + 1
    bounds = sorted({0, *changes.tolist(), min(prompt, len(example)), len(example)})
    for start, end in pairwise(bounds):
        run = int(owner[start])
        yield TokenRun(
            int(runs.messages[run]),
            Role(int(runs.roles[run])),
            Part(int(runs.parts[run])),
            start,
            tuple(example.input_ids[start:end].tolist()),
            float(weights[start]),
            tuple(0.0 if start < prompt else float(column[run]) for column in policies.values()),
        )


def _policy_weights(runs: Runs, mask: LossMask) -> dict[LossPolicy, Float32]:
    """The weight of each run under every loss policy. With unknown regions, only `all_tokens` has weights."""
    known = not bool(runs.unknown.any())
    return {
        policy: run_weights(mask._replace(policy=policy), runs)
        if known or not policy.needs_regions
        else np.zeros(len(runs.roles), np.float32)
        for policy in LossPolicy
    }


def run_html(run: TokenRun, token_bytes: TokenBytes) -> Markup:
    """A span per token."""
    # _token_html makes both parts of a span safe: the id is an integer, and the text is escaped.
    texts = zip(run.ids, token_texts(run.ids, token_bytes), strict=True)
    return Markup("".join(_token_html(token, text, token_bytes) for token, text in texts))  # noqa: S704


def _token_html(token: int, text: str, token_bytes: TokenBytes) -> str:
    data = _bytes_of(token, token_bytes)
    if text.isascii() and len(text) == len(data):  # the page derives the bytes itself
        return f'<i data-t="{token}">{escape(text)}</i>'
    return f'<i data-t="{token}" data-b="{data.hex(" ")}">{escape(text or "∅")}</i>'


def token_texts(ids: Sequence[int], token_bytes: TokenBytes) -> list[str]:
    """The visible text of each token. A character split over tokens is shown in the first; the others continue it."""
    pieces, texts, at = [_bytes_of(token, token_bytes) for token in ids], list[str](), 0
    while at < len(pieces):
        last = at + 1
        while not _is_text(joined := b"".join(pieces[at:last])) and last < min(at + _SPLIT, len(pieces)):
            last += 1
        if last == at + 1 or not _is_text(joined):
            texts.append(visible_text(pieces[at]))
            at += 1
            continue
        texts += _shared(pieces[at:last])
        at = last
    return texts


def _shared(pieces: Sequence[bytes]) -> list[str]:
    """The text of tokens that are valid UTF-8 only together: each shows the characters that start in it."""
    texts = list[str]()
    for number, piece in enumerate(pieces):
        whole = b"".join(pieces[number:])
        own = len(piece)
        while own < len(whole) and whole[own] & 0xC0 == 0x80:
            own += 1
        start = next((at for at, byte in enumerate(piece) if byte & 0xC0 != 0x80), len(piece)) if number else 0
        text = whole[start:own] if start < len(piece) else b""
        texts.append((CONTINUED if number and start else "") + visible_text(text))
    return texts


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _bytes_of(token: int, token_bytes: TokenBytes) -> bytes:
    return token_bytes[token] if 0 <= token < len(token_bytes) else b""


def text_of(ids: Iterable[int], token_bytes: TokenBytes) -> str:
    """The text of some tokens, with unprintable characters escaped."""
    return visible_text(b"".join(_bytes_of(token, token_bytes) for token in ids))


def sides_of(item: Example | Pair) -> list[tuple[str, Example, int]]:
    """The sequences of an item with their names, and the length of the prompt, which is never trained."""
    if isinstance(item, Example):
        return [("", item, 0)]
    return [("chosen", item.chosen, item.prompt_length), ("rejected", item.rejected, item.prompt_length)]


def safe_bytes(vocabulary: object) -> TokenBytes:
    """The bytes of each token id, or None if the dataset has no tokenizer."""
    try:
        table: TokenBytes = vocabulary.vocabulary.token_bytes  # type: ignore[attr-defined]
        return table
    except (AttributeError, PenstockError):
        return ()
