"""The options of a view as commands take them: flags and documentation come from here. Light: no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.chat.formats import option
from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.view.settings import ViewOptions

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewFlags:
    """Options of every command that looks at a dataset through a view."""

    train_on: str = option("Loss policy: which tokens are trained", "all_assistant_messages")
    max_length: int | None = option("Longest sequence")
    overlong: str = option("Longer rows: truncate, truncate_left, drop, split, error", "truncate")
    regions_unknown: str = option("Rows whose regions are not certain: error, drop", "error")
    holdout: float | int | None = option("Rows to hold out: a fraction, or how many")
    part: str = option("Side of the hold-out: train, held_out", "train")
    holdout_seed: int = option("Seed of the hold-out", 0)

    @property
    def view(self) -> ViewOptions:
        """Those that a view takes."""
        return {
            "train_on": self.train_on,
            "max_length": self.max_length,
            "overlong": self.overlong,
            "regions_unknown": self.regions_unknown,
            "holdout": self.holdout,
            "part": self.part,
            "holdout_seed": self.holdout_seed,
        }


def checked_options(record: type[Record], values: Mapping[str, Any]) -> Record:
    """A record of options from names and values; unknown names and wrong values are errors that say what is right."""
    import difflib

    from pydantic import TypeAdapter, ValidationError

    known = [f.name for f in fields(record)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            raise UsageError(f"unknown option {name!r}.{f' Did you mean {near[0]!r}?' if near else ''}")
    try:
        return TypeAdapter(record).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error
