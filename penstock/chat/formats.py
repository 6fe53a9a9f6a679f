"""The row formats: options of the user enter, the column mapping that reads every row leaves.

`Mapping` is all that a row's columns and role names decide; it goes into the recipe as `as_json()`. Optional
columns (tools, system, …) are in it whether or not the sample rows had them, so that a row that has them later
is read the same way. How a mapping is found is in `formats_detect`, how it reads rows in `rows`.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from penstock.options import option

COLUMNS = "Columns and keys of a row"  # a panel of the help

CALLS = "tool_calls"  # as a role's target: an assistant message whose text is the JSON of its tool calls

LABEL_COLUMN = "label"  # KTO's: false means that the answer is a bad one
NEAR_COLUMNS = (  # look meant; where the mapping does not use them, rows that have them are noted
    *("message", "messages", "conversation", "conversations"),
    *("tool", "function", "functions", "available_tools", "tool_definitions"),
    *("system_prompt", "system_message", "template_kwargs", "template_vars", "chat_template_args"),
    *("weight", "weights", "loss_weight", "loss_weights", "loss_mask"),
    *("reasoning", "reasoning_content", "thinking", "chain_of_thought"),
)
MEDIA_COLUMNS = ("image", "images", "videos", "audios")  # refused where they have a value
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
    """How a row says its conversation. In the order of preference where several fit."""

    PREFERENCE = "preference"
    KTO = "kto"
    MESSAGES = "messages"
    SHAREGPT = "sharegpt"
    PROMPT_COMPLETION = "prompt_completion"
    ALPACA = "alpaca"
    QUERY_RESPONSE = "query_response"
    TEXT = "text"


def label_of(value: object) -> bool | None:
    """What a label says; None where it says nothing. CSV and other tables have it as text or as a number."""
    if isinstance(value, str):
        return {"true": True, "1": True, "false": False, "0": False}.get(value.strip().lower())
    return bool(value) if type(value) in (bool, int) and value in (0, 1) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatOptions:
    """What the user may say about the rows. None: found from the columns."""

    format: str = option("Row format: auto, " + ", ".join(Format), "auto")
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
    roles: MappingABC[str, str] = option(
        "What a role name means, for example bot=assistant", {}, flag="role", panel=COLUMNS
    )

    def column(self, purpose: str) -> str | None:
        """The column that the user named for a purpose."""
        value: str | None = getattr(self, f"{purpose}_key")
        return value


@dataclass(frozen=True, slots=True)
class Mapping:
    """Which columns and keys make a conversation. Equal mappings read every row equally."""

    format: Format
    columns: tuple[tuple[str, str], ...]  # purpose, column; sorted
    role_key: str = ""  # these four are empty where the format has no messages
    content_key: str = ""
    roles: tuple[tuple[str, str], ...] = ()  # name in the row, role for the template; sorted
    weight_keys: tuple[str, ...] = ()
    seen: tuple[str, ...] = field(default=(), compare=False)  # of the sample rows, only to be shown
    unused: tuple[str, ...] = field(default=(), compare=False)
    renamed: tuple[tuple[str, str], ...] = field(default=(), compare=False)

    def column(self, purpose: str) -> str | None:
        """The column that serves a purpose, if the format has that purpose."""
        return dict(self.columns).get(purpose)

    @property
    def near_columns(self) -> tuple[str, ...]:
        """Columns that look meant and are not used."""
        used = dict(self.columns).values()
        first = 4 if self.format is Format.PREFERENCE else 0  # pairs often carry a conversation of their own
        return tuple(name for name in NEAR_COLUMNS[first:] if name not in used)

    @property
    def read_columns(self) -> frozenset[str]:
        """Every column whose value is looked at."""
        return frozenset((*dict(self.columns).values(), *MEDIA_COLUMNS, LABEL_COLUMN, *self.near_columns))

    def as_json(self) -> dict[str, Any]:
        """All that decides how rows are read, and nothing else: the mapping's part of the recipe."""
        return {
            "format": self.format.value,
            "columns": dict(self.columns),
            "role_key": self.role_key,
            "content_key": self.content_key,
            "roles": dict(self.roles),
            "weight_keys": list(self.weight_keys),
        }

    @classmethod
    def from_json(cls, value: MappingABC[str, Any]) -> Self:
        """The mapping that `as_json` wrote."""
        return cls(
            format=Format(value["format"]),
            columns=tuple(sorted(value["columns"].items())),
            role_key=value["role_key"],
            content_key=value["content_key"],
            roles=tuple(sorted(value["roles"].items())),
            weight_keys=tuple(value["weight_keys"]),
        )

    def describe(self) -> str:
        """One line for the user: `messages (columns: messages, tools; not used: label)`."""
        facts = [f"columns: {', '.join(self.seen or sorted(column for _, column in self.columns))}"]
        if self.renamed:
            facts.append("roles: " + ", ".join(f"{name}={role}" for name, role in self.renamed))
        if self.unused:
            facts.append("not used: " + ", ".join(self.unused))
        return f"{self.format.value} ({'; '.join(facts)})"
