"""The options of a view: a frozen record of plain values with a stable digest."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated

import orjson
from annotated_types import Ge, Gt, Lt
from blake3 import blake3

from penstock.errors import UsageError
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


class HoldoutPart(StrEnum):
    """The side of the hold-out that a view serves."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The options of a view, validated by `view_options()`."""

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


def view_options(options: ViewArguments, base: ViewOptions | None = None) -> ViewOptions:
    """Validate options on top of `base` (or of the defaults)."""
    settings = read_options(ViewOptions, {**asdict(base or ViewOptions()), **options}, "a view")
    if settings.part is HoldoutPart.HELD_OUT and settings.holdout is None:
        raise UsageError("part='held_out' needs a hold-out. Add holdout=0.05 (or a number of rows).")
    return settings


# ---- settings --------------------------------------------------------------------------------------------------------
#
# The settings that determine which rows a step holds; ranks and prefetching have no influence.


class Tail(StrEnum):
    """What to do if an epoch's rows don't fill its last step."""

    FILL = "fill"  # fill up with rows without loss
    DROP = "drop"  # skip the step
    WRAP = "wrap"  # fill up with the epoch's first rows


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Settings of a plan. A row is a sequence, a pair or, with a capacity, a bin of packed sequences."""

    batch_size: int  # rows in a global step
    capacity: int | None = None
    align: int = 1  # sequences in a bin are padded to a multiple of it
    seed: int = 0
    shuffle: bool = True
    tail: Tail = Tail.FILL

    @property
    def digest(self) -> str:
        """A stable digest of these settings."""
        canonical = orjson.dumps({"plan": 1, **asdict(self), "seed": str(self.seed)}, option=orjson.OPT_SORT_KEYS)
        return f"b3-{blake3(canonical).hexdigest()}"


# ---- settings --------------------------------------------------------------------------------------------------------
#
# The options of a loader. Those that decide which rows a step holds are in `PlanOptions`.


log = logging.getLogger("penstock")


class Side(StrEnum):
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


Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The options of `view.loader(…)`."""

    batch_size: Count | None = option("Rows per step over all ranks: sequences, pairs or packed rows")
    collate: Collate | None = option(
        f"Layout of a batch: {', '.join(Collate)}; default: pairs on preference data, else padded"
    )
    capacity: Count | None = option("Tokens per packed row; default: the view's max_length")
    align: Count = option("Packed: round each sequence up to a multiple of this many tokens", 1)
    seed: Annotated[int, Ge(0)] = option("Seed of the order", 0)
    shuffle: bool = option("Reshuffle every epoch", True)
    epochs: Count | None = option("Passes over the data [default: 1, unless steps is given]")
    steps: Count | None = option("Steps, instead of epochs")
    tail: Tail = option("What to do with an incomplete last step of an epoch: fill, drop, wrap", Tail.FILL)
    rank: Annotated[int, Ge(0)] | None = option("This data-parallel rank; default: the launcher's, else 0")
    world_size: Count | None = option("Number of data-parallel ranks; default: the launcher's, else 1")
    micro_batch: Count | None = option("Rows per micro-batch; default: all of a rank's rows of a step")
    ahead: Annotated[int, Ge(0)] = option("Batches prefetched in the background; 0: collate in the loop", 2)
    side: Side = option("Padded and pairs: where padding goes", Side.RIGHT)
    pad_to_multiple_of: Count = option("Padded and pairs: pad to a multiple of this many tokens", 1)
    pad_to_capacity: bool = option("Packed: pad rows to capacity, so that all batches have the same shape", False)
    pad_id: Annotated[int, Ge(0)] | None = option("Padding token; default: the tokenizer's pad token, else EOS")
    loss_weights: bool = option("Include per-token loss weights in batches", True)
    framework: Framework = option("Array library of the tensors: numpy, torch", Framework.NUMPY)
    pin_memory: bool = option("torch: allocate batches in pinned memory", False)
    device: str | None = option("torch: device to copy batches to")


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """The options of a loader with every default resolved. Built by `loader_options()`."""

    plan: PlanOptions
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


def loader_options(served: Served, arguments: LoaderArguments) -> LoaderSettings:
    """Validated settings for feeding this view or mixture."""
    options = read_options(LoaderOptions, arguments, "a loader")
    collate = _collate(served, options)
    rank, world_size = _ranks(options)
    if options.framework is Framework.NUMPY and (options.pin_memory or options.device is not None):
        raise UsageError("pin_memory and device apply to torch tensors only. Add framework='torch'.")
    if options.pad_to_capacity and collate is not Collate.PACKED:
        raise UsageError("pad_to_capacity applies to packed rows only. Use pad_to_multiple_of for padded ones.")
    epochs, steps = _end(options)
    return LoaderSettings(
        plan=_plan(served, options, collate),
        collate=collate,
        epochs=epochs,
        steps=steps,
        rank=rank,
        world_size=world_size,
        micro_batch=options.micro_batch,
        ahead=options.ahead,
        side=options.side,
        pad_to_multiple_of=options.pad_to_multiple_of,
        pad_to_capacity=options.pad_to_capacity,
        pad_id=options.pad_id,
        loss_weights=options.loss_weights,
        framework=options.framework,
        pin_memory=options.pin_memory,
        device=options.device,
    )


def _plan(served: Served, options: LoaderOptions, collate: Collate) -> PlanOptions:
    if options.batch_size is None:
        raise UsageError("a loader needs batch_size: the rows of a step over all ranks.")
    packed, capacity = collate is Collate.PACKED, options.capacity
    if not packed and (capacity is not None or options.align > 1):
        remedy = "Leave them out: pairs can't be packed." if collate is Collate.PAIRS else "Use 'packed'."
        raise UsageError(f"capacity and align apply to packed rows, but collate is {collate.value!r}. {remedy}")
    if packed and capacity is None:
        capacity = _max_length(served)
    return PlanOptions(
        batch_size=options.batch_size,
        capacity=capacity,
        align=options.align,
        seed=options.seed,
        shuffle=options.shuffle,
        tail=options.tail,
    )


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


def _max_length(served: Served) -> int:
    """The default capacity: the `max_length` that all views share."""
    if served.max_length is None:
        raise UsageError("packing needs a capacity: give capacity=8192, or the view a max_length.")
    return served.max_length


def _end(options: LoaderOptions) -> tuple[int | None, int | None]:
    epochs, steps = options.epochs, options.steps
    if epochs is not None and steps is not None:
        raise UsageError(f"epochs={epochs} and steps={steps} both set the length of the run. Give one of them.")
    return (1, None) if epochs is None and steps is None else (epochs, steps)
