"""Random chat templates: expressions and statements over messages, of everything that the compiler knows and more."""

from __future__ import annotations

import random
from typing import Any, Final

from tools.fuzz_rows import NESTED, NUMBERS, TEXTS, mutated_value, odd_value

_TEXTS: Final = ("''", "'a'", "' b\\n'", "'</think>'", "'é'", "'<x>'", "'role'", "'user'", "'{} {}'", "'1'", "','", "'ß'")
_NAMES: Final = ("role", "content", "v", "w", "tool_calls", "items", "get", "type", "text", "name", "a", "zz", "count")
_METHODS: Final = (
    *("strip()", "lstrip()", "rstrip()", "strip({s})", "rstrip({s})", "split()", "split({s})", "split({s}, {n})", "upper()"),
    *("lower()", "capitalize()", "startswith({s})", "endswith({s})", "startswith(({s}, {s}))", "replace({s}, {s})"),
    *("replace({s}, {s}, {n})", "find({s})", "count({s})", "removeprefix({s})", "removesuffix({s})", "join({e})", "items()"),
    *("keys()", "values()", "get({s})", "get({s}, {e})", "format({e})", "format({e}, {e})", "split({s})[0]", "split({s})[-1]"),
    *("title()", "append({e})", "pop()", "isdigit()", "splitlines()", "get({e})", "strip({e})", "split({e})"),
)  # fmt: skip
_FILTERS: Final = (
    *("trim", "trim({s})", "length", "string", "default({e})", "default({e}, true)", "items", "safe", "join", "join({s})"),
    *("list", "dictsort", "upper", "lower", "capitalize", "replace({s}, {s})", "first", "last", "int", "tojson", "sort"),
    *("tojson(indent={n})", "tojson(ensure_ascii={e})", "tojson(sort_keys=true)", "tojson(separators=({s}, {s}))", "unique"),
    *("map('upper')", "map('trim')", "map('string')", "map('tojson')", "map(attribute='content')", "map(attribute='v.a')"),
    *("select", "select('string')", "reject('none')", "selectattr('role')", "selectattr('role', 'equalto', {s})", "min"),
    *("rejectattr('v', 'defined')", "selectattr('role', 'in', [{s}, {s}])", "max", "indent({n})", "indent({s}, true)"),
    *("reverse", "title", "wordcount", "e", "sort(attribute='role')", "sort(reverse=true)", "select('eq', {e})", "count"),
    *("batch({n})", "slice({n})", "sum", "abs", "round", "float", "truncate({n})", "d({s})", "join({e})", "unique|list"),
)  # fmt: skip
_TESTS: Final = (
    *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false", "number"),
    *("integer", "float", "odd", "even", "eq {e}", "ne {e}", "in {e}", "lt {n}", "gt {s}", "not none", "not string"),
    *("callable", "lower", "sameas {e}", "divisibleby 2", "eq({e})"),
)
_OPERATORS: Final = (" + ", " ~ ", " == ", " != ", " and ", " or ", " in ", " not in ", " < ", " >= ", " - ", " * ", " % ", " // ")


class Templates:
    """Makes random templates. One that jinja2 does not parse is made now and then, too."""

    def __init__(self, rnd: random.Random) -> None:
        self._rnd = rnd
        self._names: list[str] = []
        self._loops = 0
        self._number = 0

    def make(self) -> str:
        """A template."""
        self._names, self._loops, self._number = ["v", "w"], 0, 0
        head = "{% set v = messages[0].v %}{% set w = messages[-1].content %}{% set ns = namespace(a=v, b=0, c='') %}"
        macros = "".join(self._macro(number) for number in range(self._rnd.randrange(3)))
        body = "".join(self.statement(3) for _ in range(self._rnd.randrange(1, 6)))
        if self._rnd.random() < 0.5:
            body += "{% for m in messages %}<{{ m.role }}>" + self._inside("m", 2) + "</s>{% endfor %}"
        return head + macros + body

    def _inside(self, name: str, depth: int) -> str:
        self._names.append(name)
        self._loops += 1
        text = "".join(self.statement(depth) for _ in range(self._rnd.randrange(1, 4)))
        self._loops -= 1
        self._names.pop()
        return text

    def _macro(self, number: int) -> str:
        names, self._names = self._names, ["p", "q", "ns"]
        loops, self._loops = self._loops, 0
        default = self.expression(1)
        body = "".join(self.statement(2) for _ in range(self._rnd.randrange(1, 3)))
        self._names, self._loops = names, loops
        return "{% macro f" + str(number) + "(p, q=" + default + ") %}" + body + "{% endmacro %}"

    def statement(self, depth: int) -> str:
        rnd, one = self._rnd, self.expression
        kind = rnd.random() if depth else 0.3
        if kind < 0.08:
            return rnd.choice(("\n", "text ", "<|im_end|>", "é", "  \n  "))
        if kind < 0.42:
            return "{{ " + one(3) + " }}"
        if kind < 0.55:
            other = "{% else %}" + self.statement(depth - 1) if rnd.random() < 0.5 else ""
            return "{% if " + one(2) + " %}" + self.statement(depth - 1) + other + "{% endif %}"
        if kind < 0.74:
            self._number += 1
            name = f"i{self._number}"
            over = rnd.choice(("messages", "messages", "messages[1:]", "range(messages|length)", "v", one(2), "v.items()"))
            test = f" if {self._with(name)}" if rnd.random() < 0.2 else ""
            return "{% for " + name + " in " + over + test + " %}" + self._inside(name, depth - 1) + "{% endfor %}"
        if kind < 0.8:
            self._number += 1
            name = rnd.choice((f"x{self._number}", rnd.choice(self._names), "ns.a", "ns.b", "ns.c"))
            made = "{% set " + name + " = " + one(3) + " %}"
            if "." not in name and not self._loops:
                self._names.append(name)
            return made
        if kind < 0.86:
            self._number += 1
            made = "{% set x" + str(self._number) + " %}" + self.statement(depth - 1) + "{% endset %}"
            return made + "{{ x" + str(self._number) + rnd.choice(("", "|trim", "[1:]", " ~ 'z'")) + " }}"
        if kind < 0.89:
            return "{% filter " + rnd.choice(("upper", "trim", "replace('a', 'b')")) + " %}" + self.statement(depth - 1) + "{% endfilter %}"
        if kind < 0.92:
            return "{% generation %}" + self.statement(depth - 1) + "{% endgeneration %}"
        if kind < 0.95 and self._loops:
            return "{% if " + one(1) + " %}{% " + rnd.choice(("break", "continue")) + " %}{% endif %}"
        if kind < 0.97:
            return "{% if " + one(2) + " %}{{ raise_exception(" + one(1) + ") }}{% endif %}"
        return "{{ f0(" + one(1) + ") }}{% set y = f1(" + one(1) + ", q=" + one(1) + ") %}{{ y }}"

    def _with(self, name: str) -> str:
        self._names.append(name)
        made = self.expression(2)
        self._names.pop()
        return made

    def expression(self, depth: int) -> str:
        rnd = self._rnd
        if depth == 0 or rnd.random() < 0.15:
            return self._leaf()
        kind, one = rnd.random(), self.expression(depth - 1)
        if kind < 0.2:
            return f"({one})|{self._filled(rnd.choice(_FILTERS), depth)}"
        if kind < 0.35:
            return f"({one}).{self._filled(rnd.choice(_METHODS), depth)}"
        if kind < 0.5:
            return f"({one}{rnd.choice(_OPERATORS)}{self.expression(depth - 1)})"
        if kind < 0.6:
            return f"({one} is {self._filled(rnd.choice(_TESTS), depth)})"
        if kind < 0.68:
            return f"({one} if {self.expression(depth - 1)} else {self.expression(depth - 1)})"
        if kind < 0.78:
            return f"({one}).{rnd.choice(_NAMES)}" if rnd.random() < 0.6 else f"({one})['{rnd.choice(_NAMES)}']"
        if kind < 0.9:
            low, high = (rnd.choice(("", "", "1", "-1", "2", "-2", "0", "99")) for _ in range(2))
            return f"({one})" + rnd.choice((f"[{low}:{high}]", "[0]", "[-1]", "[1]", f"[{self._leaf()}]", f"[{low}:{high}:-1]"))
        made = (f"[{one}]", f"({one}, 1)", f"{{'a': {one}}}", f"not {one}", f"-{one}", f"dict(a={one})", f"[{one}, {self._leaf()}]")
        return rnd.choice(made)

    def _leaf(self) -> str:
        rnd = self._rnd
        loops = ("loop.index", "loop.index0", "loop.first", "loop.last", "loop.previtem", "loop.nextitem", "loop.length")
        named = (*self._names, *self._names, "messages", "messages[0]", "messages[-1]", "tools", "nope", "ns.a", "ns.b", "ns.c")
        if self._loops and rnd.random() < 0.2:
            return rnd.choice(loops)
        kind = rnd.random()
        if kind < 0.65:
            name = rnd.choice(named)
            return name + rnd.choice(("", "", "", ".content", ".role", ".v", "['v']", "['content']", ".tool_calls"))
        if kind < 0.85:
            return rnd.choice(_TEXTS)
        return rnd.choice(("0", "1", "2", "-1", "true", "false", "none", "0.5", "[]", "{}", "range(3)", "bos_token", "9007199254740993"))

    def _filled(self, form: str, depth: int) -> str:
        while "{s}" in form:
            form = form.replace("{s}", self._rnd.choice(_TEXTS), 1)
        while "{n}" in form:
            form = form.replace("{n}", self._rnd.choice(("0", "1", "2", "-1")), 1)
        while "{e}" in form:
            form = form.replace("{e}", self.expression(depth - 1), 1)
        return form


def conversations(rnd: random.Random, count: int) -> list[list[dict[str, Any]]]:
    """Messages with odd values under `v` and `content`."""
    base = [
        {"role": "system", "content": "be", "v": "a b"},
        {"role": "user", "content": " ask a\n", "v": {"a": "x", "b": ["y"]}},
        {"role": "assistant", "content": "<think>t</think>say", "v": ["a", "b"], "w": 1},
        {"role": "user", "content": "more é", "v": 3},
        {"role": "assistant", "content": "b", "reasoning_content": "so", "tool_calls": [NESTED[12]]},
    ]
    made = []
    for _ in range(count):
        messages = [dict(message) for message in base[rnd.randrange(3) : rnd.randrange(3, 6)]]
        messages[0]["v"] = rnd.choice((rnd.choice(TEXTS), rnd.choice(NUMBERS), odd_value(rnd)))
        if rnd.random() < 0.5:
            messages = [m for m in mutated_value(rnd, messages) if isinstance(m, dict)]
        made.append(messages or [dict(base[1])])
    return made
