"""Keys that are accepted and yet do nothing, or not what they say, in the company they keep.

Each rule looks at the values of a configuration and at what the trainer's installed version declares, and returns a
sentence or nothing. Rules judge settings only; whether a thing really happens is for `penstock verify` to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.lint.accepts import Accepted

ISOLATING = ("flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/", "paged|flash")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the rules look at: the values given, the defaults declared, and who reads them."""

    values: Mapping[str, Any]
    classes: Sequence[Accepted]

    def get(self, key: str) -> Any:
        """The value given, else the declared default where it is plain."""
        if key in self.values:
            return self.values[key]
        for entry in self.classes:
            if key in entry.keys and entry.keys[key].default is not None:
                return _plain(entry.keys[key].default)
        return None

    def given(self, key: str) -> bool:
        """Whether the configuration itself sets a key that someone accepts."""
        return key in self.values and self.has(key)

    def has(self, key: str) -> bool:
        """Whether any of the classes accepts a key."""
        return any(key in entry.keys for entry in self.classes)

    def release(self, name: str) -> tuple[int, int] | None:
        """Major and minor version of TRL, if the class of that name is TRL's."""
        for entry in self.classes:
            if entry.package == "trl" and entry.name == name and entry.version:
                parts = entry.version.split(".")
                return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()) or 0)
        return None


@dataclass(frozen=True, slots=True)
class Effect:
    """A key without the effect that it promises, and why."""

    key: str
    reason: str


Rule = Callable[[Settings], Iterator[Effect]]


def effects(settings: Settings) -> list[Effect]:
    """All that the rules find."""
    return [effect for rule in RULES for effect in rule(settings)]


def _plain(source: str | None) -> Any:
    known = {"True": True, "False": False, "None": None}
    if source is None or source in known:
        return known.get(source or "None")
    return source.strip("'\"")


def _packing(settings: Settings) -> Iterator[Effect]:
    if not settings.has("packing"):
        return
    if not settings.get("packing"):
        for key in ("packing_strategy", "eval_packing"):
            if settings.given(key) and settings.values[key]:
                yield Effect(key, "has no effect without packing: true")
        return
    if settings.get("packing_strategy") == "wrapped":
        yield Effect("packing_strategy", "wrapped: sequences of one row see each other, and are cut anywhere. Use bfd")
        return
    attention = _attention(settings)
    if attention is None or not attention.startswith(ISOLATING):
        said = f"attn_implementation is {attention!r}" if attention else "no attn_implementation is set"
        yield Effect(
            "packing",
            f"{said}: only attention with sequence boundaries ({', '.join(ISOLATING[:3])}) surely keeps packed "
            "sequences apart. Set it in model_init_kwargs, or prove isolation with penstock verify",
        )


def _attention(settings: Settings) -> str | None:
    """The attention that the configuration asks for, at the top or for the model's construction."""
    inner = settings.values.get("model_init_kwargs")
    found = settings.values.get("attn_implementation")
    if found is None and isinstance(inner, Mapping):
        found = inner.get("attn_implementation")
    return None if found is None else str(found)


def _masks(settings: Settings) -> Iterator[Effect]:
    """Columns with masks are read only when a flag says so."""
    for column, flag in (("completion_mask", "completion_only_loss"), ("assistant_masks", "assistant_only_loss")):
        if settings.has(flag) and not settings.get(flag) and _mentioned(column, settings.values):
            yield Effect(column, f"is read only with {flag}: true; without it, every token is trained")


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


def _liger(settings: Settings) -> Iterator[Effect]:
    if settings.given("liger_kernel_config") and not settings.get("use_liger_kernel"):
        yield Effect("liger_kernel_config", "has no effect without use_liger_kernel: true")
    if not settings.values.get("use_liger_kernel"):
        return
    dpo, sft = settings.release("DPOConfig"), settings.release("SFTConfig")
    if dpo is not None and not (0, 28) <= dpo <= (1, 12):
        when = "from 0.28 to 1.12" if dpo > (1, 12) else "with use_liger_loss"
        yield Effect(
            "use_liger_kernel", f"does not fuse the DPO loss in TRL {dpo[0]}.{dpo[1]} (it did {when}); layers only"
        )
    if sft is not None and sft >= (1, 15):
        yield Effect("use_liger_kernel", f"TRL {sft[0]}.{sft[1]} turns the fused cross entropy off; layer kernels only")


def _padding_free(settings: Settings) -> Iterator[Effect]:
    if settings.values.get("padding_free") and not settings.get("packing") and settings.given("max_length"):
        yield Effect("max_length", "is not enforced by recent TRL with padding_free and without packing")
    if settings.values.get("padding_free") and settings.given("pad_to_multiple_of"):
        yield Effect("pad_to_multiple_of", "has little to pad with padding_free: only the whole batch is rounded up")


@dataclass(frozen=True, slots=True)
class Needs:
    """A key that has an effect only where another one has (or has not) a value."""

    key: str
    other: str
    wanted: tuple[Any, ...]
    reason: str


NEEDS = (
    Needs("gradient_checkpointing_kwargs", "gradient_checkpointing", (True,), "without gradient_checkpointing: true"),
    Needs("eval_steps", "eval_strategy", ("steps",), "unless eval_strategy is steps"),
    Needs("save_steps", "save_strategy", ("steps", "SaveStrategy.STEPS"), "unless save_strategy is steps"),
    Needs("hub_model_id", "push_to_hub", (True,), "without push_to_hub: true"),
    Needs("hub_strategy", "push_to_hub", (True,), "without push_to_hub: true"),
    Needs("ref_model_mixup_alpha", "sync_ref_model", (True,), "without sync_ref_model: true"),
    Needs("ref_model_sync_steps", "sync_ref_model", (True,), "without sync_ref_model: true"),
    Needs("greater_is_better", "load_best_model_at_end", (True,), "without load_best_model_at_end: true"),
    Needs("bf16_full_eval", "eval_strategy", ("steps", "epoch"), "without an eval_strategy"),
)


def _needs(settings: Settings) -> Iterator[Effect]:
    for need in NEEDS:
        known = settings.given(need.key) and settings.has(need.other)
        if known and settings.values[need.key] is not None and settings.get(need.other) not in need.wanted:
            yield Effect(need.key, f"has no effect {need.reason}")


def _overruled(settings: Settings) -> Iterator[Effect]:
    steps = settings.values.get("max_steps")
    if isinstance(steps, (int, float)) and steps > 0 and settings.given("num_train_epochs"):
        yield Effect("num_train_epochs", f"is overruled by max_steps: {steps}")
    if settings.given("warmup_ratio") and settings.values.get("warmup_steps"):
        yield Effect("warmup_ratio", f"is overruled by warmup_steps: {settings.values['warmup_steps']}")
    if settings.given("fsdp_config") and settings.values["fsdp_config"] and not settings.get("fsdp"):
        yield Effect("fsdp_config", "has no effect without fsdp")
    if not settings.get("dataloader_num_workers") or str(settings.get("dataloader_num_workers")) == "0":
        for key in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
            if settings.given(key) and settings.values[key]:
                yield Effect(key, "has no effect with dataloader_num_workers: 0")


RULES: tuple[Rule, ...] = (_packing, _masks, _liger, _padding_free, _needs, _overruled)
