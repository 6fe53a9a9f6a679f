"""Adapters for trainers that do their own sampling: `transformers.Trainer`, TRL, any torch `DataLoader`.

`MapRows(view)` is a map-style dataset of sequences or, with a capacity, of packed rows. `Collator` batches its rows.
`hf_dataset(rows)` wraps it in a `datasets.Dataset`, which TRL requires; it stores row numbers and reads the view on
access. `Stream(loader)` serves a loader's batches to `DataLoader(batch_size=None)`; with n DataLoader workers, each
produces every n-th batch, which gives the same batches in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock.arrays import Int64
from penstock.errors import UsageError
from penstock.load.assemble import pad_token
from penstock.load.collate import Arrays, Padding, packed, padded
from penstock.load.example import IGNORED
from penstock.load.gather import Gathered, Gatherer
from penstock.load.loader import Loader
from penstock.load.options import PaddingSide, PlanOptions
from penstock.load.plan import Plan
from penstock.load.view import Served

if TYPE_CHECKING:
    import datasets

Feature = dict[str, Any]


class MapRows(Dataset[Feature]):
    """Rows by number: `input_ids` and `labels`; packed rows also have `position_ids` and `seq_lengths`."""

    def __init__(self, served: Served, capacity: int | None = None, seed: int = 0) -> None:
        """One row per example; with a capacity, packed rows, which `set_epoch` packs differently."""
        if served.is_preference:
            raise UsageError("a view of preference pairs has no rows of single examples. Use view.loader().")
        self.served, self.capacity, self.seed = served, capacity, seed
        self._epoch = torch.zeros(1, dtype=torch.int64)
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that persist see it change
        self._plan = Plan(served, PlanOptions(1, capacity, seed=seed, shuffle=capacity is not None))
        self._gather = Gatherer(served)

    def __len__(self) -> int:
        return self._plan.steps_in(self.epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the plan that is served."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Serve this epoch of the plan, in this process and in its DataLoader workers; call it between epochs."""
        self._epoch.fill_(epoch)

    def __getitem__(self, row: int) -> Feature:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[Feature]:
        """Read several rows at once."""
        count = len(self)
        for row in rows:
            if not 0 <= row < count:
                raise IndexError(f"row {row} of {count}")
        taken = self._plan.take(self.epoch, np.asarray(rows, np.int64))
        found = self._gather(taken.items)
        ends, lasts = np.cumsum(found.lengths), np.cumsum(taken.counts)
        labels = np.where(found.weights > 0, found.ids, IGNORED)
        if self.capacity is not None:
            labels[ends - found.lengths] = IGNORED
        firsts = (lasts - taken.counts).tolist()
        owned = [slice(first, last) for first, last in zip(firsts, lasts.tolist(), strict=True)]
        return [self._feature(found, labels, own, ends) for own in owned]

    def _feature(self, found: Gathered, labels: Int64, own: slice, ends: Int64) -> Feature:
        lengths = found.lengths[own]
        tokens = slice(int(ends[own.start] - lengths[0]), int(ends[own.stop - 1]))
        feature: Feature = {"input_ids": found.ids[tokens], "labels": labels[tokens]}
        if self.capacity is not None:
            starts = np.cumsum(lengths) - lengths
            feature["position_ids"] = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
            feature["seq_lengths"] = lengths.tolist()
        return feature

    def __reduce__(self) -> tuple[type[MapRows], tuple[Served, int | None, int], torch.Tensor]:
        return MapRows, (self.served, self.capacity, self.seed), self._epoch

    def __setstate__(self, epoch: torch.Tensor) -> None:
        self._epoch = epoch
        self._epoch.share_memory_()  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: object) -> MapRows:
        return self  # `datasets` copies what it transforms with; copies serve the same epoch


class Collator:
    """Batches `MapRows` rows: padded or, if rows are packed or `flatten` is set, as one row [1, ΣT].

    `position_ids` separate the sequences; unlike other columns, they survive trainers that drop unknown columns.
    """

    def __init__(
        self, rows: MapRows, *, flatten: bool = False, padding_side: str = "right", pad_to_multiple_of: int = 1
    ) -> None:
        self._flatten = flatten or rows.capacity is not None
        self._padding = Padding(pad_token(rows.served), PaddingSide(padding_side), pad_to_multiple_of)
        self._convert = TensorConverter(pin_memory=False, device=None)

    def __call__(self, features: Sequence[Feature]) -> dict[str, Any]:
        """The arguments of a model's `forward`."""
        ids = np.concatenate([feature["input_ids"] for feature in features])
        labels = np.concatenate([feature["labels"] for feature in features])
        lengths = np.array([len(feature["input_ids"]) for feature in features], np.int64)
        if self._flatten and "position_ids" in features[0]:
            starts = np.flatnonzero(np.concatenate([feature["position_ids"] for feature in features]) == 0)
            lengths = np.diff(np.append(starts, len(ids)))
        found = Gathered(ids, (labels != IGNORED).astype(np.float32), lengths, ids[:0], ids[:0])
        arrays: Arrays
        arrays, _ = packed(found, 1, 0, self._padding) if self._flatten else padded(found, 0, self._padding)
        del arrays["loss_weights"]
        tensors = self._convert(arrays)
        return {**tensors, "use_cache": False} if self._flatten else tensors  # as in `Batch.inputs`


def hf_dataset(rows: MapRows) -> datasets.Dataset:
    """A lazy `datasets.Dataset` of row numbers; trainers need `remove_unused_columns=False` with it."""
    import datasets

    numbers = datasets.Dataset.from_dict({"row": np.arange(len(rows))})
    return numbers.with_transform(_Transform(rows))


class _Transform:
    """Columns of features for a batch of row numbers."""

    def __init__(self, rows: MapRows) -> None:
        self._rows = rows

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        features = self._rows.__getitems__(batch["row"])
        return {name: [feature[name] for feature in features] for name in features[0]}


class Stream(IterableDataset[dict[str, Any]]):
    """The tensors of a loader's batches."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        if worker is None:
            for batch in self.loader:
                yield batch.inputs
            return
        for index in range(self.loader.first + worker.id, len(self.loader), worker.num_workers):
            yield self.loader.batch(*divmod(index, self.loader.micros)).inputs


# ---- tensors ---------------------------------------------------------------------------------------------------------
#
# Converts arrays to torch tensors that share numpy's memory, optionally pinned or copied to a device.
#
# Runs in the prefetch thread. A copy to a CUDA device uses pinned memory and a side stream, so that it overlaps with
# the training step; the consumer's stream waits for the copy only when it receives the batch. Create the converter in
# the consumer's thread: the current device, which `cuda` means, differs from thread to thread.


class TensorConverter:
    """Converts arrays to tensors; plain integers are left unchanged."""

    def __init__(self, pin_memory: bool, device: str | None) -> None:
        self._device = None if device is None else _device(device)
        self._on_cuda = self._device is not None and self._device.type == "cuda"
        self._pin = pin_memory or self._on_cuda
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arrays of a batch."""
        tensors = {name: array if isinstance(array, int) else torch.from_numpy(array) for name, array in arrays.items()}
        if self._pin and torch.cuda.is_available():
            tensors = {name: t.pin_memory() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}
        if self._device is None:
            return tensors
        return self._copy_on_side_stream(tensors) if self._on_cuda else _moved(tensors, self._device)

    def _copy_on_side_stream(self, tensors: dict[str, Any]) -> PendingCopy:
        assert self._device is not None
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = _moved(tensors, self._device)
            return PendingCopy(moved, self._stream.record_event(), self._device)


class PendingCopy(dict[str, Any]):
    """Tensors whose copy to the device may still be in progress."""

    def __init__(self, tensors: dict[str, Any], copied: torch.cuda.Event, device: torch.device) -> None:
        super().__init__(tensors)
        self._copied, self._device = copied, device

    def receive(self) -> dict[str, Any]:
        """The tensors, once the current stream of their device may use them."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._copied)
        for tensor in self.values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)  # its memory was allocated on the other stream
        return dict(self)


def _device(name: str) -> torch.device:
    """The device with this name; `cuda` is the calling thread's current device."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device={name!r}: {str(error).splitlines()[0]}") from error
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UsageError(f"device={name!r}, but torch finds no CUDA device here. Leave device out, or use 'cpu'.")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _moved(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: tensor.to(device, non_blocking=True) if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in tensors.items()
    }
