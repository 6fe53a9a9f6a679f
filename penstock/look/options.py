"""The options of `report`, `view`, `stats`, `show` and `diff`, declared once. Light: no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.chat.formats import option
from penstock.errors import RegionsUnknown
from penstock.view.options import ViewFlags, checked_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.api import Dataset, View


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions(ViewFlags):
    """Options of the commands that look at a dataset: those of a view, and those of packing."""

    capacity: int | None = option("Tokens of a packed row; default: the maximum length")


def look_options(values: Mapping[str, Any]) -> LookOptions:
    """Options from names and values; unknown names and wrong values are errors that say what is right."""
    return checked_options(LookOptions, values)


SHARDS_OPEN: Final = 16  # pages of mapped files count as memory; a look at a large dataset shouldn't


def open_to_look(dataset: Dataset, options: ViewFlags, say: Callable[[str], None]) -> View:
    """A view to look at. Rows whose regions are unknown are left out, and `say` hears it."""
    dataset.keep_open = SHARDS_OPEN
    try:
        return dataset.view(**options.view)
    except RegionsUnknown as error:
        if dataset.recipe.get("adopted"):
            raise
        say(f"left out: {error}")
        return dataset.view(**replace(options, regions_unknown="drop").view)
