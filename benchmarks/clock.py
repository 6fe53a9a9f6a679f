"""A fixed date for templates that print one, so that a comparison with transformers may run past midnight.

transformers has no option for the date. `stop_clock` replaces its clock; ours is given `date=DATE`.
"""

from __future__ import annotations

import datetime
from typing import Any

DATE = datetime.date(2026, 1, 2)


class StoppedClock(datetime.datetime):
    """The class `datetime` of a process in which it is always midnight of `DATE`."""

    @classmethod
    def now(cls, tz: Any = None) -> StoppedClock:  # noqa: ARG003
        return cls(DATE.year, DATE.month, DATE.day)


def stop_clock() -> None:
    """Makes transformers' templates print `DATE`, in this process."""
    from transformers.utils import chat_template_utils

    chat_template_utils.datetime = StoppedClock
