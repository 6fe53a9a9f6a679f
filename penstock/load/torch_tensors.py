"""Converts arrays to torch tensors that share numpy's memory, optionally pinned or copied to a device.

Runs in the prefetch thread. A copy to a CUDA device uses pinned memory and a side stream, so that it overlaps with the
training step; the consumer's stream waits for the copy only when it receives the batch. Create the converter in the
consumer's thread: the current device, which `cuda` means, differs from thread to thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import UsageError


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
