"""Notes on rows that were kept: counted by name in the ledger, and reported with a remedy.

Stages record row numbers under a `Note`, whose value is its name in the ledger and never changes. To add a note, define
it here with its remedy, record it in every engine, and add a line to `docs/notes.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from penstock.arrays import Int64  # a hit of the cache loads no numpy


class Note(StrEnum):
    """The kinds of notes, by their names in the ledger."""

    TOOLS_DROPPED = "tools_dropped"
    DOCUMENTS_DROPPED = "documents_dropped"
    CALLS_DROPPED = "tool_calls_dropped"
    REASONING_DROPPED = "reasoning_dropped"
    CONTENT_DROPPED = "content_dropped"
    SYSTEM_DROPPED = "system_dropped"
    MESSAGE_DROPPED = "message_dropped"
    NAME_DROPPED = "name_dropped"
    KEY_UNUSED = "message_key_unused"
    LABEL_FALSE = "label_false"
    COLUMN_UNUSED = "column_unused"
    SIDES_EQUAL = "sides_equal"
    ARGUMENTS_PARSED = "arguments_parsed"
    ARGUMENTS_DUMPED = "arguments_dumped"
    SPECIAL_TEXT = "special_tokens_in_text"
    EOS_APPENDED = "eos_appended"
    NO_EOS = "no_eos"
    NO_STOP = "no_stop"
    STOP_APPENDED = "stop_appended"
    HEADER_UNKNOWN = "header_unknown"
    SPAN_UNOWNED = "span_unowned"
    PROMPT_DIFFERS = "prompt_differs"
    TRAILING_MESSAGES = "trailing_messages"
    TURN_REFUSED = "turn_refused"
    TURN_UNSETTLED = "turn_unsettled"
    TURN_STRADDLES = "turn_straddles"
    ARROW_NULLS = "arrow_nulls_dropped"


LOSSES = (  # the model neither sees nor learns some part of the row; `--on-dropped error` refuses them
    Note.TOOLS_DROPPED,
    Note.DOCUMENTS_DROPPED,
    Note.CALLS_DROPPED,
    Note.REASONING_DROPPED,
    Note.CONTENT_DROPPED,
    Note.SYSTEM_DROPPED,
    Note.MESSAGE_DROPPED,
    Note.NAME_DROPPED,
    Note.KEY_UNUSED,
    Note.LABEL_FALSE,
    Note.COLUMN_UNUSED,
)

_DESCRIPTIONS = {
    Note.TOOLS_DROPPED: ("the template never shows the tools", "use one that prints them (--template)"),
    Note.DOCUMENTS_DROPPED: ("the template never shows the documents", "use one that prints them (--template)"),
    Note.CALLS_DROPPED: ("the template drops tool calls", "use one that prints them (--template)"),
    Note.REASONING_DROPPED: (
        "the template drops reasoning, which is not trained on",
        "use one that prints it (--template); if it drops only that of earlier turns, --turns faithful trains it",
    ),
    Note.CONTENT_DROPPED: ("the template drops an answer, or a part of one", "use one that prints it (--template)"),
    Note.SYSTEM_DROPPED: ("the template drops the system prompt", "use one that prints it (--template)"),
    Note.MESSAGE_DROPPED: (
        "the template drops a message of another role",
        "use one that prints it (--template), or rename its role (--role developer=system)",
    ),
    Note.NAME_DROPPED: (
        "the template drops the name of a speaker",
        "use one that prints it (--template), or put it into the content",
    ),
    Note.KEY_UNUSED: (
        "a message has text under a key that the template does not use",
        "rename it (reasoning is read from `reasoning_content`), put it into the content, or remove it",
    ),
    Note.LABEL_FALSE: (
        "the column 'label' is false or 0, as for bad answers in KTO data, and is not used",
        "remove these rows, or train on the labels with --format kto",
    ),
    Note.COLUMN_UNUSED: (
        "a column that looks meant is not used",
        "name it (--messages-key, --tools-key, --system-key, --variables-key), put weights and reasoning into the "
        "messages and documents into chat_template_kwargs, or remove it",
    ),
    Note.SIDES_EQUAL: ("both sides of a pair have the same tokens, so it teaches nothing", "remove these rows"),
    Note.ARGUMENTS_PARSED: (
        "tool arguments given as JSON strings were parsed because the template expects objects",
        "--arguments as_given leaves them unchanged",
    ),
    Note.ARGUMENTS_DUMPED: (
        "tool arguments given as objects were written as JSON strings because the template expects strings",
        "--arguments as_given leaves them unchanged",
    ),
    Note.SPECIAL_TEXT: (
        "messages contain special tokens",
        "--special-tokens-in-text reject refuses them",
    ),
    Note.EOS_APPENDED: ("the end-of-sequence token was appended to plain text", "--eos never leaves it out"),
    Note.NO_EOS: (
        "plain text ends without an end-of-sequence token, since the tokenizer names none",
        "put the model's tokenizer_config.json beside it",
    ),
    Note.NO_STOP: ("an answer ends without a stop token", "see --stop next_marker and --stop append"),
    Note.STOP_APPENDED: (
        "the stop token that inference would see was appended to the last answer",
        "--stop next_marker leaves it out",
    ),
    Note.HEADER_UNKNOWN: (
        "the start of an answer is not certain, so regions are unknown",
        "use another template, or leave the rows out of views (regions_unknown='drop')",
    ),
    Note.SPAN_UNOWNED: (
        "a {% generation %} block has text of no message, so regions are unknown",
        "use --regions structure, or leave the rows out of views (regions_unknown='drop')",
    ),
    Note.PROMPT_DIFFERS: (
        "an answer is trained after a prompt that inference never shows, often for lack of a <think> block",
        "--turns faithful trains conversations, though not pairs, after the prompt of inference; or set the template "
        "variables that print the same for both (enable_thinking)",
    ),
    Note.TRAILING_MESSAGES: (
        "messages after the last answer rewrite it, and are left out",
        "end conversations with an answer",
    ),
    Note.TURN_REFUSED: (
        "the template refuses what comes before an answer; the answer is not trained",
        "begin conversations with a question",
    ),
    Note.TURN_UNSETTLED: (
        "the server's prompt ends in a block that an answer does not continue; the answer is not trained",
        "set the template variables that print the same prompt as the answer (enable_thinking)",
    ),
    Note.TURN_STRADDLES: (
        "an answer's first token would absorb the end of the server's prompt; the answer is not trained",
        "strip the answers",
    ),
    Note.ARROW_NULLS: ("null fields of structs, which Arrow adds, were dropped", "write JSON lines to keep them"),
}

_REASONING_WORDS = ("reasoning", "think", "thought")  # in templates that print reasoning

NotedRows: TypeAlias = Mapping[Note, "Int64"]  # note -> sorted, unique row numbers


def describe_note(note: str, count: int, recipe: Mapping[str, Any] | None = None) -> str:
    """Describes a note in one line of the summary. Unknown notes, of another version, are shown by name."""
    unit = "field" if note == Note.ARROW_NULLS else "row"
    what = "; ".join(_described(Note(note), recipe)) if note in set(Note) else note
    return f"{count:,} {unit if count == 1 else unit + 's'}: {what}"


def reason_and_remedy(note: Note, recipe: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Returns the reason and the remedy of an error for a row with this note."""
    what, remedy = _described(note, recipe)
    return what, remedy[0].upper() + remedy[1:]


def _described(note: Note, recipe: Mapping[str, Any] | None) -> tuple[str, str]:
    """What happened and the remedy, which may depend on how the dataset was prepared.

    Faithful turns help only where the template prints some reasoning, and it prints none that it never mentions.
    """
    what, remedy = _DESCRIPTIONS[note]
    if note is Note.REASONING_DROPPED and recipe is not None:
        prints = any(word in text for text in recipe["templates"].values() for word in _REASONING_WORDS)
        is_pair = recipe["mapping"]["format"] == "preference"
        if recipe.get("turns") == "faithful" or is_pair or not prints:
            remedy = "use one that prints it (--template)"
    return what, remedy


def joined_notes(*parts: NotedRows) -> NotedRows:
    """Merges the notes of parts of a batch that share their row numbers."""
    found: dict[Note, list[Int64]] = {}
    for part in parts:
        for note, rows in part.items():
            if len(rows):
                found.setdefault(note, []).append(rows)
    import numpy as np

    return {note: np.unique(np.concatenate(rows)) for note, rows in found.items()}


def rows_to_runs(rows: Int64) -> list[int]:
    """Encodes sorted numbers as starts and ends of runs: [2, 3, 4, 9] becomes [2, 5, 9, 10]."""
    import numpy as np

    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.concatenate(([0], breaks))] if len(rows) else rows
    ends = rows[np.concatenate((breaks - 1, [len(rows) - 1]))] + 1 if len(rows) else rows
    return np.stack((starts, ends), axis=1).reshape(-1).tolist()


def runs_to_rows(runs: list[int]) -> Int64:
    """Decodes the numbers that `rows_to_runs` encoded."""
    import numpy as np

    return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in zip(runs[::2], runs[1::2], strict=True))])
