"""The options of a view: a frozen record of plain values with a stable digest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import orjson
from annotated_types import Ge, Gt, Lt
from blake3 import blake3

from penstock.errors import UsageError
from penstock.options import option, read_options

if TYPE_CHECKING:
    from penstock.arguments import ViewArguments


class LossPolicy(StrEnum):
    """What is trained; the values are the option's."""

    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    LAST_ASSISTANT_TURN = "last_assistant_turn"
    ALL_MESSAGES = "all_messages"
    ALL_USER_AND_SYSTEM_MESSAGES = "all_user_and_system_messages"
    ALL_TOKENS = "all_tokens"
    CUSTOMIZED = "customized"

    @property
    def needs_regions(self) -> bool:
        """Whether rows with unknown regions can't be served."""
        return self is not LossPolicy.ALL_TOKENS


class Overlong(StrEnum):
    """What happens to a row longer than `max_length`."""

    TRUNCATE = "truncate"  # keep the head
    TRUNCATE_LEFT = "truncate_left"  # keep the tail
    DROP = "drop"
    SPLIT = "split"  # consecutive chunks
    ERROR = "error"


class UnknownRegions(StrEnum):
    """What happens to a row with unknown regions under a policy that needs them."""

    ERROR = "error"
    DROP = "drop"


class HoldoutPart(StrEnum):
    """The side of the hold-out that a view serves."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewSettings:
    """The options of a view, validated by `view_settings()`."""

    train_on: LossPolicy = option(
        f"Loss policy: {', '.join(LossPolicy)}; KTO rows default to last_assistant_message, adopted data to customized",
        LossPolicy.ALL_ASSISTANT_MESSAGES,
    )
    max_length: Annotated[int, Ge(1)] | None = option(
        "Longest sequence, in tokens", expects="a number of tokens of 1 or more, or None for no limit"
    )
    overlong: Overlong = option("Longer rows: " + ", ".join(Overlong), Overlong.TRUNCATE)
    regions_unknown: UnknownRegions = option("Rows with unknown regions: error, drop", UnknownRegions.ERROR)
    holdout: Annotated[float, Gt(0), Lt(1)] | Annotated[int, Ge(1)] | None = option(
        "Rows to hold out: a fraction or a number",
        expects="a fraction between 0 and 1 (0.05), a number of rows of 1 or more, or None to hold nothing out",
    )
    part: HoldoutPart = option("Side of the hold-out: train, held_out", HoldoutPart.TRAIN)
    holdout_seed: Annotated[int, Ge(0), Lt(2**64)] = option(
        "Seed of the hold-out", 0, expects="an integer from 0 to 2**64 - 1"
    )

    def digest(self, key: str) -> str:
        """A stable name for this view of the dataset with this key."""
        canonical = orjson.dumps({"view": 1, "dataset": key, **asdict(self)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"


def view_settings(options: ViewArguments, base: ViewSettings | None = None) -> ViewSettings:
    """Validate options on top of `base` (or of the defaults)."""
    settings = read_options(ViewSettings, {**asdict(base or ViewSettings()), **options}, "a view")
    if settings.part is HoldoutPart.HELD_OUT and settings.holdout is None:
        raise UsageError("part='held_out' needs a hold-out. Add holdout=0.05 (or a number of rows).")
    return settings
