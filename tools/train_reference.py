"""Generates the lists of options in docs/train.md and docs/feed.md from their records.

python -m tools.train_reference            # the keys of a training configuration
python -m tools.train_reference loader     # the options of a loader
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from penstock.load.options import LoaderOptions, ViewOptions
from penstock.train.config import FIXED, SourceConfig, TrainConfig

SHARED = {  # records whose options are described elsewhere, under the same names
    ViewOptions: "[options of a view](cli.md#options-of-a-view)",
    LoaderOptions: "[options of a loader](feed.md#options)",
}


def keys_list() -> str:
    """A Markdown list with one line per configuration key; the options of a view and of a loader share a line each."""
    lines, shared = [], []
    for section in fields(TrainConfig):
        value = getattr(TrainConfig(), section.name)
        if type(value) in SHARED:
            names = [f"{section.name}.{entry.name}" for entry in fields(value)]
            shared.append(f"- {', '.join(f'`{name}`' for name in names if name not in FIXED)}: {SHARED[type(value)]}\n")
        elif is_dataclass(value):
            lines += [_line(f"{section.name}.{entry.name}", entry) for entry in fields(value)]
        else:
            lines.append(_line(section.name, section))
    lines += [_line(f"data.sources.N.{entry.name}", entry) for entry in fields(SourceConfig)]
    return "".join(lines + shared)


def loader_list() -> str:
    """A Markdown list with one line per option of a loader."""
    return "".join(_line(entry.name, entry) for entry in fields(LoaderOptions))


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
    print(loader_list() if sys.argv[1:] == ["loader"] else keys_list(), end="")
