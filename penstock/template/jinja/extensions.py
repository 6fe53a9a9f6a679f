"""The tag, filters and globals that transformers adds to jinja2 for chat templates."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` prints its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("print_body"), [], [], body).set_lineno(line)

    def print_body(self, caller: Macro) -> str:
        return caller()


def is_generation(node: nodes.Node) -> bool:
    """Whether this is a `{% generation %}` block."""
    return (
        isinstance(node, nodes.CallBlock)
        and isinstance(node.call, nodes.Call)
        and isinstance(node.call.node, nodes.ExtensionAttribute)
    )


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' `tojson` filter, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def indent(s: Any, *args: Any, **kwargs: Any) -> str:
    """jinja2's `indent` filter on a copy: given a list, it would modify the row before it fails."""
    text: Any = s.copy() if isinstance(s, list) else s
    return do_indent(text, *args, **kwargs)


def raise_exception(message: str) -> NoReturn:
    """Refuse the conversation."""
    raise jinja2.exceptions.TemplateError(message)


def refuse_random(*_: Any, **__: Any) -> NoReturn:
    """Stands in for the filter `random` and the function `lipsum`, and refuses."""
    raise SecurityError("`random` and `lipsum` print something else each time; they are not available")


class TemplateDict:
    """`dict(...)` for templates, without the other attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """`namespace(...)` for templates; refuses attributes with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=…)` works, as in jinja2
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}. "
            "Please rename the attribute."
        )
