"""Describes the differences between two recipes, one line each: the old value, then the new one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

Tokenizers = Callable[[str], bytes | None]  # None if it is unknown

_SHORT = 60


def differing_parts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parts that differ."""
    return sorted(part for part in {*old, *new} if old.get(part) != new.get(part))


def recipe_differences(old: Mapping[str, Any], new: Mapping[str, Any], tokenizer_json: Tokenizers) -> list[str]:
    """Describes every part that differs. `tokenizer_json` returns the tokenizer with a digest."""
    found: list[str] = []
    for part in differing_parts(old, new):
        before, after = old.get(part), new.get(part)
        match part:
            case "templates":
                found += _templates(before or {}, after or {})
            case "template_vars":
                found += _entries("template variable ", before, after)
            case "special_tokens":
                found += _entries("special token ", before, after)
            case "mapping":
                found += _mapping(before or {}, after or {})
            case "references":
                found += _entries("version of ", before, after)
            case "tokenizer":
                found += _tokenizers(tokenizer_json(str(before)), tokenizer_json(str(after)))
            case "date":
                found.append(f"date: {before} → {after}")
            case "stages" | "format":
                found.append(f"Penstock's own version of {part}: {before} → {after}")
            case _:
                found.append(f"option {part}: {_shown(before)} → {_shown(after)}")
    return found


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def _entries(what: str, before: Any, after: Any) -> list[str]:
    old: Mapping[str, Any] = before if isinstance(before, Mapping) else {}
    new: Mapping[str, Any] = after if isinstance(after, Mapping) else {}
    found: list[str] = []
    for name in sorted({*old, *new}):
        if name not in old:
            found.append(f"{what}{name}: added ({_shown(new[name])})")
        elif name not in new:
            found.append(f"{what}{name}: gone (was {_shown(old[name])})")
        elif old[name] != new[name]:
            found.append(f"{what}{name}: {_shown(old[name])} → {_shown(new[name])}")
    return found


def _templates(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    for name in sorted({*old, *new}):
        title = "template" if name == "default" else f"template {name!r}"
        if name not in old:
            found.append(f"{title}: added")
        elif name not in new:
            found.append(f"{title}: gone")
        elif old[name] != new[name]:
            found.append(f"{title}: {_lines(old[name].split(chr(10)), new[name].split(chr(10)))}")
    return found


def _lines(old: list[str], new: list[str]) -> str:
    """Says which lines of the new text differ, counted from 1."""
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    steps = [step for step in matcher.get_opcodes() if step[0] != "equal"]
    changed = sum(max(step[2] - step[1], step[4] - step[3]) for step in steps)
    what, first_old, _, first, _ = steps[0]
    if changed == 1:
        verb = {"replace": "changed", "insert": "added", "delete": "removed"}[what]
        return f"line {(first if what != 'delete' else first_old) + 1} {verb}"
    return f"{changed} lines changed, the first is line {first + 1}"


def _mapping(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for part in sorted({*old, *new}):
        before, after = old.get(part), new.get(part)
        if part in ("columns", "roles"):
            found += _entries(f"format mapping: {part.removesuffix('s')} ", before, after)
        elif before != after:
            found.append(f"format mapping: {part.replace('_', ' ')}: {_shown(before)} → {_shown(after)}")
    return found


def _tokenizers(old: bytes | None, new: bytes | None) -> list[str]:
    if old is None or new is None:
        return ["tokenizer.json: other bytes"]
    before, after = orjson.loads(old), orjson.loads(new)
    found = [*_added(before, after), *_model(before.get("model") or {}, after.get("model") or {})]
    parts = sorted({*before, *after} - {"added_tokens", "model"})
    found += [f"tokenizer.json: {part} changed" for part in parts if before.get(part) != after.get(part)]
    return found or ["tokenizer.json: other bytes, the same content"]


def _added(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old = {str(token.get("content")): token for token in before.get("added_tokens") or []}
    new = {str(token.get("content")): token for token in after.get("added_tokens") or []}
    found: list[str] = []
    for what, names in (
        ("", sorted(new.keys() - old.keys())),
        (" gone", sorted(old.keys() - new.keys())),
        (" changed", sorted(name for name in old.keys() & new.keys() if old[name] != new[name])),
    ):
        if names:
            shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            found.append(f"tokenizer.json: {len(names)} added token{'s' if len(names) > 1 else ''}{what} ({shown})")
    return found


def _model(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for part in sorted({*old, *new}):
        before, after = old.get(part), new.get(part)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            count = sum(after.get(token) != before.get(token) for token in {*before, *after})
            found.append(f"tokenizer.json: {count} of the {part}'s {len(after)} entries differ")
        elif isinstance(before, list) and isinstance(after, list):
            found.append(f"tokenizer.json: {part} changed ({len(before)} → {len(after)} entries)")
        else:
            found.append(f"tokenizer.json: model {part}: {_shown(before)} → {_shown(after)}")
    return found
