"""Generates the list of keys in docs/train.md from the options: `python -m tools.train_reference`."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from penstock.load.options import LoaderOptions, ViewOptions
from penstock.train.config import SourceConfig, TrainConfig

SHARED = {  # records whose options are described elsewhere, under the same names
    "[options of a view](cli.md#options-of-a-view)": ViewOptions,
    "[options of a loader](feed.md#options)": LoaderOptions,
}


def keys_list() -> str:
    """A Markdown list with one line per configuration key; keys that are options of views and loaders share a line."""
    default, lines = TrainConfig(), []
    shared: dict[str, list[str]] = {where: [] for where in SHARED}
    for section in fields(TrainConfig):
        value = getattr(default, section.name)
        if not is_dataclass(value):
            lines.append(_line(section.name, section))
            continue
        for entry in fields(value):
            where = _described(section.name, entry.name)
            if where:
                shared[where].append(f"`{section.name}.{entry.name}`")
            else:
                lines.append(_line(f"{section.name}.{entry.name}", entry))
    lines += [_line(f"data.sources.N.{entry.name}", entry) for entry in fields(SourceConfig)]
    lines += [f"- {', '.join(names)}: {where}\n" for where, names in shared.items()]
    return "".join(lines)


def _described(section: str, name: str) -> str | None:
    """Where the option of this name is described, if it means the same there."""
    if section not in ("data", "feed", "eval"):
        return None
    return next((where for where, record in SHARED.items() if name in {entry.name for entry in fields(record)}), None)


def _line(name: str, entry: Field[Any]) -> str:
    return f"- `{name}`: {entry.metadata['help']}{_default(entry)}\n"


def _default(entry: Field[Any]) -> str:
    value = entry.default
    if value is MISSING or value is None or value == ():
        return ""
    shown = ", ".join(f"`{part}`" for part in value) if isinstance(value, tuple) else f"`{_scalar(value)}`"
    return f" [{shown}]"


def _scalar(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(keys_list(), end="")
