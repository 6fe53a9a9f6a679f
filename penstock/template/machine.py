"""The fast engine: a template compiled for the C machine, which renders rows straight from their JSON.

A `Machine` reads either raw rows, as a column mapping describes them (doing the work of `penstock.chat`, including
adaptation to the template), or conversations that have already been read in Python. It renders exact bytes or gives
up; a row that it gives up on goes to the reference, with the reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from jinja2 import nodes

from penstock.chat.adapt_probes import Needs
from penstock.chat.conversation import Conversation
from penstock.chat.extra_columns import RESERVED_VARIABLES
from penstock.chat.formats import INVERSE_WEIGHT_KEY, MEDIA_COLUMNS, ROLES, Format
from penstock.chat.formats import Mapping as ColumnMapping
from penstock.native import RenderedBatch, native
from penstock.template.compile.bytecode import NotCompiled
from penstock.template.compile.compiler import Compiler
from penstock.template.flags import used_keys

_CONVERSATION, _MESSAGES, _ANSWER = range(3)
_READINGS = {
    Format.MESSAGES: _MESSAGES,
    Format.SHAREGPT: _MESSAGES,
    Format.ALPACA: _ANSWER,
    Format.QUERY_RESPONSE: _ANSWER,
}
_COLUMNS = ("messages", "tools", "system", "variables", "query", "input", "response", "history")


class Machine:
    """One template and one way to read rows. Raises `NotCompiled` if the machine can't render the template exactly."""

    def __init__(
        self,
        tree: nodes.Template,
        variables: Mapping[str, Any],
        date: datetime.date,
        layout: Mapping[str, Any],
    ) -> None:
        if native is None:
            raise NotCompiled("Penstock was installed without a compiler")
        now = datetime.datetime(date.year, date.month, date.day)
        assembled = Compiler(variables, now.strftime).compile(tree).assemble()
        try:
            self._program = native.Program(*assembled, {**layout, "used_keys": used_keys(tree)})
        except ValueError as error:
            raise NotCompiled(str(error)) from None

    def render(self, rows: list[bytes]) -> RenderedBatch:
        """Render rows, or conversations serialized by `encoded`."""
        return RenderedBatch(*self._program.render(rows))

    def render_turns(self, rows: list[bytes]) -> RenderedBatch:
        """Render rows, and also every assistant turn as inference sees it."""
        return RenderedBatch(*self._program.render_turns(rows))

    def forget(self) -> None:
        """Mark every branch as not taken yet."""
        self._program.forget()

    @property
    def paths(self) -> tuple[int, int]:
        """How many branch directions of the template have been taken, and how many there are."""
        return self._program.branches()


def encoded(conversation: Conversation) -> bytes | None:
    """Serializes a conversation for a machine with `conversation_layout`; None if JSON can't represent it."""
    try:
        return orjson.dumps(
            {
                "messages": conversation.messages,
                "tools": conversation.tools,
                "variables": conversation.variables,
            }
        )
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return None


def can_read(mapping: ColumnMapping) -> bool:
    """Whether the machine can read rows of this format."""
    return mapping.format in _READINGS


def row_layout(mapping: ColumnMapping, needs: Needs, needles: Sequence[str]) -> dict[str, Any]:
    """The layout of raw rows: how a mapping reads them, and what the template needs."""
    columns = dict(mapping.columns)
    return {
        **_layout(_READINGS[mapping.format], needs, needles),
        **{name: columns.get(name, "") for name in _COLUMNS},
        "near": list(mapping.near_columns),
        "media": [name for name in MEDIA_COLUMNS if name not in columns.values()],
        "role_key": mapping.role_key or "role",
        "content_key": mapping.content_key or "content",
        "weight_keys": list(mapping.weight_keys),
        "roles": dict(mapping.roles) or dict(ROLES),
    }


def conversation_layout(needles: Sequence[str]) -> dict[str, Any]:
    """The layout of conversations that were read and adapted in Python."""
    return {
        **_layout(_CONVERSATION, Needs(), needles),
        **dict.fromkeys(_COLUMNS, ""),
        "near": [],
        "media": [],
        "role_key": "role",
        "content_key": "content",
        "weight_keys": [],
        "roles": {},
    }


def _layout(reading: int, needs: Needs, needles: Sequence[str]) -> dict[str, Any]:
    wanted = ("text_for_null", "text_for_missing", "no_part", "no_parts", "no_text")
    flags = (
        *("object_arguments", "string_arguments", "wrapped_calls", "typed_calls"),
        *("no_empty_calls", "null_with_calls", "wrapped_tools", "bare_tools"),
    )
    return {
        "reading": reading,
        "inverse_weight_key": INVERSE_WEIGHT_KEY,
        "needles": list(needles),
        "used_keys": {},  # the template decides them
        "reserved": list(RESERVED_VARIABLES),
        **{name: sorted(getattr(needs, name)) for name in wanted},
        **{name: getattr(needs, name) for name in flags},
    }
