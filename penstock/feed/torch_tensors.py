"""The exit to torch: tensors that share numpy's memory, pinned and copied to a device where that is asked for.

Runs in the thread that works ahead. A copy to a CUDA device goes through pinned memory on a stream of its own, so that
it overlaps with the step; the loop's stream waits for it when the batch is received, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Outlet:
    """Turns arrays into tensors; plain integers stay what they are."""

    def __init__(self, pin_memory: bool, device: str | None) -> None:
        self._device = None if device is None else torch.device(device)
        self._on_cuda = self._device is not None and self._device.type == "cuda"
        self._pin = pin_memory or self._on_cuda
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a batch."""
        tensors = {name: array if isinstance(array, int) else torch.from_numpy(array) for name, array in arrays.items()}
        if self._pin and torch.cuda.is_available():
            tensors = {name: t.pin_memory() if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}
        if self._device is None:
            return tensors
        return self._copied_aside(tensors) if self._on_cuda else _moved(tensors, self._device)

    def _copied_aside(self, tensors: dict[str, Any]) -> OnItsWay:
        assert self._device is not None
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            moved = _moved(tensors, self._device)
            return OnItsWay(moved, self._stream.record_event())


class OnItsWay(dict[str, Any]):
    """Tensors whose copy may still be under way."""

    def __init__(self, tensors: dict[str, Any], arrived: torch.cuda.Event) -> None:
        super().__init__(tensors)
        self._arrived = arrived

    def receive(self) -> dict[str, Any]:
        """The tensors, for use on the current stream."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._arrived)
        for tensor in self.values():
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(stream)  # its memory was allocated on the other stream
        return dict(self)


def _moved(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: tensor.to(device, non_blocking=True) if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in tensors.items()
    }
