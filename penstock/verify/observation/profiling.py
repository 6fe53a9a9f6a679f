"""A second source of evidence: torch's profiler, which sees operators and autograd functions without our wrappers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

_ATTENTION = re.compile(r"scaled_dot_product|flash|flex_attention|xformers|mem_eff|^aten::_softmax$", re.IGNORECASE)
_NOT_FORWARD = re.compile(r"backward|evaluate_function", re.IGNORECASE)


@contextmanager
def _silence() -> Iterator[None]:
    """Redirects standard error, which the profiler's library writes to on start and stop; no setting turns that off."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)


class Profile:
    """The operators of the observed steps, with call counts and shapes."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self._events: list[Any] = []

    def start(self) -> None:
        """Starts profiling."""
        self._profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        with _silence():
            self._profiler.__enter__()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._profiler is not None:
            with _silence():
                self._profiler.__exit__(None, None, None)
            self._events = list(self._profiler.events() or ())

    def counts(self) -> Counter[str]:
        """Calls by name."""
        return Counter(str(event.name) for event in self._events)

    def attention(self) -> dict[str, int]:
        """Counts of the operators that identify the attention implementation."""
        return {name: count for name, count in sorted(self.counts().items()) if self._is_attention(name)}

    @staticmethod
    def _is_attention(name: str) -> bool:
        return bool(_ATTENTION.search(name)) and not _NOT_FORWARD.search(name)

    def rows_as_wide_as(self, vocabulary: int, hidden: int) -> int:
        """Rows of the largest operand whose last dimension is the vocabulary, excluding the LM head's weight."""
        most = 0
        for event in self._events:
            for shape in event.input_shapes or ():
                if len(shape) < 2 or shape[-1] != vocabulary or not all(isinstance(n, int) for n in shape):
                    continue
                if shape[-2] == hidden:  # the weight, possibly batched
                    continue
                rows = 1
                for size in shape[:-1]:
                    rows *= size
                most = max(most, rows)
        return most
