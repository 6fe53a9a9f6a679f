"""The settings of a loader, checked once. What decides the rows of a step is apart, in `PlanSettings`.

Enters: the options of `view.loader(…)`. Leaves: `LoaderSettings`. A wrong or unknown option is a `UsageError` that says
what there is.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import SupportsIndex, TypedDict, TypeVar

from penstock.errors import UsageError
from penstock.feed.collate import Side
from penstock.pack.settings import PlanSettings, Tail
from penstock.view.mixture import Mixture
from penstock.view.view import Served, View


class Collate(StrEnum):
    """What a batch looks like."""

    PADDED = "padded"
    PACKED = "packed"
    PAIRS = "pairs"
    TREE = "tree"


class Framework(StrEnum):
    """What its tensors are."""

    NUMPY = "numpy"
    TORCH = "torch"


class LoaderOptions(TypedDict, total=False):
    """The options of a loader, for typed keyword arguments."""

    batch_size: int  # rows of a global step over all ranks: sequences, pairs, or packed rows
    collate: Collate | str  # default: pairs on preference data, else padded
    capacity: int | None  # tokens of a packed row; default: the view's max_length
    align: int  # packed: sequences take a multiple of so many tokens
    seed: int
    shuffle: bool
    epochs: int | None  # default: 1, unless steps says when to end
    steps: int | None
    tail: Tail | str
    rank: int
    world_size: int
    micro_batch: int | None  # rows at a time; default: all of a rank's rows of a step
    ahead: int  # batches made ahead of the loop; 0: none
    side: Side | str  # padded and pairs: where padding goes
    pad_to_multiple_of: int
    pad_to_capacity: bool  # packed: rows are filled to their capacity, so that all batches have one shape
    pad_id: int | None  # default: the tokenizer's pad token, else its end token
    loss_weights: bool  # whether batches hold per-token weights
    framework: Framework | str
    pin_memory: bool
    device: str | None


_DEFAULTS: LoaderOptions = {
    "capacity": None, "align": 1, "seed": 0, "shuffle": True, "epochs": None, "steps": None, "tail": Tail.FILL,
    "rank": 0, "world_size": 1, "micro_batch": None, "ahead": 2, "side": Side.RIGHT, "pad_to_multiple_of": 1,
    "pad_to_capacity": False, "pad_id": None, "loss_weights": True, "framework": Framework.NUMPY,
    "pin_memory": False, "device": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """All that a loader decides. Make one with `loader_settings()`, which checks."""

    plan: PlanSettings
    collate: Collate
    epochs: int | None
    steps: int | None
    rank: int
    world_size: int
    micro_batch: int | None
    ahead: int
    side: Side
    pad_to_multiple_of: int
    pad_to_capacity: bool
    pad_id: int | None
    loss_weights: bool
    framework: Framework
    pin_memory: bool
    device: str | None


def loader_settings(served: Served, options: LoaderOptions) -> LoaderSettings:
    """Checked settings for feeding this view or mixture."""
    known = list(LoaderOptions.__annotations__)
    for name in options:
        if name not in known:
            raise UsageError(f"a loader has no option {name!r}{_nearest(name, known)}. It has: {', '.join(known)}.")
    given: Mapping[str, object] = {**_DEFAULTS, **options}
    collate = _collate(served, given)
    epochs, steps = _end(given)
    rank, world_size = _number(given, "rank", 0), _number(given, "world_size", 1)
    if rank >= world_size:
        raise UsageError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1.")
    framework = _choice(Framework, given, "framework")
    device = given["device"]
    if framework is Framework.NUMPY and (given["pin_memory"] or device is not None):
        raise UsageError("pin_memory and device are for tensors of torch. Add framework='torch'.")
    if given["pad_to_capacity"] and collate is not Collate.PACKED:
        raise UsageError("pad_to_capacity is for packed rows. Use pad_to_multiple_of for padded ones.")
    return LoaderSettings(
        plan=_plan(served, given, collate),
        collate=collate,
        epochs=epochs,
        steps=steps,
        rank=rank,
        world_size=world_size,
        micro_batch=_optional(given, "micro_batch", 1),
        ahead=_number(given, "ahead", 0),
        side=_choice(Side, given, "side"),
        pad_to_multiple_of=_number(given, "pad_to_multiple_of", 1),
        pad_to_capacity=_flag(given, "pad_to_capacity"),
        pad_id=_optional(given, "pad_id", 0),
        loss_weights=_flag(given, "loss_weights"),
        framework=framework,
        pin_memory=_flag(given, "pin_memory"),
        device=None if device is None else str(device),
    )


def _plan(served: Served, given: Mapping[str, object], collate: Collate) -> PlanSettings:
    if "batch_size" not in given:
        raise UsageError("a loader needs batch_size: the rows of a step over all ranks.")
    packed = collate is Collate.PACKED
    capacity = _optional(given, "capacity", 1)
    align = _number(given, "align", 1)
    if not packed and (capacity is not None or align > 1):
        raise UsageError(f"capacity and align are for packed rows, and collate is {collate.value!r}. Use 'packed'.")
    if packed and capacity is None:
        capacity = _max_length(served)
    return PlanSettings(
        batch_size=_number(given, "batch_size", 1),
        capacity=capacity,
        align=align,
        seed=_number(given, "seed", 0),
        shuffle=_flag(given, "shuffle"),
        tail=_choice(Tail, given, "tail"),
    )


def _collate(served: Served, given: Mapping[str, object]) -> Collate:
    default = Collate.PAIRS if served.is_preference else Collate.PADDED
    collate = _choice(Collate, {"collate": default, **given}, "collate")
    if (collate is Collate.PAIRS) != served.is_preference:
        kind, wanted = (
            ("preference pairs", "pairs") if served.is_preference else ("single examples", "padded, packed or tree")
        )
        raise UsageError(f"collate={collate.value!r} does not fit: the view serves {kind}. Use {wanted}.")
    return collate


def _max_length(served: Served) -> int:
    """The capacity where none is given: the limit that all views have in common."""
    views = [share.view for share in served.shares.values()] if isinstance(served, Mixture) else [served]
    limits = {view.settings.max_length for view in views if isinstance(view, View)}
    limit = limits.pop() if len(limits) == 1 else None
    if limit is None:
        raise UsageError("packing needs a capacity: give capacity=8192, or the view a max_length.")
    return limit


def _end(given: Mapping[str, object]) -> tuple[int | None, int | None]:
    epochs, steps = _optional(given, "epochs", 1), _optional(given, "steps", 1)
    if epochs is not None and steps is not None:
        raise UsageError(f"epochs={epochs} and steps={steps} both say when to end. Give one of them.")
    return (1, None) if epochs is None and steps is None else (epochs, steps)


Choice = TypeVar("Choice", bound=StrEnum)


def _choice(kind: type[Choice], given: Mapping[str, object], name: str) -> Choice:
    value, known = given[name], [member.value for member in kind]
    if isinstance(value, str) and value in known:
        return kind(value)
    raise UsageError(f"{name}={value!r} is unknown{_nearest(str(value), known)}. Use one of: {', '.join(known)}.")


def _number(given: Mapping[str, object], name: str, least: int) -> int:
    value = given[name]
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and operator.index(value) >= least:
        return operator.index(value)
    raise UsageError(f"{name}={value!r} is not possible. Use an integer of {least} or more.")


def _optional(given: Mapping[str, object], name: str, least: int) -> int | None:
    return None if given[name] is None else _number(given, name, least)


def _flag(given: Mapping[str, object], name: str) -> bool:
    value = given[name]
    if isinstance(value, bool):
        return value
    raise UsageError(f"{name}={value!r} is neither True nor False.")


def _nearest(value: str, known: list[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
