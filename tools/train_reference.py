"""Generates the table of keys in docs/train.md from the options: `python -m tools.train_reference`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from penstock.train.config import SourceConfig, TrainConfig


def keys_table() -> str:
    """A Markdown table with one line per configuration key."""
    lines = ["| key | meaning | default |", "| --- | --- | --- |"]
    default = TrainConfig()
    for section in fields(TrainConfig):
        value = getattr(default, section.name)
        if is_dataclass(value):
            lines += [_line(f"{section.name}.{entry.name}", entry) for entry in fields(value)]
        else:
            lines.append(_line(section.name, section))
    lines += [_line(f"data.sources.N.{entry.name}", entry) for entry in fields(SourceConfig)]
    return "\n".join(lines) + "\n"


def _line(name: str, entry: Field[Any]) -> str:
    return f"| `{name}` | {entry.metadata['help']} | {_default(entry)} |"


def _default(entry: Field[Any]) -> str:
    value = entry.default
    if value is MISSING or value is None or value == ():
        return ""
    if isinstance(value, tuple):
        return ", ".join(f"`{part}`" for part in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(keys_table(), end="")
