"""Retries what a network file system may fail to do once."""

from __future__ import annotations

import errno
import functools
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

TRANSIENT = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EINTR)  # ESTALE: another host removed or replaced the file
RETRY_PAUSES = (0.05, 0.25, 1.0)  # seconds

P = ParamSpec("P")
T = TypeVar("T")


def retry_transient(act: Callable[P, T]) -> Callable[P, T]:
    """Retry an operation a few times when a network file system fails temporarily."""

    @functools.wraps(act)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for pause in RETRY_PAUSES:
            try:
                return act(*args, **kwargs)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            time.sleep(pause)
        return act(*args, **kwargs)

    return run
