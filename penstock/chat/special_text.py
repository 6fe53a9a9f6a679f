"""Special tokens and turn markers that stand in the text of messages, before any template has seen it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.chat.conversation import Conversation


class SpecialTextFinder:
    """Finds texts, the needles, in all strings of conversations: keys and values of messages and tools."""

    def __init__(self, contents: Iterable[str]) -> None:
        # One-character and white-space tokens (such as "\n") are ordinary text that templates print, too.
        found = {content for content in contents if len(content) > 1 and not content.isspace()}
        self.needles = sorted(found, key=lambda content: (-len(content.encode()), content))
        self._pattern = re.compile("|".join(map(re.escape, self.needles))) if found else None

    def first(self, conversation: Conversation) -> str | None:
        """The first needle in a conversation's text, if there is one."""
        if self._pattern is None:
            return None
        values = [conversation.messages, conversation.tools, [text for _, text in conversation.pieces or ()]]
        found = (match for text in _strings(values) if (match := self._pattern.search(text)))
        match = next(found, None)
        return match[0] if match else None


def _strings(value: Any) -> Iterator[str]:
    """All strings in a value made of JSON types, in order; iterative, since rows may be nested deeply."""
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
