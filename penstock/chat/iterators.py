"""Values that can be read only once: a template that keeps one carries a state from turn to turn.

A syntax tree enters; `NotLocal` is raised where an iterator (of `map`, `select`, …) is not read on the spot, or where
a filter's name is computed, so that nobody can tell what it does.
"""

from __future__ import annotations

from typing import Final

from jinja2 import nodes

from penstock.chat.sorts import STATEFUL, NotLocal
from penstock.chat.syntax import find

ITERATORS: Final = frozenset(
    ("map", "select", "reject", "selectattr", "rejectattr", "reverse", "batch", "slice", "unique", "items", "groupby")
)
_READ_WHOLE: Final = frozenset(("list", "join", "length", "count", "first", "last"))


def check_iterators(tree: nodes.Template) -> None:
    """Raise NotLocal unless every iterator is read at once."""
    read = {id(loop.iter) for loop in find(tree, nodes.For)}
    read |= {id(whole.node) for whole in find(tree, nodes.Filter) if whole.name in _READ_WHOLE | ITERATORS}
    for iterator in find(tree, nodes.Filter):
        if iterator.name in ITERATORS:
            if id(iterator) not in read:
                raise NotLocal("it keeps, or prints, what can be read only once")
            names = [*iterator.args, *(keyword.value for keyword in iterator.kwargs)]
            if iterator.dyn_args or iterator.dyn_kwargs or not all(isinstance(name, nodes.Const) for name in names):
                raise NotLocal(f"what its {iterator.name} does is computed")
            if any(name.value in ITERATORS | STATEFUL for name in names if isinstance(name, nodes.Const)):
                raise NotLocal(f"its {iterator.name} makes iterators, or takes what comes")
