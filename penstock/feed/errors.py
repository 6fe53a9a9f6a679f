"""The errors of the feed."""

from __future__ import annotations

from penstock.errors import PenstockError


class FeedError(PenstockError):
    """A batch can't be served, or a state does not belong to this loader."""
