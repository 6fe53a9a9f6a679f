"""Which parts of assistant messages are trained, and with which weight: the options `parts` and `part_weights`.

`parts` is a comma-separated list. Plain names are trained, and nothing else is; names with - or + change the default,
all of the body and the stop. Both options end as one table with a weight per code of a part, 0 where it isn't trained,
so that masking costs one look-up per run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import UsageError
from penstock.options import nearest
from penstock.prepare.chat.conversation import BODY_PARTS, Part

PART_NAMES: Final[Mapping[Part, str]] = {part: part.name.lower() for part in Part}
TRAINED: Final = frozenset({*BODY_PARTS, Part.STOP})  # the default
CHOICES: Final[Mapping[str, frozenset[Part]]] = {
    "body": frozenset(BODY_PARTS),
    "reasoning": frozenset({Part.REASONING, Part.REASONING_MARKUP, Part.EMPTY_REASONING}),
    "=reasoning": frozenset({Part.REASONING}),
    "reasoning_markup": frozenset({Part.REASONING_MARKUP}),
    "empty_reasoning": frozenset({Part.EMPTY_REASONING}),
    "content": frozenset({Part.CONTENT}),
    "calls": frozenset({Part.CALL_NAME, Part.CALL_ARGUMENTS, Part.CALL_MARKUP}),
    "call_name": frozenset({Part.CALL_NAME}),
    "call_arguments": frozenset({Part.CALL_ARGUMENTS}),
    "call_markup": frozenset({Part.CALL_MARKUP}),
    "markup": frozenset({Part.MARKUP}),
    "stop": frozenset({Part.STOP}),
    "tail": frozenset({Part.TAIL}),
}
_CODES: Final = 256
_LARGEST: Final = float(np.finfo(np.float32).max)
_KNOWN_BODY: Final = [part for part in BODY_PARTS if part is not Part.BODY]

Table = npt.NDArray[np.float32]


class PartWeights(NamedTuple):
    """The weight of each code of a part, in assistants' messages and in others."""

    assistant: Table
    other: Table
    divides: bool  # whether parts of a body differ, so that bodies that are not cut can't be served


@cache
def part_table(parts: str, weights: tuple[tuple[str, float], ...]) -> PartWeights:
    """The table of a view's options, or an error that names what is wrong with them."""
    trained = _trained(parts)
    table = _table(trained)
    # Of any two names, one includes the other or they share nothing: the narrower one decides.
    for name, weight in sorted(weights, key=lambda entry: -len(_chosen(entry[0], "part_weights"))):
        if not 0 <= weight <= _LARGEST:  # NaN compares false
            raise UsageError(f"part_weights: {name}={weight} is not possible. Use a finite number of 0 or more.")
        own = _chosen(name, "part_weights") & trained
        if not own:
            raise UsageError(
                f"part_weights: parts={parts or 'body,stop'!r} doesn't train {name!r}. Add it there, or leave it out."
            )
        table[list(own)] = weight
    body = table[_KNOWN_BODY]
    divides = bool((body != body[0]).any())
    table[Part.BODY] = 0 if divides else body[0]
    return PartWeights(_read_only(table), _DEFAULT, divides)


def _trained(text: str) -> frozenset[Part]:
    """The parts that are trained under the option `parts`."""
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    signs = {item[:1] if item[:1] in ("+", "-") else "" for item in items}
    if len(signs) > 1 and "" in signs:
        raise UsageError(
            f"parts={text!r} mixes plain names, which are all that is trained, with names after + or -, which change "
            "the default. Use one kind."
        )
    if "" in signs:
        return frozenset().union(*(_chosen(item, "parts") for item in items))
    trained = TRAINED
    for item in items:
        own, adds = _chosen(item[1:].strip(), "parts"), item[0] == "+"
        if own <= trained if adds else not own & trained:
            state = "trained" if adds else "not trained"
            alone = f", or write {item[1:]!r} to train it alone" if adds else ""
            raise UsageError(f"parts={text!r}: {item[1:]!r} is {state} anyway. Leave {item!r} out{alone}.")
        trained = trained | own if adds else trained - own
    if not trained:
        raise UsageError(f"parts={text!r} leaves nothing to train. Take less away.")
    return trained


def _chosen(name: str, option: str) -> frozenset[Part]:
    if name in CHOICES:
        return CHOICES[name]
    if name == "header":
        raise UsageError(
            f"{option}: the header can't be trained, since inference prints it before the model writes. "
            "Use train_on='all_tokens' to train everything."
        )
    raise UsageError(f"{option}: {name!r} is unknown.{nearest(name, CHOICES)} Names: {', '.join(CHOICES)}.")


def _table(trained: Iterable[int]) -> Table:
    table = np.zeros(_CODES, np.float32)
    table[list(trained)] = 1
    return table


def _read_only(table: Table) -> Table:
    table.flags.writeable = False
    return table


_DEFAULT: Final = _read_only(_table(TRAINED))
EVERY_PART: Final = _read_only(_table(set(range(_CODES)) - {Part.CONTEXT}))
