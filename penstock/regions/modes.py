"""How regions are told; apart from the code that does it, so that options can be read without loading that."""

from __future__ import annotations

from enum import StrEnum


class RegionsMode(StrEnum):
    """Whose word counts for what an assistant wrote."""

    AUTO = "auto"  # the author's {% generation %} blocks where the template has them, else the structure
    STRUCTURE = "structure"
