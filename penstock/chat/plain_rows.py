"""Rows of usual messages, decoded straight into what stencils need.

The bytes of rows enter; for each row its messages and tools leave, or None: the row has more to it (reasoning, a system
prompt beside the messages, control characters, an error), and is to be read by `rows`. What is decoded here would have
been read equally there, but for messages that say nothing and should: these the draft lets go.
Keys that the template never reads are let pass; weights are told apart. Rows of words and calls alone are read by
`native`, others by a decoder that checks types and names as it parses, which costs less than parsing into dicts: some
3 µs a KB, 2 µs by `native`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.chat.conversation import ROLE_OF_NAME, Message
from penstock.chat.formats import INVERSE_WEIGHT_KEY, ROLES, Format, Mapping
from penstock.chat.formats_columns import ChatColumns
from penstock.chat.locality import Locality
from penstock.native import Layout, Native, native

Plain = Any  # `messages`, each with `role` (as the row names it), `content`, `tool_calls` (UNSET: none); and `tools`
Weights = tuple[float | None, ...]  # one per message
_AT_ONCE: Final = 64  # rows
_MOST_COLUMNS: Final = 200
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*?)`( - at .*)?", re.DOTALL)
_UNFIT: Final = re.compile(r'["\\\x00-\x1f]')  # no key that the decoder knows has one of these
_BESIDE: Final = ("tool_call_id", "name", "id")  # of a message: for few templates to read
_DOUBTFUL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\ud800-\udfff]")
_REFUSALS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MASKED: Final = bool | Literal[0, 1] | UnsetType | None
_WEIGHT: Final = bool | Annotated[float, Meta(ge=0, le=1e300)] | UnsetType | None
_role_of = attrgetter("role")


class Function(Struct, forbid_unknown_fields=True, gc=False):
    """What a tool call calls."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] | str


class Call(Struct, forbid_unknown_fields=True, gc=False):
    """A tool call in the usual form."""

    type: Literal["function"]
    function: Function
    id: str | UnsetType | None = UNSET

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "function": function}


def as_message(message: Any, role: str) -> Message:
    """One of these messages, as all other stages know them."""
    calls = message.tool_calls
    if calls is UNSET:
        return {"role": role, "content": message.content}
    return {"role": role, "content": message.content, "tool_calls": [call.as_json() for call in calls]}


class Odd(NamedTuple):
    """A message that is more, or less, than words."""

    role: str
    content: str | None
    tool_calls: list[Call] | UnsetType


class Flat(NamedTuple):
    """Rows whose messages stand one after the other."""

    rows: list[int]
    counts: list[int]  # messages of each
    roles: bytes  # the number of each message's role among the names
    names: tuple[str, ...]
    words: list[bytes | None]
    odd: dict[int, Odd | None]  # by place; None: a message that can't be read


class Takes(Protocol):
    """What takes the rows that are plain."""

    def add_flat(self, flat: Flat) -> None: ...
    def add_plain(self, rows: Sequence[int], decoded: Sequence[Plain]) -> None: ...


class PlainRows:
    """Decodes rows as a mapping says, for a local template; rows with tools too, if that template is to render them."""

    def __init__(self, mapping: Mapping, locality: Locality, *, tools: bool = True) -> None:
        self.roles = {name: role for name, role in (dict(mapping.roles) or ROLES).items() if role in ROLE_OF_NAME}
        self._answers = frozenset(name for name, role in self.roles.items() if role == "assistant")
        self._messages = dict(mapping.columns)["messages"]
        self._tools = dict(mapping.columns).get("tools", "") if tools and locality.tools else ""
        self._known = {self._messages, self._tools} - {""}
        self._others = ChatColumns(mapping).names - self._known
        names = {"role": mapping.role_key or "role", "content": mapping.content_key or "content"}
        calls = Annotated[list[Call], Meta(min_length=1)] if locality.calls else UnsetType
        fields: list[Any] = [("role", Literal[tuple(self.roles)]), ("content", str | None)]
        fields.append(("tool_calls", calls | UnsetType, UNSET))
        ignored = set(_BESIDE) - locality.read - set(mapping.weight_keys) - set(names.values())
        fields += [(name, str | UnsetType | None, UNSET) for name in sorted(ignored)]
        self._fields, self._names = fields, names
        keys = set(mapping.weight_keys) - set(names.values()) - locality.read
        self._weights = {f"weight_{number}": key for number, key in enumerate(sorted(keys))}
        self._columns: list[str] = []
        self._role_names = tuple(sorted(self.roles, key=lambda name: name not in self._answers))
        self._layout = Layout(
            messages=self._messages.encode(),
            role=names["role"].encode(),
            content=names["content"].encode(),
            calls=b"tool_calls" if locality.calls else b"",
            ignored=_encoded(sorted(ignored)),
            columns=(),
            roles=_encoded(self._role_names),
            answers=len(self._answers),
        )
        self._decode_calls = msgspec.json.Decoder(calls).decode
        self._learn(())

    @staticmethod
    def can_read(mapping: Mapping) -> bool:
        """Whether rows of this mapping are messages that can be read so."""
        keys = (*dict(mapping.columns).values(), mapping.role_key, mapping.content_key, *mapping.weight_keys)
        return mapping.format in (Format.MESSAGES, Format.SHAREGPT) and not any(map(_UNFIT.search, filter(None, keys)))

    def _learn(self, columns: Iterable[str]) -> bool:
        """Let rows have these columns besides their messages: they are parsed, since they might be broken."""
        new = set(columns) - {*self._known, *self._columns}
        if not new.isdisjoint(self._others) or len(self._columns) + len(new) > _MOST_COLUMNS:
            return False
        if any(map(_UNFIT.search, new)):
            return False
        self._columns += sorted(new)
        types = {name: _MASKED if key == INVERSE_WEIGHT_KEY else _WEIGHT for name, key in self._weights.items()}
        weights = [(name, kind, UNSET) for name, kind in types.items()]
        self._layout = self._layout._replace(columns=_encoded(self._columns))
        self._decode = self._decoder(_struct("Message", self._fields, self._names))
        self._decode_weighted = self._decoder(
            _struct("WeightedMessage", self._fields + weights, {**self._names, **self._weights})
        )
        return True

    def _decoder(self, message: type[Struct]) -> Callable[[bytes], Any]:
        columns = {f"column_{number}": column for number, column in enumerate(self._columns)}
        fields: list[Any] = [("messages", list[message])]  # type: ignore[valid-type]
        fields += [(name, Any, None) for name in columns]
        keys = {"messages": self._messages, **columns}
        if not self._tools:
            return msgspec.json.Decoder(_struct("Row", fields, keys, {"tools": None})).decode
        fields.append(("tools", list[dict[str, Any]] | None, None))
        return msgspec.json.Decoder(_struct("Row", fields, {**keys, "tools": self._tools})).decode

    def read(
        self, rows: list[bytes], escaped: Container[int], others: Container[int], draft: Takes
    ) -> dict[int, Weights]:
        """Give a draft all rows that are plain and not among the others. `escaped` have escapes such as \\u0007. The
        answer are the weights of rows that give some."""
        numbers: Sequence[int] = range(len(rows))
        if native is not None:
            flat = self._flat(native, rows, others)
            draft.add_flat(flat)
            numbers = sorted(set(numbers).difference(flat.rows))
        found: dict[int, Weights] = {}
        for start in range(0, len(numbers), _AT_ONCE):  # few, so that they stay in the processor's caches
            some = numbers[start : start + _AT_ONCE]
            decoded, weights = self._decoded([rows[number] for number in some])
            kept = [
                place
                for place, row in enumerate(decoded)
                if row is not None
                and not self._answers.isdisjoint(map(_role_of, reversed(row.messages)))
                and some[place] not in others
                and not (some[place] in escaped and _is_doubtful(row))
            ]
            found |= {some[place]: weights[place] for place in kept if place in weights}
            draft.add_plain([some[place] for place in kept], [decoded[place] for place in kept])
        return found

    def _flat(self, native: Native, rows: list[bytes], others: Container[int]) -> Flat:
        """The rows that are read by what is compiled."""
        left = bytes(number in others for number in range(len(rows)))
        found, counts, roles, words, odd = native.read(rows, left, self._layout)
        names = self._role_names
        return Flat(
            found, counts, roles, names, words, {k: self._odd(names[roles[k]], words[k], calls) for k, calls in odd}
        )

    def _odd(self, role: str, content: bytes | None, calls: bytes | None) -> Odd | None:
        try:
            given = UNSET if calls is None else self._decode_calls(calls)
        except _REFUSALS:
            return None
        return Odd(role, None if content is None else content.decode(), given)

    def _decoded(self, rows: Sequence[bytes]) -> tuple[list[Plain | None], dict[int, Weights]]:
        """What each row holds, None where it can't be read so; and the weights of rows that give some."""
        decoded: list[Plain | None] = []
        weights: dict[int, Weights] = {}
        left = iter(rows)
        while len(decoded) < len(rows):
            try:
                decoded.extend(map(self._decode, left))
            except _REFUSALS as error:  # of the row that comes now: those before it are in the list
                number = len(decoded)
                row, given = self._read_again(rows[number], error)
                decoded.append(row)
                if given:
                    weights[number] = given
        return decoded, weights

    def _read_again(self, row: bytes, error: Exception) -> tuple[Plain | None, Weights]:
        """A row that was refused; if for weights, or columns that were not known and now are, it may be read."""
        weighted = False
        for _ in range(2):  # it may be for both
            unknown = _UNKNOWN.fullmatch(str(error))
            if unknown is None:
                break
            key, inside = unknown.groups()
            if inside:
                weighted = key in self._weights.values()
            if not (weighted if inside else self._is_new(row)):
                break
            try:
                if weighted:
                    return self._weighed(self._decode_weighted(row))
                return self._decode(row), ()
            except _REFUSALS as another:
                error = another
        return None, ()

    def _weighed(self, row: Plain) -> tuple[Plain | None, Weights]:
        """A row and what its messages weigh; nothing where one has two weights, which may not agree."""
        weights: list[float | None] = []
        for message in row.messages:
            values = [(key, getattr(message, name)) for name, key in self._weights.items()]
            given = [(key, value) for key, value in values if value is not UNSET and value is not None]
            if len(given) > 1:
                return None, ()
            weights += [1.0 - value if key == INVERSE_WEIGHT_KEY else float(value) for key, value in given] or [None]
        return row, tuple(weights) if any(weight is not None for weight in weights) else ()

    def _is_new(self, row: bytes) -> bool:
        """Whether a row has columns that were not known, and now are."""
        try:
            columns = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        except _REFUSALS:
            return False
        return not set(columns) <= {*self._known, *self._columns} and self._learn(columns)


def _encoded(names: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(name.encode() for name in names)


def _struct(
    name: str, fields: list[Any], keys: dict[str, str], constants: dict[str, Any] | None = None
) -> type[Struct]:
    """A type of objects that have these fields, under other keys, and no more; and the same constants each."""
    return msgspec.defstruct(name, fields, rename=keys, forbid_unknown_fields=True, gc=False, namespace=constants)


def _is_doubtful(row: Plain) -> bool:
    return bool(row.tools) or any(
        message.tool_calls is not UNSET or _DOUBTFUL.search(message.content or "") for message in row.messages
    )
