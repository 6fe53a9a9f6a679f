"""The loader: iterates over the batches of a view or a mixture, prefetched and resumable at any batch.

A batch is a pure function of (dataset, view, plan settings, seed, step); the prefetch thread only changes when it is
computed.

Iteration starts at the first batch, or at the position set by `load_state_dict` or `seek`. A state names the next batch
to serve; batches that were prefetched but not served do not count. Each iterator owns one thread, which stops when the
iterator is exhausted, closed or garbage collected, and serves one thread at a time. Memory: 5 bytes a row when packed,
none when padded (mixtures: 4).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from types import TracebackType
from typing import Any, Final, Self, Unpack

from penstock.arguments import LoaderArguments
from penstock.errors import FeedError, StoreError
from penstock.load.assemble import Assembler
from penstock.load.collate import Batch
from penstock.load.gather import Downloads
from penstock.load.options import Collate, Framework, LoaderOptions, loader_options, resolved
from penstock.load.plan import Plan
from penstock.load.prefetch import Prefetcher
from penstock.load.view import Served
from penstock.prepare.recipe import recipe_differences
from penstock.store.manifest import read_manifest

# ---- state -----------------------------------------------------------------------------------------------------------
#
# A loader's state: the position of a run and the dataset, view and plan it belongs to, as plain JSON values.
#
# Rank, world size, micro-batches, prefetching and padding are not part of the state: the rows of a step don't depend on
# them, so a run can resume at the same step with different values. Resuming inside a step requires the same values.
# Digests decide; the settings beside them are for the error that names what differs.


_VERSION: Final = 1
_MISMATCHES: Final = {
    "dataset": "another dataset",
    "view": "another view of the dataset (loss policy, max_length, hold-out, mixture, …)",
    "plan": "another plan (collate, batch_size, capacity, align, seed, shuffle or incomplete_step)",
}
_START_NEW: Final = "Open the loader with the settings of the run that saved it, or start a new run."


def state_of(served: Served, settings: LoaderOptions, step: int, micro: int, micros: int) -> dict[str, Any]:
    """The state in which this batch is the next one."""
    return {
        "version": _VERSION,
        **_identity(served, settings),
        "step": step,
        "micro": micro,
        "world_size": settings.world_size,
        "micros": micros,
        "settings": _settings(served, settings),
    }


def _settings(served: Served, settings: LoaderOptions) -> dict[str, str]:
    """What the digests of view and plan depend on, as it is written in Python, to name what differs."""
    found: dict[str, Any] = {"collate": settings.collate, **settings.stored}
    if served.single is not None:
        found |= asdict(served.single.settings)
    else:
        found["seed of the mixture"] = served.seed
        for name, (view, amount) in served.members.items():
            found[f"{name}: amount"] = amount
            found |= {f"{name}: {option}": value for option, value in asdict(view.settings).items()}
    return {name: repr(value.value if isinstance(value, StrEnum) else value) for name, value in found.items()}


def _mismatch(name: str, state: Mapping[str, Any], served: Served, settings: LoaderOptions) -> str:
    """Why a state does not fit: the settings that differ. Older states lack some settings, or all of them."""
    if name == "dataset":
        return f"another dataset{_other_recipe(state[name], served)}"
    own, saved = _settings(served, settings), state.get("settings")
    if not isinstance(saved, Mapping) or not (differing := [o for o in own if o in saved and own[o] != saved[o]]):
        return _MISMATCHES[name]
    then, now = (", ".join(f"{option}={values.get(option)}" for option in differing) for values in (saved, own))
    return f"another {name}: it was saved with {then}, and this loader has {now}"


def _other_recipe(key: object, served: Served) -> str:
    """How another dataset was prepared, if it is in the same cache."""
    if served.single is None:
        return ""
    dataset = served.single.dataset
    try:
        other = read_manifest(dataset.cache.find_dataset(str(key)))
    except (StoreError, ValueError):
        return f" ({key})"
    differing = recipe_differences(other.recipe, dataset.recipe, lambda _: None) or ["other rows"]
    return f" ({str(key)[:11]}). From it to this loader's: {'; '.join(differing)}"


def _identity(served: Served, settings: LoaderOptions) -> dict[str, Any]:
    plan = settings.digest
    if settings.collate is Collate.TREE:  # its steps count rows of trees, with otherwise equal settings
        plan += "-tree"
    return {"dataset": served.dataset_keys, "view": served.digest, "plan": plan}


def checked_state(state: Mapping[str, Any], served: Served, settings: LoaderOptions, micros: int) -> tuple[int, int]:
    """The step and micro-batch to resume at. Raises if the state belongs to another run."""
    if not isinstance(state, Mapping):
        raise FeedError(f"not a loader state: {state!r:.80} is no mapping. Use what `state_dict()` returned.")
    missing = {"version", *_MISMATCHES, "step", "micro", "world_size", "micros"} - set(state)
    if missing:
        raise FeedError(f"not a loader state: {', '.join(sorted(missing))} missing. Use `state_dict()`.")
    if state["version"] != _VERSION:
        raise FeedError(f"the state has version {state['version']!r}, and this Penstock reads version {_VERSION}.")
    for name, value in _identity(served, settings).items():
        if state[name] != value:
            raise FeedError(f"the state belongs to {_mismatch(name, state, served, settings)}. {_START_NEW}")
    step, micro, of = state["step"], state["micro"], state["micros"]
    if any(type(number) is not int for number in (step, micro, of)) or step < 0 or not 0 <= micro < max(of, 1):
        raise FeedError(f"the state is damaged: step={step!r}, micro={micro!r} of {of!r}. Use another one.")
    if micro and (state["world_size"], state["micros"]) != (settings.world_size, micros):
        raise FeedError(
            f"the state is inside step {step}, after {micro} of {state['micros']} micro-batches on "
            f"{state['world_size']} ranks; with {micros} on {settings.world_size} ranks it can't resume there. "
            "Save states between steps, or resume with the same ranks and micro_batch."
        )
    return step, micro


# ---- loader ----------------------------------------------------------------------------------------------------------


class Loader:
    """Iterates over the batches of one rank."""

    def __init__(self, served: Served, **options: Unpack[LoaderArguments]) -> None:
        self._start(served, loader_options(served, options), 0)

    def _start(self, served: Served, settings: LoaderOptions, position: int) -> None:
        self.served = served
        self.settings = settings
        self._assemble = Assembler(served, settings)
        self._download_bytes = self._assemble.download_bytes
        self._position = position  # the next batch, as recorded in a state
        self._entry = position  # where the next iteration starts
        self._feeds: weakref.WeakSet[Feed] = weakref.WeakSet()
        self.steps = settings.steps if settings.epochs is None else self.plan.steps(settings.epochs)

    @property
    def plan(self) -> Plan:
        """The plan that assigns rows to steps."""
        return self._assemble.plan

    @property
    def micros(self) -> int:
        """Micro-batches per step, the same on every rank."""
        return self._assemble.micros

    @property
    def first(self) -> int:
        """Index of the first batch of the next iteration, in micro-batches."""
        return self._entry

    def __len__(self) -> int:
        """The number of batches in the whole run, on every rank."""
        assert self.steps is not None
        return self.steps * self.micros

    def batch(self, step: int, micro: int = 0) -> Batch:
        """Compute any batch, without moving the iteration."""
        if not 0 <= micro < self.micros:
            raise IndexError(f"micro-batch {micro} of {self.micros}")
        return _received(self._produce()(step * self.micros + micro))

    def __iter__(self) -> Feed:
        first, self._entry = self._entry, 0
        feed = Feed(self, first)
        self._feeds.add(feed)
        return feed

    def seek(self, step: int) -> None:
        """Start the next iteration at this step. Running iterations are closed."""
        self._move(step, 0)

    def state_dict(self) -> dict[str, Any]:
        """The position of the run, as plain JSON values; `step` is the step of the next batch."""
        return state_of(self.served, self.settings, *divmod(self._position, self.micros), self.micros)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Start the next iteration at a saved state, which must have the same dataset, view and plan."""
        self._move(*checked_state(state, self.served, self.settings, self.micros))

    def _move(self, step: int, micro: int) -> None:
        assert self.steps is not None
        if not 0 <= step <= self.steps:
            raise FeedError(f"step {step} is beyond this run's {self.steps} steps. Raise epochs or steps to continue.")
        self.close()
        self._position = self._entry = step * self.micros + micro

    def close(self) -> None:
        """Close all running iterations and stop their threads."""
        for feed in list(self._feeds):
            feed.close()

    def _produce(self) -> _Producer:
        return _Producer(self._assemble, self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, tuple[Served, LoaderOptions, int]]:
        return _restored, (self.served, self.settings, self._entry)

    def __repr__(self) -> str:
        return f"Loader({self.settings.collate}, {self.steps} steps of {self.settings.batch_size} rows)"


def open_loader(served: Served, options: LoaderOptions) -> Loader:
    """A loader with the options of a record."""
    return _restored(served, resolved(served, options), 0)


def _restored(served: Served, settings: LoaderOptions, position: int) -> Loader:
    loader = Loader.__new__(Loader)
    loader._start(served, settings, position)
    return loader


class _Producer:
    """Computes a batch from its index. It references neither loader nor iterator, so both can be collected."""

    def __init__(self, assemble: Assembler, settings: LoaderOptions) -> None:
        self._assemble = assemble
        self._convert = None
        if settings.framework is Framework.TORCH:
            from penstock.load.torch_datasets import TensorConverter

            self._convert = TensorConverter(settings.pin_memory, settings.device)

    def __call__(self, index: int) -> Batch:
        batch = self._assemble(index)
        return batch if self._convert is None else batch.holding(self._convert(batch.tensors))


class Feed:
    """One iteration over a loader's batches, for one thread at a time."""

    def __init__(self, loader: Loader, first: int) -> None:
        self._loader = loader
        self._last = len(loader)
        self._micros = loader.micros
        self._next = first
        self._busy = threading.Lock()
        self._downloads = None
        if loader._download_bytes:
            self._downloads = Downloads(loader._assemble.shards, first, self._last, loader._download_bytes)
        self._prefetcher = Prefetcher(loader._produce(), first, self._last, loader.settings.prefetch)

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Batch:
        if not self._busy.acquire(blocking=False):
            raise FeedError(
                "two threads called next() on one iterator of a loader at the same time. Let one thread take the "
                "batches and hand them on, or give each thread its own iter(loader)."
            )
        try:
            return self._take()
        finally:
            self._busy.release()

    def _take(self) -> Batch:
        index = self._next
        if index >= self._last:
            self.close()
            raise StopIteration
        try:
            batch = self._prefetcher.get(index)
            if batch.step * self._micros + batch.micro != index:
                raise FeedError(
                    f"batch {index} was requested but step {batch.step}, micro-batch {batch.micro} was produced. "
                    "This is a bug; nothing was served."
                )
            received = _received(batch)
        except BaseException:
            self.close()
            raise
        self._next = index + 1
        if self._downloads is not None:
            self._downloads.served(index)
        self._loader._position = self._next
        return received

    def close(self) -> None:
        """Stop the threads. A closed iteration can't be resumed."""
        if self._downloads is not None:
            self._downloads.close()
        self._prefetcher.close()


def _received(batch: Batch) -> Batch:
    """Wait until a batch's tensors are on their device."""
    receive = getattr(batch.tensors, "receive", None)
    return batch if receive is None else batch.holding(receive())
