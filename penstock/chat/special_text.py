"""Finds special tokens and turn markers in the text of messages, before a template renders it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.chat.conversation import Conversation
from penstock.literals import Literals


class SpecialTextFinder:
    """Searches all strings of conversations, including keys, for a set of texts (the needles)."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and whitespace tokens (such as "\n") are ordinary text that templates also print.
        found = {content for content in contents if len(content) > 1 and not content.isspace()}
        self.needles = sorted(found, key=lambda content: (-len(content.encode()), content))
        self._literals = Literals(found)

    def first(self, conversation: Conversation) -> str | None:
        """Returns the first needle in a conversation's text, or None."""
        if not self._literals:
            return None
        values = [conversation.messages, conversation.tools, [text for _, text in conversation.pieces or ()]]
        found = (text[slice(*span)] for text in _strings(values) if (span := self._literals.find(text)))
        return next(found, None)


def _strings(value: Any) -> Iterator[str]:
    """Yields all strings in a JSON value in order; iteratively, because rows may be nested deeply."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            for key, own in reversed(item.items()):
                todo += (own, key)
        elif isinstance(item, list | tuple):
            todo += reversed(item)
