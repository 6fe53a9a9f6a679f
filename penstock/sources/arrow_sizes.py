"""How many bytes the rows of Arrow columns have, before anything of them becomes a Python value.

Strings and bytes count by their length, everything else as one byte a value. Values that are stored once and meant many
times (dictionaries, views) count each time: this is what they would take.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Sizes = npt.NDArray[np.int64]


def row_sizes(batch: pa.RecordBatch) -> Sizes:
    """The size of each row of a batch."""
    return sum((_sizes(column) for column in batch.columns), np.zeros(batch.num_rows, np.int64))


def _sizes(array: pa.Array) -> Sizes:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _sizes(array.storage)
    if pa.types.is_dictionary(kind):
        return _of_words(array)
    if pa.types.is_struct(kind):
        fields = (_sizes(array.field(index)) for index in range(kind.num_fields))
        return sum(fields, np.ones(len(array), np.int64))
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    if pa.types.is_nested(array.type):
        return _of_lists(array)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return np.array([0 if value is None else len(value.as_buffer()) for value in array], np.int64)
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string)) or "binary" in str(kind):
        return _numbers(pc.binary_length(array)) + 1
    return np.ones(len(array), np.int64)


def _of_words(array: pa.DictionaryArray) -> Sizes:
    """Each time that a word of the dictionary is used counts."""
    words = np.concatenate([_sizes(array.dictionary), [0]])
    return words[np.where(array.is_valid().to_numpy(zero_copy_only=False), _numbers(array.indices), -1)]


def _of_lists(array: pa.Array) -> Sizes:
    """Lists of any kind; `flatten` gives the elements of all of them, in order."""
    lengths = _numbers(pc.list_value_length(array))
    ends = np.concatenate([[0], np.cumsum(_sizes(array.flatten()))])
    places = np.concatenate([[0], np.cumsum(lengths)])
    found: Sizes = ends[places[1:]] - ends[places[:-1]] + 1
    return found


def _numbers(array: pa.Array) -> Sizes:
    values: Any = pc.fill_null(array, 0)
    return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)
