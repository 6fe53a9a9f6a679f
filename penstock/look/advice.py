"""Warnings derived from statistics: what is wrong, the number of rows, the first of them, and the remedy."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from penstock.chat.notes import Note, describe_note
from penstock.look.stats import Stats
from penstock.view.settings import ViewSettings

_MUCH_LOST = 0.01  # of the tokens


class Level(StrEnum):
    """Severity of a warning."""

    WRONG = "wrong"  # trains on unintended tokens
    LOSS = "loss"  # data is lost or counted twice
    NOTE = "note"


class Advice(NamedTuple):
    """One warning; `flag` is the viewer's filter that lists its rows, if there is one."""

    level: Level
    title: str
    text: str
    rows: int
    first: tuple[int, ...] = ()
    flag: str = ""


_FLAGS = {
    "no_stop": (
        Level.WRONG,
        "Stop token not trained",
        "An answer is trained but its stop token is not, so the model doesn't learn to stop. Use a template that "
        "prints a stop token, or --stop next-marker.",
    ),
    "double_bos": (
        Level.WRONG,
        "Two beginning-of-sequence tokens",
        "Rows start with the token twice, but at inference the model sees it once. Remove it from rows or template.",
    ),
    "cut_answer": (
        Level.LOSS,
        "Answers cut by max_length",
        "Their end, stop token included, is never trained. Raise max_length, or use overlong=drop or split.",
    ),
    "regions_unknown": (
        Level.WRONG,
        "Regions not certain",
        "It is uncertain which message each token belongs to, so only all_tokens can serve these rows.",
    ),
}
_INFORMATIVE = {Note.EOS_APPENDED, Note.STOP_APPENDED, Note.ARROW_NULLS, Note.ARGUMENTS_PARSED, Note.ARGUMENTS_DUMPED}


def advice(stats: Stats, settings: ViewSettings | None = None) -> list[Advice]:
    """All warnings, most severe first."""
    found = [
        Advice(level, title, text, stats.flags[name].rows, stats.flags[name].first, name)
        for name, (level, title, text) in _FLAGS.items()
        if name in stats.flags
    ]
    if stats.rows_with_unknown_regions and "regions_unknown" not in stats.flags:
        level, title, text = _FLAGS["regions_unknown"]
        found.append(Advice(level, title, f"{text} They are dropped.", stats.rows_with_unknown_regions))
    found += _of_loss(stats, settings or ViewSettings())
    for note, count in stats.build.get("notes", {}).items():
        level = Level.NOTE if note in _INFORMATIVE else Level.WRONG
        found.append(Advice(level, f"Prepared: {note.replace('_', ' ')}", f"{describe_note(note, count)}.", count))
    order = list(Level)
    return sorted(found, key=lambda one: (order.index(one.level), -one.rows))


def _of_loss(stats: Stats, settings: ViewSettings) -> list[Advice]:
    found = []
    if stats.untrained.rows:
        text = (
            f"train_on={settings.train_on} trains none of their tokens, so they are not served: "
            "they have no such message, or it has the weight 0."
        )
        found.append(Advice(Level.LOSS, "Rows with nothing trained", text, *stats.untrained, "nothing_trained"))
    if stats.beyond.rows:
        text = (
            f"All of their trained tokens are beyond max_length={settings.max_length}, so they are not served. "
            "Raise max_length, or use overlong=truncate_left."
        )
        found.append(Advice(Level.LOSS, "Answers beyond max_length", text, *stats.beyond, "nothing_trained"))
    rejected = stats.build.get("rejected", {})
    if rejected:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in rejected.items())
        text = f"{reasons}. `penstock prepare` names them by file and line."
        found.append(Advice(Level.LOSS, "Rows rejected", text, sum(rejected.values())))
    if stats.duplicate_rows:
        text = "They repeat the content of an earlier row, which therefore counts more than once."
        first = tuple(one.row for one in stats.copies)
        found.append(Advice(Level.LOSS, "Duplicate rows", text, stats.duplicate_rows, first, "duplicate"))
    lost = stats.ledger.truncated / stats.ledger.tokens if stats.ledger.tokens else 0.0
    if lost > _MUCH_LOST:
        longer = next((one.sequences for one in stats.limits if one.max_length == settings.max_length), 0)
        text = f"{lost:.1%} of all tokens are beyond max_length={settings.max_length}."
        found.append(Advice(Level.LOSS, "Tokens truncated", text, longer, (), "overlong"))
    return found
