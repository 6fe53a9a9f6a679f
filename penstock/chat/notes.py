"""Notes: what happened to rows that were kept all the same, counted by name in the ledger and told with a remedy.

A stage counts rows under a `Note`; the names are those of the ledger and never change. To note something new, add it
here with its remedy and count it where it happens, in every engine alike.
"""

from __future__ import annotations

from enum import StrEnum


class Note(StrEnum):
    """What is noted, as the ledger names it."""

    SPECIAL_TEXT = "special tokens in text"
    CALLS_DROPPED = "tool calls dropped by the template"
    CONTENT_DROPPED = "content_dropped"
    SYSTEM_DROPPED = "system_dropped"
    REASONING_DROPPED = "reasoning_dropped"
    LABEL_FALSE = "label_false"
    EOS_APPENDED = "eos_appended"
    NO_EOS = "no_eos"
    NO_STOP = "no_stop"
    HEADER_UNKNOWN = "header_unknown"
    SPAN_UNOWNED = "span_unowned"
    TRAILING_MESSAGES = "trailing_messages"
    TURN_REFUSED = "turn_refused"
    TURN_UNSETTLED = "turn_unsettled"
    TURN_STRADDLES = "turn_straddles"
    ARROW_NULLS = "arrow nulls dropped"


_TOLD = {
    Note.SPECIAL_TEXT: "special tokens stand in the text of messages; --special-tokens-in-text reject refuses them",
    Note.CALLS_DROPPED: "the template drops tool calls; use one that prints them (--template)",
    Note.CONTENT_DROPPED: "the template drops an answer; use one that prints it (--template)",
    Note.SYSTEM_DROPPED: "the template drops the system prompt; use one that prints it (--template)",
    Note.REASONING_DROPPED: "the template drops reasoning, which is not trained on; --turns faithful trains every "
    "answer in the context that inference shows, with its reasoning where the template prints it there",
    Note.LABEL_FALSE: "the column 'label' is false, as of bad answers in KTO data, and is not used; "
    "take these rows out, or train on pairs",
    Note.EOS_APPENDED: "the end-of-sequence token was appended to plain text; --eos never leaves it out",
    Note.NO_EOS: "plain text ends without an end-of-sequence token, since the tokenizer names none; "
    "put the model's tokenizer_config.json beside it",
    Note.NO_STOP: "an answer ends without a stop token; see --stop next-marker",
    Note.HEADER_UNKNOWN: "the start of an answer is not certain, so regions are unknown",
    Note.SPAN_UNOWNED: "a {% generation %} block has text of no message, so regions are unknown",
    Note.TRAILING_MESSAGES: "messages after the last answer rewrite it, and are left out",
    Note.TURN_REFUSED: "the template refuses what comes before the answer, so it is context and not trained",
    Note.TURN_UNSETTLED: "the server's prompt ends in a block that the answer does not continue, so the answer is "
    "context and not trained; give template variables that print the same prompt as the answer (enable_thinking)",
    Note.TURN_STRADDLES: "the answer's first token would take in the end of the server's prompt, so the answer is "
    "context and not trained",
    Note.ARROW_NULLS: "null fields of structs, which Arrow adds, were dropped",
}


_OF_TURNS = (Note.TURN_REFUSED, Note.TURN_UNSETTLED, Note.TURN_STRADDLES)


def told(note: str, count: int) -> str:
    """One line for the summary; a note of another version by its name alone."""
    unit = "fields" if note == Note.ARROW_NULLS else "turn" if note in _OF_TURNS else "row"
    unit = f"{unit}s" if count != 1 and unit != "fields" else unit
    return f"{count:,} {unit}: {_TOLD[Note(note)] if note in set(Note) else note}"
