"""The options of views and loaders: each is declared here, once, and a training configuration nests these records.

Some defaults depend on the data: an option that is None has such a default, and resolving a record returns the same
record with these filled in. Exports, states and checkpoints hold digests of views and plans, so digests hash the names
of `stored`, which never change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import orjson
from annotated_types import Ge, Gt, Lt
from blake3 import blake3

from penstock.errors import UsageError
from penstock.load.parts import part_table
from penstock.options import option, read_options
from penstock.ranks import Ranks, launched

if TYPE_CHECKING:
    from penstock.arguments import LoaderArguments, ViewArguments
    from penstock.load.view import Served


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


class HoldoutSide(StrEnum):
    """The side of the hold-out that a view serves."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class LossMask(NamedTuple):
    """What decides the loss weight of a token: which messages are trained, which of their parts, and how much."""

    policy: LossPolicy
    parts: str = ""
    weights: tuple[tuple[str, float], ...] = ()


FORMER = {"holdout_side": "part"}  # names under which options of a view are stored, where they differ


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The options of a view."""

    train_on: LossPolicy | None = option(
        f"Loss policy: {', '.join(LossPolicy)}; default: all_assistant_messages, for KTO rows last_assistant_message, "
        "for adopted data customized"
    )
    parts: str = option(
        "Parts of assistant messages to train (content,stop), or changes of the default (-reasoning,+tail); "
        "default: body,stop",
        "",
    )
    part_weights: Mapping[str, float] = option(
        "Loss weights of parts (reasoning=0.3), multiplied with those of messages",
        {},
        flag="part-weight",
        expects="names of parts, each with a number of 0 or more",
    )
    max_length: Annotated[int, Ge(1)] | None = option(
        "Longest sequence, in tokens", expects="a number of tokens of 1 or more, or None for no limit"
    )
    overlong: Overlong = option("Longer rows: " + ", ".join(Overlong), Overlong.TRUNCATE)
    regions_unknown: UnknownRegions = option(
        "Rows with unknown regions: " + ", ".join(UnknownRegions), UnknownRegions.ERROR
    )
    holdout: Annotated[float, Gt(0), Lt(1)] | Annotated[int, Ge(1)] | None = option(
        "Rows to hold out: a fraction or a number",
        expects="a fraction between 0 and 1 (0.05), a number of rows of 1 or more, or None to hold nothing out",
    )
    holdout_side: HoldoutSide = option("Side of the hold-out: " + ", ".join(HoldoutSide), HoldoutSide.TRAIN)
    holdout_seed: Annotated[int, Ge(0), Lt(2**64)] = option(
        "Seed of the hold-out", 0, expects="an integer from 0 to 2**64 - 1"
    )

    @property
    def policy(self) -> LossPolicy:
        """The loss policy of a view, whose options are resolved."""
        assert self.train_on is not None
        return self.train_on

    @property
    def mask(self) -> LossMask:
        """What decides the loss weights of a view, whose options are resolved."""
        return LossMask(self.policy, self.parts, tuple(sorted(self.part_weights.items())))

    @property
    def stored(self) -> dict[str, Any]:
        """The options of a view by the names under which they are stored, newer ones only if they are given."""
        values = {**asdict(self), "train_on": self.policy}
        for name in ("parts", "part_weights"):
            if not values[name]:
                del values[name]
        return {FORMER.get(name, name): value for name, value in values.items()}

    def digest(self, key: str) -> str:
        """A stable name for this view of the dataset with this key."""
        canonical = orjson.dumps({"view": 1, "dataset": key, **self.stored}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"


def view_options(options: ViewArguments, base: ViewOptions | None = None) -> ViewOptions:
    """Validate options on top of `base` (or of the defaults)."""
    settings = read_options(ViewOptions, {**asdict(base or ViewOptions()), **options}, "a view")
    if settings.holdout_side is HoldoutSide.HELD_OUT and settings.holdout is None:
        raise UsageError("holdout_side='held_out' needs a hold-out. Add holdout=0.05 (or a number of rows).")
    if settings.train_on is LossPolicy.ALL_TOKENS and (settings.parts or settings.part_weights):
        raise UsageError(
            "parts and part_weights choose among parts of messages, but train_on='all_tokens' trains everything. "
            "Use another train_on, or leave them out."
        )
    part_table(settings.parts, tuple(settings.part_weights.items()))
    return settings


# ---- plans and loaders -----------------------------------------------------------------------------------------------


log = logging.getLogger("penstock")
Positive = Annotated[int, Ge(1)]


class IncompleteStep(StrEnum):
    """What to do if an epoch's rows don't fill its last step."""

    FILL = "fill"  # fill up with rows without loss
    DROP = "drop"  # skip the step
    WRAP = "wrap"  # fill up with the epoch's first rows


class PaddingSide(StrEnum):
    """Where padding goes."""

    RIGHT = "right"
    LEFT = "left"


class Collate(StrEnum):
    """The layout of a batch."""

    PADDED = "padded"
    PACKED = "packed"
    PAIRS = "pairs"
    TREE = "tree"


class Framework(StrEnum):
    """The array library of a batch's tensors."""

    NUMPY = "numpy"
    TORCH = "torch"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options that decide which rows a step holds; ranks and prefetching have no influence.

    A row is a sequence, a pair or, with a capacity, a bin of packed sequences.
    """

    batch_size: Positive = option("Rows per step over all ranks: sequences, pairs or packed rows", MISSING)
    capacity: Positive | None = option("Tokens per packed row; default: the view's max_length")
    align: Positive = option("Packed: round each sequence up to a multiple of this many tokens, within the capacity", 1)
    seed: Annotated[int, Ge(0)] = option("Seed of the order", 0)
    shuffle: bool = option("Reshuffle every epoch", True)
    incomplete_step: IncompleteStep = option(
        "An incomplete last step of an epoch: fill (with rows without loss), drop, wrap (to its first rows)",
        IncompleteStep.FILL,
    )

    @property
    def stored(self) -> dict[str, Any]:
        """The options of the plan, also of a loader's, by the names under which they are stored."""
        renamed = {"incomplete_step": "tail"}
        return {renamed.get(entry.name, entry.name): getattr(self, entry.name) for entry in fields(PlanOptions)}

    @property
    def digest(self) -> str:
        """A stable digest of the plan's options."""
        canonical = orjson.dumps({"plan": 1, **self.stored, "seed": str(self.seed)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions(PlanOptions):
    """The options of `view.loader(…)`."""

    collate: Collate | None = option(
        f"Layout of a batch: {', '.join(Collate)}; default: pairs on preference data, else padded"
    )
    epochs: Positive | None = option("Passes over the data [default: 1, unless steps is given]")
    steps: Positive | None = option("Steps, instead of epochs")
    rank: Annotated[int, Ge(0)] | None = option("This data-parallel rank; default: the launcher's, else 0")
    world_size: Positive | None = option("Number of data-parallel ranks; default: the launcher's, else 1")
    micro_batch: Positive | None = option(
        "Rows per micro-batch; default: all of a rank's rows of a step; in training, one packed row"
    )
    prefetch: Annotated[int, Ge(0)] = option("Batches prefetched in the background; 0: collate in the loop", 2)
    padding_side: PaddingSide = option("Padded and pairs: where padding goes", PaddingSide.RIGHT)
    pad_to_multiple_of: Positive = option("Pad to a multiple of this many tokens", 1)
    pad_to_capacity: bool = option("Packed: pad rows to capacity, for batches of one shape", False)
    pad_id: Annotated[int, Ge(0)] | None = option("Padding token; default: the tokenizer's pad token, else EOS, else 0")
    loss_weights: bool = option("Include per-token loss weights", True)
    framework: Framework = option(f"Array library: {', '.join(Framework)}", Framework.NUMPY)
    pin_memory: bool = option("torch: allocate batches in pinned memory", False)
    device: str | None = option("torch: device to copy batches to")

    @property
    def ranks(self) -> tuple[int, int]:
        """Rank and world size of a loader, whose options are resolved."""
        assert self.rank is not None and self.world_size is not None
        return self.rank, self.world_size


def loader_options(served: Served, arguments: LoaderArguments) -> LoaderOptions:
    """Validated and resolved options for feeding this view or mixture."""
    return resolved(served, read_options(LoaderOptions, arguments, "a loader"))


def resolved(served: Served, options: LoaderOptions) -> LoaderOptions:
    """The same options with every default filled in for this view or mixture."""
    collate = _collate(served, options)
    rank, world_size = _ranks(options)
    if options.framework is Framework.NUMPY and (options.pin_memory or options.device is not None):
        raise UsageError("pin_memory and device apply to torch tensors only. Add framework='torch'.")
    if options.pad_to_capacity and collate is not Collate.PACKED:
        raise UsageError("pad_to_capacity applies to packed rows only. Use pad_to_multiple_of for padded ones.")
    if options.epochs is not None and options.steps is not None:
        raise UsageError(
            f"epochs={options.epochs} and steps={options.steps} both set the length of the run. Give one of them."
        )
    return replace(
        options,
        collate=collate,
        capacity=_capacity(served, options, collate),
        epochs=1 if options.steps is None and options.epochs is None else options.epochs,
        rank=rank,
        world_size=world_size,
    )


def _capacity(served: Served, options: LoaderOptions, collate: Collate) -> int | None:
    """The default is the `max_length` that all views share."""
    if collate is not Collate.PACKED:
        if options.capacity is not None or options.align > 1:
            remedy = "Leave them out: pairs can't be packed." if collate is Collate.PAIRS else "Use 'packed'."
            raise UsageError(f"capacity and align apply to packed rows, but collate is {collate.value!r}. {remedy}")
        return None
    if options.capacity is None and served.max_length is None:
        raise UsageError("packing needs a capacity: give capacity=8192, or the view a max_length.")
    return options.capacity or served.max_length


def _collate(served: Served, options: LoaderOptions) -> Collate:
    collate = options.collate or (Collate.PAIRS if served.is_preference else Collate.PADDED)
    if (collate is Collate.PAIRS) != served.is_preference:
        kind, wanted = (
            ("preference pairs", "pairs") if served.is_preference else ("single examples", "padded, packed or tree")
        )
        raise UsageError(f"collate={collate.value!r} does not fit: the view serves {kind}. Use {wanted}.")
    return collate


def _ranks(options: LoaderOptions) -> tuple[int, int]:
    """Rank and world size, explicit or from the launcher, so that two ranks never serve the same rows by accident."""
    rank, world_size = options.rank, options.world_size
    if rank is None or world_size is None:
        found = launched()
        if rank is None and world_size is None and found is not None:
            _log_rank(found)
        elif rank is None and world_size is not None and found is not None and found.world_size != world_size:
            raise UsageError(
                f"world_size={world_size}, but {found.said_by} say {found.world_size}. Give the rank, too."
            )
        elif rank is None and found is None and (world_size or 1) > 1:
            raise UsageError(f"world_size={world_size} without a rank. Give the rank, from 0 on.")
        given = found or Ranks(0, 1, "")
        rank = given.rank if rank is None else rank
        world_size = given.world_size if world_size is None else world_size
    if rank >= world_size:
        raise UsageError(f"rank={rank} of world_size={world_size}: ranks count from 0 to world_size - 1.")
    return rank, world_size


@cache
def _log_rank(found: Ranks) -> None:
    """Log the rank once per process. Warn if only Slurm sets it: a batch script may request tasks it never starts."""
    log.log(logging.WARNING if found.is_outer else logging.INFO, "loaders serve rank %d of %d, as %s say", *found[:3])
