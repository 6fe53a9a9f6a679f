"""A panic of an engine that is written in Rust comes as a BaseException, which no ordinary handler catches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import EncoderPanic


@contextmanager
def panics_are_errors(engine: str) -> Iterator[None]:
    """Raises EncoderPanic where the engine panics."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's, which has no importable name
            raise
        words = f"{engine} panics: {str(error).splitlines()[0] if str(error) else 'without a reason'}"
    else:
        return
    raise EncoderPanic(words)  # here, so that it does not hold the panic's frames
