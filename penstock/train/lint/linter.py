"""Lints a configuration: which class accepts each key, which keys are refused, which are unknown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.train.lint.config_class import ConfigClass
from penstock.train.lint.config_values import ConfigValues, KeyDifference, differences
from penstock.train.lint.history import ARGS, DPO, SFT, replacement

# ---- rules -----------------------------------------------------------------------------------------------------------
# Rules that find accepted keys with no effect, or a different effect than their name says, given the other options.
#
# Each rule sees the values of a configuration and the defaults declared by the installed trainer, and yields a
# `NoEffect` per problem. A rule is about one trainer's class and applies to it and to classes derived from it: a field
# of the same name elsewhere may mean something else. Rules judge settings only; `penstock verify` finds out what
# happens at run time.


ISOLATING = ("flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/", "paged|flash")


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Input of the rules: the configured values and the classes that read them, with their defaults."""

    values: Mapping[str, Any]
    classes: Sequence[ConfigClass]

    def get(self, key: str) -> Any:
        """The configured value, else the declared default if it is a literal."""
        if key in self.values:
            return self.values[key]
        for entry in self.classes:
            if key in entry.keys and entry.keys[key].default is not None:
                return _literal(entry.keys[key].default)
        return None

    def is_set(self, key: str) -> bool:
        """Whether the configuration sets this key and some class accepts it."""
        return key in self.values and self.accepts(key)

    def accepts(self, key: str) -> bool:
        """Whether any of the classes accepts this key."""
        return any(key in entry.keys for entry in self.classes)

    def release(self, owner: str) -> tuple[int, int] | None:
        """Major and minor version of the package of `owner` (`package.Class`), if that is a class here or a base."""
        for entry in self.classes:
            numbers = re.match(r"(\d+)\.(\d+)", entry.lineage.get(owner) or "")
            if numbers:
                return int(numbers[1]), int(numbers[2])
        return None

    def of(self, owners: Sequence[str]) -> RuleContext:
        """The same values, with only those of the classes that are among `owners` or derive from one of them."""
        return replace(self, classes=[entry for entry in self.classes if not entry.lineage.keys().isdisjoint(owners)])


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A key that doesn't have the effect its name suggests, and why."""

    key: str
    reason: str


Rule = Callable[[RuleContext], Iterator[NoEffect]]


def find_ineffective(settings: RuleContext) -> list[NoEffect]:
    """Applies each rule to the classes it was written for."""
    return [effect for rule, owners in RULES if (own := settings.of(owners)).classes for effect in rule(own)]


def _literal(source: str | None) -> Any:
    known = {"True": True, "False": False, "None": None}
    if source is None or source in known:
        return known.get(source or "None")
    return source.strip("'\"")


def _packing(settings: RuleContext) -> Iterator[NoEffect]:
    if not settings.accepts("packing"):
        return
    if not settings.get("packing"):
        for key in ("packing_strategy", "eval_packing"):
            if settings.is_set(key) and settings.values[key]:
                yield NoEffect(key, "has no effect without packing: true")
        return
    if settings.get("packing_strategy") == "wrapped":
        yield NoEffect(
            "packing_strategy",
            "wrapped: sequences in a row attend to each other and are cut at arbitrary points. Use bfd",
        )
        return
    attention = _attention(settings)
    if attention is None or not attention.startswith(ISOLATING):
        state = f"attn_implementation is {attention!r}" if attention else "no attn_implementation is set"
        yield NoEffect(
            "packing",
            f"{state}: only attention with sequence boundaries ({', '.join(ISOLATING[:3])}) is certain to isolate "
            "packed sequences. Set it in model_init_kwargs, or check isolation with penstock verify",
        )


def _attention(settings: RuleContext) -> str | None:
    """The configured attention: a top-level key, or one in `model_init_kwargs`."""
    inner = settings.values.get("model_init_kwargs")
    found = settings.values.get("attn_implementation")
    if found is None and isinstance(inner, Mapping):
        found = inner.get("attn_implementation")
    return None if found is None else str(found)


def _masks(settings: RuleContext) -> Iterator[NoEffect]:
    """Mask columns are read only if a flag says so."""
    for column, flag in (("completion_mask", "completion_only_loss"), ("assistant_masks", "assistant_only_loss")):
        if settings.accepts(flag) and not settings.get(flag) and _mentioned(column, settings.values):
            yield NoEffect(column, f"is read only with {flag}: true; without it, every token is trained")


def _mentioned(word: str, value: Any) -> bool:
    match value:
        case str():
            return value == word
        case Mapping():
            return any(key == word or _mentioned(word, entry) for key, entry in value.items())
        case list() | tuple():
            return any(_mentioned(word, entry) for entry in value)
        case _:
            return False


def _liger(settings: RuleContext) -> Iterator[NoEffect]:
    if settings.is_set("liger_kernel_config") and not settings.get("use_liger_kernel"):
        yield NoEffect("liger_kernel_config", "has no effect without use_liger_kernel: true")
    if not settings.values.get("use_liger_kernel"):
        return
    dpo, sft = settings.release(DPO), settings.release(SFT)
    if dpo is not None and not (0, 28) <= dpo <= (1, 12):
        when = "from 0.28 to 1.12" if dpo > (1, 12) else "with use_liger_loss"
        yield NoEffect(
            "use_liger_kernel", f"does not fuse the DPO loss in TRL {dpo[0]}.{dpo[1]} (it did {when}); layers only"
        )
    if sft is not None and sft >= (1, 15):
        yield NoEffect(
            "use_liger_kernel", f"TRL {sft[0]}.{sft[1]} turns the fused cross entropy off; layer kernels only"
        )


def _padding_free(settings: RuleContext) -> Iterator[NoEffect]:
    if settings.values.get("padding_free") and not settings.get("packing") and settings.is_set("max_length"):
        yield NoEffect("max_length", "is not enforced by recent TRL releases with padding_free and no packing")
    if settings.values.get("padding_free") and settings.is_set("pad_to_multiple_of"):
        yield NoEffect(
            "pad_to_multiple_of", "has almost no effect with padding_free: it only rounds up the whole batch"
        )


@dataclass(frozen=True, slots=True)
class Dependency:
    """A key that has an effect only if another key has one of the `values`."""

    key: str
    other: str
    values: tuple[Any, ...]
    reason: str


DEPENDENCIES = (
    Dependency(
        "gradient_checkpointing_kwargs", "gradient_checkpointing", (True,), "without gradient_checkpointing: true"
    ),
    Dependency("eval_steps", "eval_strategy", ("steps",), "unless eval_strategy is steps"),
    Dependency("save_steps", "save_strategy", ("steps", "SaveStrategy.STEPS"), "unless save_strategy is steps"),
    Dependency("hub_model_id", "push_to_hub", (True,), "without push_to_hub: true"),
    Dependency("hub_strategy", "push_to_hub", (True,), "without push_to_hub: true"),
    Dependency("ref_model_mixup_alpha", "sync_ref_model", (True,), "without sync_ref_model: true"),
    Dependency("ref_model_sync_steps", "sync_ref_model", (True,), "without sync_ref_model: true"),
    Dependency("greater_is_better", "load_best_model_at_end", (True,), "without load_best_model_at_end: true"),
    Dependency("bf16_full_eval", "eval_strategy", ("steps", "epoch"), "without an eval_strategy"),
)


def _dependencies(settings: RuleContext) -> Iterator[NoEffect]:
    for rule in DEPENDENCIES:
        known = settings.is_set(rule.key) and settings.accepts(rule.other)
        if known and settings.values[rule.key] is not None and settings.get(rule.other) not in rule.values:
            yield NoEffect(rule.key, f"has no effect {rule.reason}")


def _overridden(settings: RuleContext) -> Iterator[NoEffect]:
    steps = settings.values.get("max_steps")
    if isinstance(steps, (int, float)) and steps > 0 and settings.is_set("num_train_epochs"):
        yield NoEffect("num_train_epochs", f"is overridden by max_steps: {steps}")
    if settings.is_set("warmup_ratio") and settings.values.get("warmup_steps"):
        yield NoEffect("warmup_ratio", f"is overridden by warmup_steps: {settings.values['warmup_steps']}")
    if settings.is_set("fsdp_config") and settings.values["fsdp_config"] and not settings.get("fsdp"):
        yield NoEffect("fsdp_config", "has no effect without fsdp")
    if not settings.get("dataloader_num_workers") or str(settings.get("dataloader_num_workers")) == "0":
        for key in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
            if settings.is_set(key) and settings.values[key]:
                yield NoEffect(key, "has no effect with dataloader_num_workers: 0")


RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (  # with the classes that a rule is about
    (_packing, (SFT,)),
    (_masks, (SFT,)),
    (_padding_free, (SFT, DPO)),
    (_liger, (ARGS, SFT, DPO)),
    (_dependencies, (ARGS, SFT, DPO)),
    (_overridden, (ARGS, SFT, DPO)),
)


# ---- linter ----------------------------------------------------------------------------------------------------------


# Keys that launchers consume before passing on the rest.
LAUNCHER_KEYS = {"config", "env"}


class KeyStatus(StrEnum):
    """Whether the classes accept a key; unknown if a base could not be resolved."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyFinding:
    """The status of one key, and what to use instead."""

    key: str
    value: Any
    status: KeyStatus
    by: str  # the class that accepts it, or why it is refused or unknown
    nearest: tuple[str, ...] = ()
    replaced: str | None = None


@dataclass(frozen=True, slots=True)
class LintReport:
    """The findings about a configuration."""

    origin: str
    classes: tuple[ConfigClass, ...]
    findings: tuple[KeyFinding, ...]
    ineffective: tuple[NoEffect, ...]
    differences: tuple[KeyDifference, ...]

    @property
    def sound(self) -> bool:
        """Whether every key is accepted and effective, and file and command line agree."""
        accepted = all(finding.status is KeyStatus.ACCEPTED for finding in self.findings)
        return accepted and not self.ineffective and not self.differences

    @property
    def refused(self) -> bool:
        """Whether something is definitely wrong; unknown keys don't count."""
        wrong = any(finding.status is KeyStatus.REFUSED for finding in self.findings)
        return wrong or bool(self.ineffective) or bool(self.differences)

    @property
    def mostly_unknown(self) -> bool:
        """Whether too few keys could be checked for the report to mean anything."""
        unknown = sum(finding.status is KeyStatus.UNKNOWN for finding in self.findings)
        return 2 * unknown > len(self.findings)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-compatible values."""
        return {
            "origin": self.origin,
            "classes": [
                {
                    "for": entry.spec,
                    "package": entry.package,
                    "version": entry.version,
                    "file": str(entry.file),
                    "line": entry.line,
                    "commit": entry.commit,
                    "keys": len(entry.keys),
                    "read": list(entry.read),
                    "unresolved": list(entry.unresolved),
                }
                for entry in self.classes
            ],
            "keys": [
                {
                    "key": finding.key,
                    "value": finding.value,
                    "standing": finding.status.value,
                    "by": finding.by,
                    "nearest": list(finding.nearest),
                    "replaced": finding.replaced,
                }
                for finding in self.findings
            ],
            "effects": [{"key": effect.key, "reason": effect.reason} for effect in self.ineffective],
            "differences": [{"key": entry.key, "reason": entry.reason} for entry in self.differences],
            "sound": self.sound,
        }


def lint(config: ConfigValues, classes: Sequence[ConfigClass], command: ConfigValues | None = None) -> LintReport:
    """Lints the values of a file; `command`: values passed by a launcher, which are compared with the file's."""
    passed = command if command is not None else config
    keys = {**config.values, **passed.values}
    findings = tuple(_finding(key, value, classes) for key, value in keys.items())
    found = find_ineffective(RuleContext(passed.values, classes))
    compared = differences(config, command) if command is not None else []
    return LintReport(config.origin, tuple(classes), findings, tuple(found), tuple(compared))


def _finding(key: str, value: Any, classes: Sequence[ConfigClass]) -> KeyFinding:
    for entry in classes:
        if key in entry.keys:
            place = entry.keys[key]
            return KeyFinding(key, value, KeyStatus.ACCEPTED, f"{entry.name} ({place.file}:{place.line})")
    if key in LAUNCHER_KEYS:
        return KeyFinding(key, value, KeyStatus.ACCEPTED, "consumed by the launcher")
    known = {name for entry in classes for name in entry.keys}
    replaced = replacement(key, _owners(classes), known)
    nearest = tuple(difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.6))
    missing = [reason for entry in classes for reason in entry.unresolved]
    if missing:
        return KeyFinding(key, value, KeyStatus.UNKNOWN, f"not resolved: {'; '.join(missing)}", nearest, replaced)
    names = " or ".join(f"{entry.name} of {entry.package} {entry.version or entry.commit or '?'}" for entry in classes)
    return KeyFinding(key, value, KeyStatus.REFUSED, f"no field of {names}", nearest, replaced)


def _owners(classes: Sequence[ConfigClass]) -> set[str]:
    """The classes whose removed keys apply: those linted, and their bases."""
    return {f"{entry.package}.{entry.name}" for entry in classes} | {o for entry in classes for o in entry.lineage}


def report_lines(report: LintReport) -> Iterator[str]:
    """Formats a report for people: what was read, then refused, unknown, ineffective and differing keys."""
    for entry in report.classes:
        known = [entry.version, f"commit {entry.commit}" if entry.commit else None]
        origin = ", ".join(filter(None, known)) or "version unknown"
        yield f"{entry.spec}: {len(entry.keys)} keys, {entry.package} {origin}"
        yield from (f"  read {line}" for line in entry.read)
        yield from (f"  not resolved: {reason}" for reason in entry.unresolved)
    accepted = [finding.key for finding in report.findings if finding.status is KeyStatus.ACCEPTED]
    yield f"{report.origin}: {len(accepted)} of {len(report.findings)} keys accepted"
    for status in (KeyStatus.REFUSED, KeyStatus.UNKNOWN):
        for finding in report.findings:
            if finding.status is status:
                yield _line(finding)
    yield from (f"  no effect {effect.key}: {effect.reason}." for effect in report.ineffective)
    yield from (f"  differs   {entry.key}: {entry.reason}." for entry in report.differences)
    if report.mostly_unknown:
        yield "Most keys can't be checked: pass the folders of the unresolved packages with --search, or install them."


def _line(finding: KeyFinding) -> str:
    parts = [f"  {finding.status:<9} {finding.key}: {finding.by}."]
    if finding.replaced:
        parts.append(f"{finding.replaced[0].upper()}{finding.replaced[1:]}.")
    elif finding.nearest:
        parts.append(f"Did you mean {', '.join(finding.nearest)}?")
    return " ".join(parts)
