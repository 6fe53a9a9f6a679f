"""The row formats: `detect` finds the format of sample rows, and returns the `ColumnMapping` that reads every row.

If several formats fit, the order of `Format` decides; options narrow the choice to the formats that have such a column.
If none fits, the error lists the existing columns, what each format needs, and the nearest names. A column counts if
some sample row has a value other than null in it. Detection costs microseconds.

`ColumnMapping` holds everything that columns and role names decide; it is part of the recipe as `as_json()`. Optional
columns (tools, system, …) are in it whether or not the sample rows have them, so that later rows that have them are
read the same way. `rows` reads rows with a mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from enum import StrEnum
from typing import Any, Self

from penstock.errors import SourceError, UsageError
from penstock.options import option

COLUMNS = "Columns and keys of a row"  # a panel of the help

CALLS = "tool_calls"  # as a role's target: an assistant message whose text is the JSON of its tool calls

LABEL_COLUMN = "label"  # KTO: false marks an undesirable answer
NEAR_COLUMNS = (  # names close to columns that are read; rows that have them are noted if the mapping doesn't use them
    *("message", "messages", "conversation", "conversations"),
    *("tool", "function", "functions", "available_tools", "tool_definitions"),
    *("documents", "system_prompt", "system_message", "template_kwargs", "template_vars", "chat_template_args"),
    *("weight", "weights", "loss_weight", "loss_weights", "loss_mask", "spans", "train_detail"),
    *("reasoning", "reasoning_content", "thinking", "chain_of_thought"),
)
MEDIA_COLUMNS = ("image", "images", "videos", "audios")  # refused if they have a value
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # the first that is not null counts
WEIGHT_KEYS = ("weight", "train", "trainable", "masked", "loss", "loss_scale", "loss_weight")
INVERSE_WEIGHT_KEY = "masked"  # true means: not trained

ROLES: dict[str, str] = {name: name for name in ("system", "user", "assistant", "tool", "developer")}
SHAREGPT_ROLES: dict[str, str] = {
    **ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": CALLS,
    "tool_call": CALLS,
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}


class Format(StrEnum):
    """How a row represents its conversation, in the order of preference if several fit."""

    PREFERENCE = "preference"
    KTO = "kto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"
    QUERY_RESPONSE = "query_response"
    TEXT = "text"


def label_of(value: object) -> bool | None:
    """Reads a label as a boolean; None if it is neither. CSV and other tables hold it as text or as a number."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if type(value) in (bool, int, float) and value in (0, 1) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """Options that describe the rows. None means that it is detected from the columns."""

    format: str = option("Row format: auto, " + ", ".join(Format), "auto", choices=("auto", *Format))
    messages_key: str | None = option("Column with the list of messages", panel=COLUMNS)
    tools_key: str | None = option("Column with the tools", panel=COLUMNS)
    system_key: str | None = option("Column with the system prompt", panel=COLUMNS)
    variables_key: str | None = option("Column with the row's own template variables", panel=COLUMNS)
    text_key: str | None = option("Column with plain text", panel=COLUMNS)
    prompt_key: str | None = option("Column with the prompt: a string or a list of messages", panel=COLUMNS)
    completion_key: str | None = option("Column with the completion: a string or a list of messages", panel=COLUMNS)
    chosen_key: str | None = option("Column with the preferred answer", panel=COLUMNS)
    rejected_key: str | None = option("Column with the other answer", panel=COLUMNS)
    label_key: str | None = option("Column that says whether an answer is a good one (KTO)", panel=COLUMNS)
    query_key: str | None = option("Column with the question or instruction", panel=COLUMNS)
    input_key: str | None = option("Column with the instruction's input, appended after a blank line", panel=COLUMNS)
    response_key: str | None = option("Column with the answer", panel=COLUMNS)
    history_key: str | None = option("Column with earlier [question, answer] pairs", panel=COLUMNS)
    role_key: str | None = option("Key of the role in a message", panel=COLUMNS)
    content_key: str | None = option("Key of the content in a message", panel=COLUMNS)
    weight_keys: tuple[str, ...] = option(
        "Key of a message that holds its weight in the loss", WEIGHT_KEYS, flag="weight-key", panel=COLUMNS
    )
    roles: Mapping[str, str] = option(
        "What a role name means, for example bot=assistant", {}, flag="role", panel=COLUMNS
    )

    def column(self, purpose: str) -> str | None:
        """Returns the column that the user named for a purpose."""
        value: str | None = getattr(self, f"{purpose}_key")
        return value


@dataclass(frozen=True, slots=True)
class ColumnMapping:
    """The columns and keys that form a conversation. Equal mappings read every row in the same way."""

    format: Format
    columns: tuple[tuple[str, str], ...]  # purpose, column; sorted
    role_key: str = ""  # this and the next three are empty if the format has no messages
    content_key: str = ""
    roles: tuple[tuple[str, str], ...] = ()  # name in the row, role for the template; sorted
    weight_keys: tuple[str, ...] = ()
    seen: tuple[str, ...] = field(default=(), compare=False)  # used columns in the sample rows, for display only
    unused: tuple[str, ...] = field(default=(), compare=False)
    renamed: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def column(self, purpose: str) -> str | None:
        """Returns the column for a purpose, if the format has it."""
        return dict(self.columns).get(purpose)

    @property
    def near_columns(self) -> tuple[str, ...]:
        """Columns with a name close to one that is read, but that aren't used."""
        used = dict(self.columns).values()
        first = 4 if self.format is Format.PREFERENCE else 0  # pairs often carry a conversation of their own
        return tuple(name for name in NEAR_COLUMNS[first:] if name not in used)

    @property
    def read_columns(self) -> frozenset[str]:
        """Every column whose value is read."""
        return frozenset((*dict(self.columns).values(), *MEDIA_COLUMNS, LABEL_COLUMN, *self.near_columns))

    def as_json(self) -> dict[str, Any]:
        """Returns exactly what decides how rows are read: the mapping's part of the recipe."""
        return {
            "format": self.format.value,
            "columns": dict(self.columns),
            "role_key": self.role_key,
            "content_key": self.content_key,
            "roles": dict(self.roles),
            "weight_keys": list(self.weight_keys),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Reads a mapping that `as_json` wrote."""
        return cls(
            format=Format(value["format"]),
            columns=tuple(sorted(value["columns"].items())),
            role_key=value["role_key"],
            content_key=value["content_key"],
            roles=tuple(sorted(value["roles"].items())),
            weight_keys=tuple(value["weight_keys"]),
        )

    def describe(self) -> str:
        """Describes the mapping in one line: `messages (columns: messages, tools; not used: label)`."""
        facts = [f"columns: {', '.join(self.seen or sorted(column for _, column in self.columns))}"]
        if self.renamed:
            facts.append("roles: " + ", ".join(f"{name}={role}" for name, role in self.renamed))
        if self.unused:
            facts.append("not used: " + ", ".join(self.unused))
        return f"{self.format.value} ({'; '.join(facts)})"


# -- detection ----------------------------------------------------------------------------------------------------

_MESSAGE_KEYS = (("role", "content"), ("from", "value"))
_LIST_COLUMNS = ("messages", "conversations", "conversation")
_CHAT = ("tools", "system", "variables")
_QUESTIONS = ("question", "instruction", "query", "problem", "prompt", "input")  # usual names, for an error's remedy
_ANSWERS = ("answer", "response", "output", "solution", "completion", "target")
_DEFAULT_COLUMNS: dict[str, tuple[str, ...]] = {
    "tools": ("tools",),
    "system": ("system",),
    "variables": ("chat_template_kwargs",),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "label": (LABEL_COLUMN,),
    "input": ("input",),
    "history": ("history",),
    "text": ("text",),
}


_OTHER_NAMES = {  # formats as other tools call them
    **dict.fromkeys(("chatml", "chat", "openai", "chat_template", "conversational", "conversation"), "messages"),
    **dict.fromkeys(("dpo", "pairs", "pairwise", "ranking"), "preference"),
    **dict.fromkeys(("instruction", "instruct"), "alpaca"),
    **dict.fromkeys(("completion", "input_output"), "prompt_completion"),
    **dict.fromkeys(("pretrain", "pretraining", "plain"), "text"),
}


@dataclass(frozen=True, slots=True)
class _Shape:
    """One variant of a format: required and optional columns, and their names."""

    format: Format
    needs: dict[str, tuple[str, ...]]  # purpose -> column names; the first one that exists is used
    may_have: tuple[str, ...]
    message_keys: tuple[str, str] | None = None  # required keys of its messages, unless the user names others
    has_messages: bool = True


def _needs(*purposes: str) -> dict[str, tuple[str, ...]]:
    return {purpose: _DEFAULT_COLUMNS[purpose] for purpose in purposes}


_PAIR = _needs("chosen", "rejected")
_SHAPES = (
    _Shape(Format.PREFERENCE, _PAIR | _needs("prompt"), _CHAT),
    _Shape(Format.PREFERENCE, _PAIR | {"prompt": _LIST_COLUMNS}, _CHAT),
    _Shape(Format.PREFERENCE, _PAIR | {"query": ("instruction", "query", "question")}, (*_CHAT, "input", "history")),
    _Shape(Format.PREFERENCE, _PAIR, (*_CHAT, "prompt")),
    _Shape(Format.KTO, _needs("prompt", "completion", "label"), _CHAT),
    _Shape(Format.KTO, {"messages": _LIST_COLUMNS} | _needs("label"), _CHAT, _MESSAGE_KEYS[0]),
    _Shape(Format.KTO, {"messages": _LIST_COLUMNS} | _needs("label"), _CHAT, _MESSAGE_KEYS[1]),
    _Shape(Format.MESSAGES, {"messages": _LIST_COLUMNS}, _CHAT, _MESSAGE_KEYS[0]),
    _Shape(Format.SHAREGPT, {"messages": ("conversations", "conversation", "messages")}, _CHAT, _MESSAGE_KEYS[1]),
    _Shape(Format.PROMPT_COMPLETION, _needs("prompt", "completion"), _CHAT),
    _Shape(
        Format.ALPACA,
        {"query": ("instruction",), "response": ("output",)},
        (*_CHAT, "input", "history"),
        has_messages=False,
    ),
    _Shape(
        Format.QUERY_RESPONSE,
        {"query": ("query",), "response": ("response",)},
        (*_CHAT, "history"),
        has_messages=False,
    ),
    _Shape(Format.TEXT, _needs("text"), (), has_messages=False),
)


def detect(rows: Sequence[dict[str, Any]], options: FormatOptions | None = None) -> ColumnMapping:
    """Returns the mapping that fits the columns of sample rows."""
    options = options or FormatOptions()
    if not rows:
        raise SourceError("there are no rows, so their format can't be found. Check the files and the split.")
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    candidates = [shape for shape in _asked_for(options) if _admits(shape, options)]
    if not candidates:
        named = ", ".join(f"--{purpose}-key" for purpose in _named(options))
        raise UsageError(f"no row format has all the columns that {named} name. Formats: {_catalogue()}.")
    _check_named(rows, options)
    for shape in candidates:
        found = {purpose: _find(purpose, names, columns, options) for purpose, names in shape.needs.items()}
        if all(found.values()) and _messages_fit(shape, found, rows, options) and _labels_fit(shape, rows, options):
            return _mapping(shape, {p: c for p, c in found.items() if c}, columns, rows, options)
    raise SourceError(_no_fit(candidates, columns, rows, options))


def format_columns(options: FormatOptions) -> frozenset[str]:
    """Returns every column that any format reads; `detect` needs only the names of other columns."""
    usual = {name for shape in _SHAPES for names in shape.needs.values() for name in names}
    usual.update(name for names in _DEFAULT_COLUMNS.values() for name in names)
    return frozenset(
        {*usual, *MEDIA_COLUMNS, LABEL_COLUMN, *(options.column(purpose) or "" for purpose in _named(options))}
    )


def _asked_for(options: FormatOptions) -> list[_Shape]:
    if options.format == "auto":
        return list(_SHAPES)
    if options.format not in {f.value for f in Format}:
        named = _OTHER_NAMES.get(options.format.lower())
        near = named or get_close_matches(options.format, [f.value for f in Format], 1, 0)[0]
        expected = ", ".join(("auto", *Format))
        raise UsageError(f"--format {options.format!r} is unknown; expected {expected}. Nearest: {near}.")
    return [shape for shape in _SHAPES if shape.format == options.format]


def _named(options: FormatOptions) -> Iterator[str]:
    for purpose in (*_DEFAULT_COLUMNS, "messages", "query", "response"):
        if options.column(purpose) is not None:
            yield purpose


def _check_named(rows: Sequence[dict[str, Any]], options: FormatOptions) -> None:
    """Raises SourceError if a named column doesn't exist: a typo must not become a row without its tools."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for purpose in _named(options):
        name = options.column(purpose) or ""
        if name not in columns:
            near = get_close_matches(name, columns, 1)
            hint = f" Nearest: {near[0]}." if near else ""
            raise SourceError(
                f"--{purpose}-key: there is no column {name!r}. The columns are: {', '.join(columns)}.{hint}"
            )


def _admits(shape: _Shape, options: FormatOptions) -> bool:
    """Whether the format uses every column that the user named."""
    purposes = {*shape.needs, *shape.may_have}
    if shape.needs.get("prompt") == _LIST_COLUMNS:
        purposes.add("messages")  # an alternative name for the prompt of a preference row
    return purposes.issuperset(_named(options))


def _find(purpose: str, names: tuple[str, ...], columns: list[str], options: FormatOptions) -> str | None:
    if purpose == "prompt" and names == _LIST_COLUMNS:
        asked = options.messages_key or options.prompt_key
    else:
        asked = options.column(purpose)
    return next((name for name in ((asked,) if asked else names) if name in columns), None)


def _first_message(columns: list[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    for row in rows:
        for column in columns:
            value = row.get(column)
            message = value[0] if isinstance(value, list) and value else value
            if isinstance(message, dict):
                return message
    return None


def _keys_of(message: dict[str, Any], options: FormatOptions) -> tuple[str, str] | None:
    """Returns the keys of role and content: those of the options, or the first usual pair whose role key exists."""
    if options.role_key or options.content_key:
        return options.role_key or "role", options.content_key or "content"
    return next((keys for keys in _MESSAGE_KEYS if keys[0] in message), None)


def _messages_fit(
    shape: _Shape, found: dict[str, str | None], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> bool:
    """Whether the keys inside the messages are this format's, if only they distinguish formats."""
    if shape.message_keys is None or options.format != "auto":
        return True
    message = _first_message([found["messages"] or ""], rows)
    if message is None:
        return False
    keys = _keys_of(message, options)
    return keys is not None and (keys[0] == "from") == (shape.message_keys[0] == "from")


def _labels_fit(shape: _Shape, rows: Sequence[dict[str, Any]], options: FormatOptions) -> bool:
    """Whether the label column is one of KTO: every sample row has true or false there, or 1 or 0.

    Beside messages, 1 and 0 may as well be classes. A wrong guess would train bad answers as good ones, so the user
    is asked.
    """
    if "label" not in shape.needs or options.format != "auto" or options.label_key:
        return True
    labels = [row.get(LABEL_COLUMN) for row in rows]
    if any(label_of(label) is None for label in labels):
        return False
    if "messages" in shape.needs and any(type(label) in (int, float) for label in labels):
        assert shape.message_keys is not None
        plain = Format.SHAREGPT if shape.message_keys[0] == "from" else Format.MESSAGES
        raise SourceError(
            f"column {LABEL_COLUMN!r} holds only 1 and 0, which may mark good and bad answers (KTO) or be classes. Use "
            f"--format kto to train on them as labels, or --format {plain} to ignore them."
        )
    return True


def _mapping(
    shape: _Shape, found: dict[str, str], columns: list[str], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> ColumnMapping:
    mapped = dict(found)
    for purpose in shape.may_have:
        mapped[purpose] = options.column(purpose) or _DEFAULT_COLUMNS[purpose][0]
    seen = tuple(name for name in columns if name in mapped.values())
    unused = tuple(name for name in columns if name not in mapped.values())
    ordered = tuple(sorted(mapped.items()))
    if not shape.has_messages:
        return ColumnMapping(shape.format, ordered, seen=seen, unused=unused)
    message = _first_message(list(found.values()), rows)
    keys = (message and _keys_of(message, options)) or shape.message_keys or _keys_of({"role": ""}, options)
    assert keys is not None
    known = SHAREGPT_ROLES if shape.format is Format.SHAREGPT or keys[0] == "from" else ROLES
    return ColumnMapping(
        shape.format,
        ordered,
        role_key=keys[0],
        content_key=keys[1],
        roles=tuple(sorted({**known, **options.roles}.items())),
        weight_keys=tuple(options.weight_keys),
        seen=seen,
        unused=unused,
        renamed=tuple(sorted(options.roles.items())),
    )


def _catalogue() -> str:
    """Lists every format with the columns it needs."""
    lines: dict[str, dict[str, None]] = {}
    for shape in _SHAPES:
        needs = " + ".join("|".join(names) for names in shape.needs.values())
        lines.setdefault(shape.format.value, {})[needs] = None
    keys = {"messages": " of {role, content}", "sharegpt": " of {from, value}"}  # of the lists
    return "; ".join(f"{name} ({', or '.join(needs)}{keys.get(name, '')})" for name, needs in lines.items())


def _no_fit(
    candidates: list[_Shape], columns: list[str], rows: Sequence[dict[str, Any]], options: FormatOptions
) -> str:
    listed = [name for name in (options.messages_key, *_LIST_COLUMNS) if name in columns]
    message = _first_message(listed, rows)
    if message is not None and any(shape.message_keys for shape in candidates) and _keys_of(message, options) is None:
        return (
            f"the messages in column {listed[0]!r} have the keys {', '.join(message)}; expected role and content, or "
            "from and value. Name them with --role-key and --content-key."
        )
    asked = "no row format fits" if options.format == "auto" else f"format {options.format} does not fit"
    text = f"{asked} the columns {', '.join(columns) or '(none with a value)'}. Formats: {_catalogue()}."
    sides = [name for name in ("chosen", "rejected") if name in columns]
    if len(sides) == 1 and options.format in ("auto", Format.PREFERENCE):
        other = "rejected" if sides == ["chosen"] else "chosen"
        return (
            f"the rows have a column {sides[0]!r} but no {other!r} with a value, and a pair needs both. The columns "
            f"are: {', '.join(columns)}. Name the other side with --{other}-key; to train on one side alone, use "
            f"--prompt-key and --completion-key {sides[0]!r}."
        )
    for shape in candidates:
        for purpose, names in shape.needs.items():
            near = get_close_matches(names[0], columns, 1, 0.75)
            if near and near[0] not in names:
                flag = "messages" if names == _LIST_COLUMNS else purpose
                return f"{text} Column {near[0]!r} is near {names[0]!r}: name it with --{flag}-key {near[0]!r}."
    if listed and message is None:
        return f"{text} {_no_messages(listed[0], rows)}"
    if options.format != "auto":
        return text
    query, response = (next((n for n in names if n in columns), None) for names in (_QUESTIONS, _ANSWERS))
    if query and response:
        return f"{text} If these are questions and answers, say so: --query-key {query!r} --response-key {response!r}."
    lists = [c for c in columns if any(isinstance(v := r.get(c), list) and v and isinstance(v[0], dict) for r in rows)]
    nearest = lists or sorted(columns, key=lambda c: -max(_likeness(c, name) for name in _LIST_COLUMNS))[:1]
    return (
        f"{text} If {nearest[0]!r} holds the conversation, say so: --messages-key {nearest[0]!r}." if nearest else text
    )


def _no_messages(column: str, rows: Sequence[dict[str, Any]]) -> str:
    """Explains why a column that is named like a list of messages has none."""
    if not any(isinstance(row.get(column), str) for row in rows):
        return f"Column {column!r} has no messages in the first {len(rows)} rows."
    return (
        f"Column {column!r} holds strings, not lists of messages. If they are JSON, decode them first, for example "
        f"with jq -c '.{column} |= fromjson'."
    )


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one.lower(), other).ratio()
