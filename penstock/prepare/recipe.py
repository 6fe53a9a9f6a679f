"""The recipe: everything besides the rows that decides the tokens, in one place.

Deliberately excluded, because they change no byte of a shard: the sources' paths and names, the split, the cache, the
number of workers, `fast` (engines are interchangeable), `on_bad_row`, `on_dropped` and the quarantine file (a shard
stores its rejected and noted rows either way), and everything that a view decides.
"""

from __future__ import annotations

import datetime
import difflib
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import orjson

from penstock.digests import FORMAT_VERSION, bytes_digest, canonical, digest
from penstock.errors import UsageError
from penstock.options import option
from penstock.prepare.chat.formats import ColumnMapping, Format, FormatOptions
from penstock.prepare.modes import (
    Arguments,
    DroppedCalls,
    Eos,
    ReasoningInContent,
    RegionsMode,
    SpecialText,
    StopMode,
    Straddle,
    TokenizerAs,
    TurnsMode,
)
from penstock.prepare.tokenizer.files import TokenizerFiles

STAGES_VERSION = 8  # increment when any stage produces other tokens, segments or ledgers for the same input
NO_DATE = datetime.date(1970, 1, 1)  # for templates that print no date
REFERENCES = ("jinja2", "tokenizers")  # their minor versions are part of the recipe
# The releases of tokenizers 1.x that share keys with 0.23, because they passed `benchmarks.exactness`: same rows, same
# bytes. Other releases have keys of their own.
EQUAL_TOKENIZERS = ("1.0.0rc3",)


SOURCE, TEMPLATE = "Source", "Template and masks"  # panels of the help


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeOptions(FormatOptions):
    """The options that enter a recipe."""

    tokenizer: str = option(
        "Tokenizer: a folder, a tokenizer.json, or a hub name", "", also="os.PathLike[str]", required=True
    )
    template: str | None = option(
        "Chat template: a file, or the name of one of the tokenizer's templates", also="os.PathLike[str]"
    )
    tokenizer_as: TokenizerAs | None = option(
        "Whose ids: file (tokenizer.json) or auto (transformers' AutoTokenizer); default: file, and both must agree",
        panel=SOURCE,
    )
    max_row_bytes: int = option("Larger rows are rejected, not read into memory", 32_000_000, panel=SOURCE)
    template_vars: Mapping[str, Any] = option(
        "Template variable, for example enable_thinking=false", {}, flag="template-var", panel=TEMPLATE
    )
    date: datetime.date | None = option(
        "Date that templates print (YYYY-MM-DD); default: today, resolved once", panel=TEMPLATE
    )
    regions: RegionsMode = option(
        "What decides which text the assistant wrote: auto ({% generation %} tags where there are any), structure",
        RegionsMode.AUTO,
        panel=TEMPLATE,
    )
    turns: TurnsMode = option(
        "Context of an assistant's turn: conversation (one render of the row), or faithful (what inference shows)",
        TurnsMode.CONVERSATION,
        panel=TEMPLATE,
    )
    stop: StopMode = option(
        "What ends an assistant's turn: template, next_marker for templates that print no end token, or append, which "
        "also adds it to the last answer of a row",
        StopMode.TEMPLATE,
        panel=TEMPLATE,
    )
    reasoning_in_content: ReasoningInContent = option(
        "Reasoning inside contents, in <think> tags: auto (if the template prints these tags), split (everywhere)",
        ReasoningInContent.AUTO,
        panel=TEMPLATE,
    )
    straddle: Straddle = option(
        "Tokens across the border of a marked span: inside (left out), touch (included), error (reject the row)",
        Straddle.INSIDE,
        panel=TEMPLATE,
    )
    eos: Eos = option(
        "Append the end-of-sequence token to plain text and completions: auto, always, never", Eos.AUTO, panel=TEMPLATE
    )
    special_tokens_in_text: SpecialText = option(
        "Special tokens inside messages: as_template, reject", SpecialText.AS_TEMPLATE, panel=TEMPLATE
    )
    dropped_tool_calls: DroppedCalls = option(
        "Conversations whose tool calls the template drops: reject, keep", DroppedCalls.REJECT, panel=TEMPLATE
    )
    arguments: Arguments = option(
        "Arguments of tool calls: auto (strings and objects as the template prints them), as_given",
        Arguments.AUTO,
        panel=TEMPLATE,
    )


@dataclass(frozen=True)
class Recipe:
    """A value object: equal recipes produce equal shards from equal slices."""

    mapping: ColumnMapping
    templates: dict[str, str]  # empty if no row needs one
    template_vars: dict[str, Any]
    date: datetime.date | None  # None if no template prints it
    regions: RegionsMode
    end_ids: tuple[int, ...]  # tokens that end a turn by following it; only with --stop next_marker
    eos: Eos  # NEVER if rows can't be plain text
    special_tokens_in_text: SpecialText
    dropped_tool_calls: DroppedCalls
    max_row_bytes: int
    special_tokens: dict[str, str]
    tokenizer: str  # digest of tokenizer.json
    tokenizer_as: TokenizerAs = TokenizerAs.FILE
    turns: TurnsMode = TurnsMode.CONVERSATION
    arguments: Arguments = Arguments.AUTO
    appends_stops: bool = False  # the last answer of a row gets the stop that inference would see
    reasoning_in_content: ReasoningInContent = ReasoningInContent.AUTO
    straddle: Straddle = Straddle.INSIDE

    def as_json(self) -> dict[str, Any]:
        """Returns the recipe as the manifest stores it and the digest covers it."""
        return {
            "format": FORMAT_VERSION,
            "stages": STAGES_VERSION,
            "references": _references(with_templates=bool(self.templates)),
            "mapping": self.mapping.as_json(),
            "templates": self.templates,
            "template_vars": self.template_vars,
            "date": self.date.isoformat() if self.date else None,
            "regions": self.regions.value,
            "end_ids": list(self.end_ids),
            "eos": self.eos.value,
            "special_tokens_in_text": self.special_tokens_in_text.value.replace("_", "-"),
            "dropped_tool_calls": self.dropped_tool_calls.value,
            "max_row_bytes": self.max_row_bytes,
            "special_tokens": self.special_tokens,
            "tokenizer": self.tokenizer,
            # Only if it differs from the default, so that digests from before these options existed stay the same.
            **({"tokenizer_as": "auto"} if self.tokenizer_as is TokenizerAs.AUTO else {}),
            **({"turns": "faithful"} if self.turns is TurnsMode.FAITHFUL else {}),
            **({"arguments": "as-given"} if self.arguments is Arguments.AS_GIVEN else {}),
            **({"stop": "append"} if self.appends_stops else {}),
            **({"reasoning_in_content": "split"} if self.reasoning_in_content is ReasoningInContent.SPLIT else {}),
            **({"straddle": self.straddle.value} if self.straddle is not Straddle.INSIDE else {}),
        }

    @cached_property
    def digest(self) -> str:
        """Digest of the whole recipe; part of the name of every shard."""
        return digest(b"recipe", canonical(self.as_json()))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Recipe:
        """Reads the recipe of a manifest, or one that was sent to a worker."""
        return cls(
            mapping=ColumnMapping.from_json(value["mapping"]),
            templates=value["templates"],
            template_vars=value["template_vars"],
            date=datetime.date.fromisoformat(value["date"]) if value["date"] else None,
            regions=RegionsMode(value["regions"]),
            end_ids=tuple(value["end_ids"]),
            eos=Eos(value["eos"]),
            special_tokens_in_text=SpecialText(value["special_tokens_in_text"]),
            dropped_tool_calls=DroppedCalls(value["dropped_tool_calls"]),
            max_row_bytes=value["max_row_bytes"],
            special_tokens=value["special_tokens"],
            tokenizer=value["tokenizer"],
            tokenizer_as=TokenizerAs(value.get("tokenizer_as", "file")),
            turns=TurnsMode(value.get("turns", "conversation")),
            arguments=Arguments(value.get("arguments", "auto")),
            appends_stops=value.get("stop") == "append",
            reasoning_in_content=ReasoningInContent(value.get("reasoning_in_content", "auto")),
            straddle=Straddle(value.get("straddle", "inside")),
        )


def _references(*, with_templates: bool) -> dict[str, str]:
    """Returns the versions of everything not ours that decides bytes."""
    versions = {name: ".".join(version(name).split(".")[:2]) for name in REFERENCES}
    if version("tokenizers") in EQUAL_TOKENIZERS:
        versions["tokenizers"] = "0.23"
    # Templates change case and print lists and dicts as `str` does, and Python's Unicode decides which characters have
    # a case or are escaped. That of Python 3.11 goes without saying, so that older digests stay the same.
    if with_templates and unicodedata.unidata_version != "14.0.0":
        versions["unicode"] = unicodedata.unidata_version
    return versions


def make_recipe(options: RecipeOptions, mapping: ColumnMapping, model: TokenizerFiles) -> Recipe:
    """Resolves options and tokenizer files to a recipe."""
    templates = _templates(options, mapping, model)
    dated = any("strftime_now" in text for text in templates.values())
    return Recipe(
        mapping=mapping,
        templates={name: text.replace("\r\n", "\n").replace("\r", "\n") for name, text in templates.items()},
        template_vars=dict(options.template_vars),
        date=(options.date or datetime.date.today()) if dated else None,
        regions=options.regions,
        end_ids=_end_ids(options, model),
        eos=_eos(options, mapping, model),
        special_tokens_in_text=options.special_tokens_in_text,
        dropped_tool_calls=options.dropped_tool_calls,
        max_row_bytes=options.max_row_bytes,
        special_tokens=dict(model.special_tokens),
        tokenizer=bytes_digest(model.tokenizer_json),
        tokenizer_as=options.tokenizer_as or TokenizerAs.FILE,
        turns=_turns(options, mapping, templates),
        arguments=options.arguments if templates else Arguments.AUTO,
        appends_stops=options.stop is StopMode.APPEND and bool(templates),
        reasoning_in_content=options.reasoning_in_content,
        straddle=options.straddle,
    )


def _turns(options: RecipeOptions, mapping: ColumnMapping, templates: dict[str, str]) -> TurnsMode:
    """Returns the `turns` option if a template decides the context of turns, else the default."""
    if options.turns is TurnsMode.CONVERSATION or not templates:
        return TurnsMode.CONVERSATION
    if mapping.format is Format.PREFERENCE:
        raise UsageError(
            "--turns faithful: the rows are preference pairs, of which only the last answers count. Leave it out."
        )
    if options.stop is not StopMode.TEMPLATE:
        raise UsageError(
            f"--turns faithful and --stop {options.stop} exclude each other: no marker follows the turn that inference "
            "is asked for. Use a template that prints its own end token."
        )
    return options.turns


def _end_ids(options: RecipeOptions, model: TokenizerFiles) -> tuple[int, ...]:
    if options.stop is StopMode.TEMPLATE:
        return ()
    if not model.end_ids:
        raise UsageError(
            f"--stop {options.stop}: the tokenizer {model.name!r} comes without the model's end-of-sequence ids. "
            "Put the model's generation_config.json beside tokenizer.json."
        )
    return tuple(sorted(set(model.end_ids)))


def _eos(options: RecipeOptions, mapping: ColumnMapping, model: TokenizerFiles) -> Eos:
    """Returns the `eos` option if it applies to the row format, else NEVER."""
    if mapping.format not in (Format.TEXT, Format.PROMPT_COMPLETION, Format.PREFERENCE, Format.KTO):
        return Eos.NEVER
    if options.eos is Eos.ALWAYS and not model.special_tokens.get("eos_token"):
        raise UsageError(
            f"--eos always: the tokenizer {model.name!r} names no end-of-sequence token. "
            "Put the model's tokenizer_config.json, with an eos_token, beside tokenizer.json."
        )
    return options.eos


def _templates(options: RecipeOptions, mapping: ColumnMapping, model: TokenizerFiles) -> dict[str, str]:
    """Returns the templates by name. Plain text needs none; prompts and pairs may be strings and do without."""
    match mapping.format:
        case Format.TEXT:
            return {}
        case Format.PROMPT_COMPLETION | Format.PREFERENCE | Format.KTO if (
            options.template is None and not model.templates
        ):
            return {}
        case _:
            return model.template(options.template)


# ---- differences -----------------------------------------------------------------------------------------------------
#
# Describes the differences between two recipes, one line each: the old value, then the new one.


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
                found += _template_lines(before or {}, after or {})
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


def _template_lines(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
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
