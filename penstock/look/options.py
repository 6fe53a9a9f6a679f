"""The options of `report`, `view`, `stats`, `show` and `diff`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

from annotated_types import Ge

from penstock.errors import RegionsUnknown
from penstock.load.options import UnknownRegions, ViewOptions, view_options
from penstock.options import option, read_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.load.view import View
    from penstock.store.dataset import Dataset


SHARDS_OPEN: Final = 16  # mapped pages count as memory, so keep few shards open


@dataclass(frozen=True, slots=True, kw_only=True)
class LookOptions(ViewOptions):
    """Options of the commands that inspect a dataset: those of a view, and those of packing."""

    capacity: Annotated[int, Ge(1)] | None = option("Tokens of a packed row; default: the maximum length")

    @property
    def view(self) -> ViewOptions:
        """The options of the view."""
        return ViewOptions(**{entry.name: getattr(self, entry.name) for entry in fields(ViewOptions)})


def look_options(values: Mapping[str, Any]) -> LookOptions:
    """Validated options."""
    options = read_options(LookOptions, values, "a look")
    view_options({}, options.view)  # checks them together
    return options


def open_to_look(dataset: Dataset, options: LookOptions, say: Callable[[str], None]) -> View:
    """A view for inspection. Rows with unknown regions are dropped, and `say` is called with a message."""
    from penstock.load.view import open_view

    dataset.shards.keep_open = SHARDS_OPEN
    try:
        return open_view(dataset, options.view)
    except RegionsUnknown as error:
        if dataset.recipe.get("adopted"):
            raise
        say(f"left out: {error}")
        return open_view(dataset, replace(options.view, regions_unknown=UnknownRegions.DROP))
