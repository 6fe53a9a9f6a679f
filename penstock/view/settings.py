"""The settings of a view, checked once: a frozen record of plain values with a stable digest.

Enters: options as a caller, a YAML file or a command line gives them. Leaves: `ViewSettings`. An unknown option or
value is a `UsageError` that lists what there is and suggests the nearest.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import SupportsIndex, TypedDict, TypeVar

import orjson
from blake3 import blake3

from penstock.errors import UsageError
from penstock.view.policy import LossPolicy


class Overlong(StrEnum):
    """What happens to a row longer than `max_length`."""

    TRUNCATE = "truncate"  # keep the head
    TRUNCATE_LEFT = "truncate_left"  # keep the tail
    DROP = "drop"
    SPLIT = "split"  # consecutive chunks
    ERROR = "error"


class UnknownRegions(StrEnum):
    """What happens to a row whose regions are not certain, under a policy that needs them."""

    ERROR = "error"
    DROP = "drop"


class HoldoutPart(StrEnum):
    """Which side of the hold-out a view shows."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class ViewOptions(TypedDict, total=False):
    """The options of a view, for typed keyword arguments."""

    train_on: LossPolicy | str
    max_length: int | None
    overlong: Overlong | str
    regions_unknown: UnknownRegions | str
    holdout: float | int | None
    part: HoldoutPart | str
    holdout_seed: int


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """All that a view decides. Make one with `checked_settings()`, which checks."""

    train_on: LossPolicy = LossPolicy.ALL_ASSISTANT_MESSAGES
    max_length: int | None = None
    overlong: Overlong = Overlong.TRUNCATE
    regions_unknown: UnknownRegions = UnknownRegions.ERROR
    holdout: float | int | None = None  # a fraction of the rows, or how many
    part: HoldoutPart = HoldoutPart.TRAIN
    holdout_seed: int = 0

    def digest(self, key: str) -> str:
        """A stable name for this view of the dataset with this key."""
        canonical = orjson.dumps({"view": 1, "dataset": key, **asdict(self)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"


def checked_settings(options: ViewOptions, base: ViewSettings | None = None) -> ViewSettings:
    """Checked settings: those of `base` (the defaults), changed by the options."""
    given: dict[str, object] = dict(options)
    names = [field.name for field in fields(ViewSettings)]
    for name in given:
        if name not in names:
            raise UsageError(f"a view has no option {name!r}{_nearest(name, names)}. It has: {', '.join(names)}.")
    merged = asdict(base or ViewSettings()) | given
    return replace(
        ViewSettings(),
        train_on=_choice(LossPolicy, merged, "train_on"),
        max_length=_max_length(merged["max_length"]),
        overlong=_choice(Overlong, merged, "overlong"),
        regions_unknown=_choice(UnknownRegions, merged, "regions_unknown"),
        holdout=_holdout(merged["holdout"]),
        part=_part(merged),
        holdout_seed=_seed(merged["holdout_seed"]),
    )


Choice = TypeVar("Choice", bound=StrEnum)


def _choice(kind: type[Choice], merged: Mapping[str, object], name: str) -> Choice:
    value, known = merged[name], [member.value for member in kind]
    if isinstance(value, str) and value in known:
        return kind(value)
    raise UsageError(f"{name}={value!r} is unknown{_nearest(str(value), known)}. Use one of: {', '.join(known)}.")


def _nearest(value: str, known: list[str]) -> str:
    near = difflib.get_close_matches(value, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _max_length(value: object) -> int | None:
    number = _integer(value)
    if value is None or (number is not None and number >= 1):
        return number
    raise UsageError(f"max_length={value!r} is not a number of tokens. Use 1 or more, or None for no limit.")


def _holdout(value: object) -> float | int | None:
    number = _integer(value)
    if value is None or (number is not None and number >= 1):
        return number
    if isinstance(value, float) and 0 < value < 1:
        return float(value)
    raise UsageError(
        f"holdout={value!r} is neither a fraction nor a number of rows. Use a float between 0 and 1 (0.05), "
        "an integer of 1 or more, or None to hold nothing out."
    )


def _part(merged: Mapping[str, object]) -> HoldoutPart:
    part = _choice(HoldoutPart, merged, "part")
    if part is HoldoutPart.HELD_OUT and merged["holdout"] is None:
        raise UsageError("part='held_out' shows rows that nothing holds out. Add holdout=0.05 (or a number of rows).")
    return part


def _seed(value: object) -> int:
    number = _integer(value)
    if number is not None and 0 <= number < 2**64:
        return number
    raise UsageError(f"holdout_seed={value!r} is not a seed. Use an integer from 0 to 2**64 - 1.")


def _integer(value: object) -> int | None:
    """The value as a plain integer (numpy's integers too, truth values not), or None."""
    return operator.index(value) if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
