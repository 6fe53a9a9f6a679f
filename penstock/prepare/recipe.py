"""The recipe: everything besides the rows that decides the tokens, in one place.

Deliberately excluded, because they change no byte of a shard: the sources' paths and names, the split, the cache, the
number of workers, `fast` (engines are interchangeable), `on_bad_row`, `on_dropped` and the quarantine file (a shard
stores its rejected and noted rows either way), and everything that a view decides.
"""

from __future__ import annotations

import datetime
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

from penstock.build.options import Arguments, DroppedCalls, Eos, PrepareOptions, SpecialText, TokenizerAs
from penstock.errors import UsageError
from penstock.prepare.chat.formats import Format
from penstock.prepare.chat.formats import Mapping as ColumnMapping
from penstock.prepare.modes import RegionsMode, StopMode, TurnsMode
from penstock.prepare.tokenizer.files import TokenizerFiles
from penstock.store.files import bytes_digest, digest
from penstock.store.format import FORMAT_VERSION, canonical

STAGES_VERSION = 7  # increment when any stage produces other tokens, segments or ledgers for the same input
NO_DATE = datetime.date(1970, 1, 1)  # for templates that print no date
REFERENCES = ("jinja2", "tokenizers")  # their minor versions are part of the recipe


@dataclass(frozen=True)
class Recipe:
    """A value object: equal recipes produce equal shards from equal slices."""

    mapping: ColumnMapping
    templates: dict[str, str]  # empty if no row needs one
    template_vars: dict[str, Any]
    date: datetime.date | None  # None if no template prints it
    regions: RegionsMode
    end_ids: tuple[int, ...]  # tokens that end a turn by following it; only with --stop next-marker
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
            "special_tokens_in_text": self.special_tokens_in_text.value,
            "dropped_tool_calls": self.dropped_tool_calls.value,
            "max_row_bytes": self.max_row_bytes,
            "special_tokens": self.special_tokens,
            "tokenizer": self.tokenizer,
            # Only if it differs from the default, so that digests from before these options existed stay the same.
            **({"tokenizer_as": "auto"} if self.tokenizer_as is TokenizerAs.AUTO else {}),
            **({"turns": "faithful"} if self.turns is TurnsMode.FAITHFUL else {}),
            **({"arguments": "as-given"} if self.arguments is Arguments.AS_GIVEN else {}),
            **({"stop": "append"} if self.appends_stops else {}),
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
        )


def _references(*, with_templates: bool) -> dict[str, str]:
    """Returns the versions of everything not ours that decides bytes."""
    versions = {name: ".".join(version(name).split(".")[:2]) for name in REFERENCES}
    # Templates change case and print lists and dicts as `str` does, and Python's Unicode decides which characters have
    # a case or are escaped. That of Python 3.11 goes without saying, so that older digests stay the same.
    if with_templates and unicodedata.unidata_version != "14.0.0":
        versions["unicode"] = unicodedata.unidata_version
    return versions


def make_recipe(options: PrepareOptions, mapping: ColumnMapping, model: TokenizerFiles) -> Recipe:
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
    )


def _turns(options: PrepareOptions, mapping: ColumnMapping, templates: dict[str, str]) -> TurnsMode:
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


def _end_ids(options: PrepareOptions, model: TokenizerFiles) -> tuple[int, ...]:
    if options.stop is StopMode.TEMPLATE:
        return ()
    if not model.end_ids:
        raise UsageError(
            f"--stop {options.stop}: the tokenizer {model.name!r} comes without the model's end-of-sequence ids. "
            "Put the model's generation_config.json beside tokenizer.json."
        )
    return tuple(sorted(set(model.end_ids)))


def _eos(options: PrepareOptions, mapping: ColumnMapping, model: TokenizerFiles) -> Eos:
    """Returns the `eos` option if it applies to the row format, else NEVER."""
    if mapping.format not in (Format.TEXT, Format.PROMPT_COMPLETION, Format.PREFERENCE, Format.KTO):
        return Eos.NEVER
    if options.eos is Eos.ALWAYS and not model.special_tokens.get("eos_token"):
        raise UsageError(
            f"--eos always: the tokenizer {model.name!r} names no end-of-sequence token. "
            "Put the model's tokenizer_config.json, with an eos_token, beside tokenizer.json."
        )
    return options.eos


def _templates(options: PrepareOptions, mapping: ColumnMapping, model: TokenizerFiles) -> dict[str, str]:
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
