"""Starts the fast encoder even for the short texts of these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.prepare.encode import encoder


@pytest.fixture(autouse=True, scope="module")
def _no_small_input() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "SMALL_INPUT", 0)
        yield
