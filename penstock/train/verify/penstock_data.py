"""Facts about data prepared by Penstock: cache hit or miss, masks, packing, and whether batches are prefetched.

Counts come from the dataset's ledger and from batches of the configured loader. Prefetching is tested by experiment:
with a pause between batches, the wait for the next one must be much shorter than collating it takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from penstock.build.explain import Explanation, explain
from penstock.build.options import prepare_options
from penstock.load.example import Example, Pair
from penstock.load.loader import Loader, open_loader
from penstock.load.options import Collate
from penstock.load.view import Served
from penstock.prepare.chat.conversation import Part, Role
from penstock.train.config import TrainConfig
from penstock.train.data import open_data, tokenizer_of
from penstock.train.verify.observations import DataFacts

SAMPLE = 200  # items whose masks are examined
BATCHES = 6


def explanations(config: TrainConfig) -> Iterator[Explanation]:
    """Explains the cache hit or miss of each source; prepared datasets used as sources are skipped."""
    for source in config.data.sources:
        if len(source.path) == 1 and (Path(source.path[0]).expanduser() / "manifest.json").is_file():
            continue
        revision = config.model.revision if config.model.tokenizer is None else None
        options = {"tokenizer": tokenizer_of(config.model), "tokenizer_revision": revision}
        options |= {**config.data.prepare, **source.prepare}
        chosen = prepare_options({name: value for name, value in options.items() if value is not None})
        yield explain(list(source.path), chosen)


def is_hit(config: TrainConfig) -> bool:
    """Whether all sources are already prepared."""
    return all(found.hit for found in explanations(config))


def data_facts(config: TrainConfig, hit: bool, reasons: list[str]) -> DataFacts:
    """Examines the data that a configuration trains on; `config` may be limited to the first rows."""
    served = open_data(
        replace(config, view=replace(config.view, holdout=None), eval=replace(config.eval, sources=()))
    ).train
    ledger = served.ledger
    runs, ended = _stops(served)
    loader = _loader(config, served)
    collate, waits, pause = _time_prefetch(loader)
    return {
        "hit": hit,
        "reasons": reasons,
        "rows": ledger.rows,
        "kept": ledger.kept,
        "tokens": ledger.tokens,
        "trained": ledger.trained,
        "untrained_rows": ledger.dropped_rows.get("no_trained_token", 0),
        "stops": runs,
        "stops_trained": ended,
        "packed": config.loader.collate is Collate.PACKED,
        "efficiency": _efficiency(loader),
        "prefetch": config.loader.prefetch,
        "collate_seconds": collate,
        "waits": waits,
        "step_seconds": pause,
    }


def _loader(config: TrainConfig, served: Served) -> Loader:
    # It looks at the data alone, whoever started it.
    options = replace(config.loader, seed=config.seed, epochs=None, steps=BATCHES + 1, rank=0, world_size=1)
    return open_loader(served, replace(options, micro_batch=None))


def _time_prefetch(loader: Loader) -> tuple[float, list[float], float]:
    """Seconds to collate a batch, the waits for batches requested with a pause in between, and that pause."""
    started = time.perf_counter()
    for step in range(3):
        loader.batch(step)
    collate = (time.perf_counter() - started) / 3
    pause = max(3 * collate, 0.01)
    waits: list[float] = []
    feed = iter(loader)
    for _ in range(BATCHES):
        before = time.perf_counter()
        next(feed)
        waits.append(time.perf_counter() - before)
        time.sleep(pause)
    loader.close()
    return collate, waits[1:], pause


def _efficiency(loader: Loader) -> float | None:
    """The fill of packed rows; None if rows are padded."""
    capacity = loader.settings.capacity
    if capacity is None:
        return None
    counts = [loader.batch(step).counts for step in range(min(BATCHES, loader.steps or 1))]
    rows = sum(loader.settings.batch_size - count.filler_rows for count in counts)
    return sum(count.tokens for count in counts) / max(rows * capacity, 1)


def _stops(served: Served) -> tuple[int, int]:
    """The number of trained turns in a sample, and of those that end with a stop token."""
    stops = _stop_tokens(served)
    turns = ended = 0
    for number in range(min(SAMPLE, len(served))):
        item = served[number]
        for example in (item.chosen, item.rejected) if isinstance(item, Pair) else (item,):
            last = _turn_ends(example)
            found = [int(example.input_ids[end]) in stops for end in last]
            if last[-1:] == [len(example) - 1] and not found[-1]:  # it may have been truncated
                found.pop()
            turns += len(found)
            ended += sum(found)
    return turns, ended


def _turn_ends(example: Example) -> list[int]:
    """The last trained token of each assistant message, not counting white space after its stop."""
    runs = example.runs
    written = runs.by(Role.ASSISTANT) & ~runs.of_part(Part.TAIL)
    trained = np.flatnonzero(written.repeat(runs.lengths) & example.loss_mask)
    messages = runs.messages.repeat(runs.lengths)[trained]
    ends: list[int] = trained[np.append(messages[1:] != messages[:-1], True)[: len(trained)]].tolist()
    return ends


def _stop_tokens(served: Served) -> set[int]:
    """The tokens that end the stop segments of the first shard of each view."""
    found: set[int] = set()
    for view in served.views:
        columns = view.dataset.shards.columns(0)
        chosen = np.flatnonzero(columns.segment_parts == Part.STOP)[:2000]
        owner = np.searchsorted(columns.segment_offsets, chosen, side="right") - 1
        ends = columns.segment_ends[chosen].astype(np.int64) + columns.id_offsets[owner]
        found |= {int(token) for token in np.unique(columns.ids[ends - 1])}
    return found
