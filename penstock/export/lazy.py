"""A view as a lazy `datasets.Dataset`, which holds row numbers and reads the memory-mapped shards on access."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import UsageError
from penstock.export.rows import ExportRows
from penstock.export.tables import plain_columns
from penstock.view.mixture import BaseMixture
from penstock.view.view import BaseView

if TYPE_CHECKING:
    import datasets


def lazy_dataset(served: BaseView | BaseMixture, capacity: int | None = None) -> datasets.Dataset:
    """Wraps a view as a dataset with the columns of `--to hf`; trainers need `remove_unused_columns=False`."""
    try:
        import datasets
    except ImportError:
        raise UsageError("to_hf() needs the datasets package. Install it with: pip install 'penstock[hub]'.") from None
    rows = ExportRows(served, capacity=capacity)
    numbers = datasets.Dataset.from_dict({"row": np.arange(len(rows))})
    return numbers.with_transform(_Reader(served, capacity))


class _Reader:
    """Reads the columns of a batch of row numbers; pickles as the view it reads."""

    def __init__(self, served: BaseView | BaseMixture, capacity: int | None) -> None:
        self._arguments = served, capacity
        self._rows = ExportRows(served, capacity=capacity)

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        blocks = [next(self._rows.blocks(row, row + 1)) for row in batch["row"]]
        columns = [plain_columns(block, self._rows) for block in blocks]
        return {name: [found[name][0].values.to_numpy() for found in columns] for name in columns[0]}

    def __reduce__(self) -> tuple[type[_Reader], tuple[BaseView | BaseMixture, int | None]]:
        return _Reader, self._arguments
