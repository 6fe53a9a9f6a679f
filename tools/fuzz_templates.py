"""Random chat templates: expressions and statements over messages, using everything the compiler supports and more."""

# ruff: noqa: E501 (tables)
from __future__ import annotations

import random
import re
from typing import Any, Final

from penstock.prepare.chat.conversation import Conversation
from tools.fuzz_rows import NESTED, NUMBERS, TEXTS, mutated_value, odd_value

_CONSTANTS: Final = (
    "''",
    "'a'",
    "' b\\n'",
    "'</think>'",
    "'é'",
    "'<x>'",
    "'role'",
    "'user'",
    "'{} {}'",
    "'1'",
    "','",
    "'ß'",
    "' '",
)
_NAMES: Final = ("role", "content", "v", "w", "tool_calls", "items", "get", "type", "text", "name", "a", "zz", "count")
# Expressions by the kind of value they yield: t text, l list, n number, c condition, e anything, s constant, i integer.
_FORMS: Final = {
    "t": (
        *("{t}.strip()", "{t}.lstrip()", "{t}.rstrip()", "{t}.strip({s})", "{t}.rstrip({s})", "{t}.lstrip({s})", "{t}.upper()"),
        *("{t}.lower()", "{t}.capitalize()", "{t}.replace({s}, {t})", "{t}.replace({s}, {s}, {i})", "{t}.removeprefix({t})"),
        *("{t}.removesuffix({s})", "{t}.split({s})[0]", "{t}.split({s})[-1]", "{t}.split({s}, 1)[0]", "{t}[{i}:]", "{t}[:{i}]"),
        *("{t}[{i}:{i}]", "{s}.join({t}.split({s}))", "{s}.join({l}|map('string'))", "'{} {}'.format({e}, {t})", "{t} + {t}"),
        *("{e} ~ {e}", "{t} ~ {e} ~ {t}", "{t} + {t} + {t}", "({t} if {c} else {t})", "{t} * {i}", "{e}|string", "{e}|tojson"),
        *("{e}|tojson(indent={i})", "{e}|tojson(ensure_ascii={c})", "{e}|tojson(sort_keys=true)", "{l}|join", "{l}|join({t})"),
        *("{e}|tojson(separators=({s}, {s}))", "{e}|trim", "{t}|trim({s})", "{e}|upper", "{e}|lower", "{e}|capitalize"),
        *("{e}|replace({s}, {t})", "{t}|indent({i})", "{t}|indent({s}, true)", "{t}|default({t})", "{t}|safe", "{t}|first"),
        *("{t}|title", "{t}.title()", "{t}|capitalize", "{t}.swapcase()", "'%s-%s'|format({e}, {t})", "'%s' % ({e},)", "{t}.zfill({n})"),
        *("'{0} {xy}'.format({t}, xy={e})", "'{0!r:>9}'.format({e})", "{t}|center(9)", "{t}.ljust({i}, '*')", "{t}|e", "{t}|striptags"),
        *("{t}|truncate({n}, {c})", "{t}|wordwrap(5, {c})", "{t}|urlencode", "{t}.partition({s})[{i}]", "{t}.rpartition({s})|join({s})"),
        *("{t}.rsplit({s}, 1)[-1]", "{t}.replace('', {t}, {i})", "{t}[::{i}]", "{t}|reverse", "{t}|indent({i}, {c}, {c})", "{e}|pprint"),
        *("{t}|replace({s}, {e}, {i})", "{l}|join({s}, attribute='{k}')", "{n}|filesizeformat", "{l}|map('replace', {s}, {t})|join"),
        *("{t}|list|last", "{t}|list|reverse|join", "{t}|list|join({s})", "{t}[0]", "{t}[-1]", "{m}.content", "{m}['role']"),
    ),
    "l": (
        *("{l}[{i}:]", "{l}[:{i}]", "{l}[::-1]", "{l}|list", "{t}.split()", "{t}.split({s})", "{t}|list", "[{e}, {t}]", "[{e}]"),
        *("({e}, {e})", "{l}|list + {l}|list", "{l}|map('string')|list", "{l}|select|list", "{l}|reject('none')|list"),
        *("messages|map(attribute='role')|list", "messages|selectattr('role', 'equalto', {s})|list", "{l}|list|reverse|list"),
        *("messages|rejectattr('content', 'defined')|list", "messages|selectattr('role', 'in', [{s}, {t}])|list", "range({i})"),
        *("{t}.split({s})|sort", "{t}|list|unique|list", "messages|sort(attribute='role')", "{d}.items()", "{d}|items"),
        *("{d}|dictsort", "{d}|list", "{d}.keys()|list", "{d}.values()|list", "({l} if {c} else {l})", "{l}|map('tojson')"),
        *("{t}.splitlines({c})", "{t}.rsplit({s})", "{t}.rsplit(none, {i})", "{t}.split(none, {i})", "{t}.rpartition({s})", "{l}|batch(2, {e})|list"),
        *("{l}|list|slice(2)|list", "messages|groupby('role')", "{l}|sort(reverse={c})", "{d}|dictsort({c}, 'value', {c})", "{l} * {i}"),
        *("messages|map(attribute='a.b', default={t})|list", "{l}|map('default', {t}, true)|list", "messages|sort(attribute='role,v')"),
        *("{t}.split({s})|unique({c})|list", "messages|unique(attribute='role')|list", "{l}|select('ge', {n})|list", "{d}.copy().items()"),
        *("messages|map(attribute='v')|list", "messages|selectattr('v', 'defined')|list", "range({i}, {n})", "{l}|sort"),
    ),
    "n": (
        *("{n} / 2", "{n} ** 2", "{n} // {n}", "{n} % {n}", "{n} + 0.5", "{n}|round(1)", "{t}|float", "{t}|int({n})", "{t}|int(0, 16)", "+{n}"),
        *("{n}|abs", "[{n}, 0.5]|sum", "messages|sum(attribute='w')", "{t}|wordcount", "{t}.rfind({s})", "{t}.count({s}, {i})", "{l}|list|max"),
        *("{l}|length", "{t}|length", "{n} + {n}", "{n} - {n}", "{n} * {n}", "{n} % 3", "{n} // 2", "-{n}", "{t}.find({s})"),
        *("{t}.count({s})", "{n}|int", "'12'|int", "[{n}, {n}]|max", "[{n}, {n}]|min", "({n} if {c} else {n})", "{l}|count"),
    ),
    "c": (
        *("{e} is defined", "{e} is none", "{e} is string", "{e} is mapping", "{e} is iterable", "{e} is sequence", "{e} is number"),
        *("{e} is boolean", "{e} is true", "{e} is false", "{e} is integer", "{e} is not none", "{n} is odd", "{n} is even"),
        *("{n} is divisibleby({n})", "{e} is callable", "{e} is sameas {c}", "{t} is upper", "{e} is escaped", "{n} < {n} <= {n}", "{e} == {e} != {t}"),
        *("{t}.isdigit()", "{t}.istitle()", "{t}.startswith({s}, {i})", "{l} < {l}", "{n} is ge({n})", "{e} in {l} == {c}"),
        *("{e} == {e}", "{e} != {t}", "{t} in {t}", "{s} not in {t}", "{e} in {l}", "{t}.startswith({t})", "{t}.endswith({s})"),
        *("{t}.startswith(({s}, {s}))", "{n} < {n}", "{n} >= {n}", "{t} < {t}", "not {e}", "{c} and {c}", "{c} or {c}"),
        *("{e} is eq {e}", "{e} is in {l}", "{n} is gt {n}", "{e} == {s}", "{s} == {e}", "{m}.role == {s}", "{e} is undefined"),
    ),
    "d": ("{m}", "{'a': {e}}", "{'a': {e}, 'b': {t}}", "dict(a={e})", "v if v is mapping else {}", "{0: {e}, 'x': {t}}"),
    "m": ("messages[0]", "messages[-1]", "messages[{i}]", "messages|first", "messages|last", "messages[1:][0]"),
    "e": (
        *("{t}", "{t}", "{l}", "{n}", "{c}", "{d}", "{m}", "({e} and {e})", "({e} or {e})", "({e} if {c} else {e})", "({e} if {c})"),
        *("{e}|default({e})", "{e}|default({e}, true)", "{l}|first", "{l}[{i}]", "{l}[0]", "{l}[-1]", "{d}.{k}", "{d}['{k}']"),
        *("{m}.{k}", "{m}['{k}']", "{d}.get({s})", "{d}.get({t}, {e})", "v.{k}", "v['{k}']", "v[0]", "v[{e}]", "{d}[{t}]", "nope"),
    ),
}  # fmt: skip
# Expressions that often fail: operations on arbitrary values, and what the compiler doesn't support.
_WILD: Final = (
    *("({e}).strip()", "({e}).items()", "({e})|length", "({e})|first", "({e}) + ({e})", "({e})[1:]", "({e}) < ({e})", "-({e})"),
    *("({e})|join", "({e})|sort", "({e})|int", "({e})|min", "({e})|map('upper')|list", "({e}).get({e})", "({e})[{e}]"),
    *("({e}) in ({e})", "({e}).split({e})", "({e})|items", "({e})|title", "({t}).title()", "({t})|e", "({l})|sum", "({e})|last"),
    *("({e})|tojson(indent={e})", "({e}) * ({e})", "({e}) % ({e})", "({e})|selectattr('role')|list", "({e})|unique|list"),
    *("({e})|map(attribute='a.b')|list", "({e})|sort(attribute='role')", "({t}).format({e})", "({e})|dictsort", "({e})|reverse"),
    *("{t}|safe + {t}", "({t}|safe) ~ {t}", "9223372036854775807 + {n}", "({l})|select('eq', {e})|list", "({e}).{k}"),
)  # fmt: skip


# Statements with other statements in them. BODY may use NAME.
_CONTROL: Final = (
    "{% for NAME in [v, [w, ['a', []]], EXPR_l] recursive %}{{ loop.depth }}BODY{% if NAME is iterable and NAME is not string and loop.depth < 5 %}({{ loop(NAME) }}){% endif %}{% endfor %}",
    "{% for NAME in messages recursive %}<BODY{% if loop.depth0 < 1 %}{{ loop(messages[1:2]) }}{% endif %}>{% else %}ELSE{% endfor %}",
    "{% for NAME in messages if EXPR_c recursive %}{{ NAME.content }}{% if loop.first and loop.depth < 3 %}{{ loop([messages[0]]) ~ '.' }}{% endif %}{% endfor %}",
    "{% call CALLED(EXPR_e) %}BODY{% endcall %}",
    "{% call(NAME, r=EXPR_e) CALLED(EXPR_t, q=EXPR_e) %}{{ NAME }}{{ r }}BODY{% endcall %}",
    "{% call CALLED(*EXPR_l) %}{{ w }}{% endcall %}",
    "{% with NAME = EXPR_e, other = EXPR_t %}BODY{{ other }}{% endwith %}",
    "{% macro NAME(z, y=z) %}{{ z }}BODY{{ y }}{% endmacro %}{{ NAME(EXPR_e) }}{{ NAME(EXPR_t, EXPR_t) ~ 'm' }}",
    "{% macro NAME() %}{% macro inner(z) %}{{ z }}{{ varargs }}{{ kwargs }}{{ w }}{% endmacro %}{{ inner(EXPR_e, EXPR_t, k=EXPR_e) }}{{ inner(*EXPR_l) }}{% endmacro %}{{ NAME() }}",
    "{% set nx = namespace(f=CALLED, n=0) %}{{ nx.f(EXPR_t) }}{{ {'k': nx.f}.k(*[EXPR_e], **{'q': EXPR_t}) }}",
    "{% set NAME, (other, third) = EXPR_t, (EXPR_e, EXPR_l) %}{{ NAME }}{{ other }}{{ third }}",
    "{% set nx = namespace({'n': EXPR_e}, k=EXPR_t) %}{% set nx.n, nx.k = nx.k, nx.n %}{{ nx.n }}{{ nx['k'] }}{% set nx.k %}{{ EXPR_t }}{% endset %}{{ nx.k }}",
    "{% for NAME in messages if CALLED(NAME.role) %}BODY{% endfor %}",
    "{% for NAME in messages if CALLED(NAME.role) != ns.a %}{{ loop.index }}BODY{% endfor %}",
    "{% set nx = namespace(n=0) %}{% for NAME in messages if nx.n < 2 %}{% set nx.n = nx.n + 1 %}{{ NAME.content }}{% if EXPR_c %}{% continue %}{% endif %}BODY{% else %}ELSE{% endfor %}",
    "{% for i in range(messages|length) if messages[i].role != 'system' %}{{ messages[i].content }}{% else %}ELSE{% endfor %}",
    "{% if EXPR_c %}{{ EXPR_e|pprint }}{% else %}BODY{% endif %}",
    "{% if EXPR_c %}BODY{% autoescape true %}{{ EXPR_t }}{% endautoescape %}{% endif %}",
    "{{ EXPR_n < EXPR_n <= EXPR_n }}{{ (EXPR_t == EXPR_t) in [EXPR_c] }}",
)  # fmt: skip
_OF_LOOPS: Final = (
    "{{ loop.cycle(w, 'b', messages[0].content) }}",
    "{{ loop.changed(v) }}",
    "{{ loop.changed(loop.index // 2, w) }}",
    "{{ loop.depth }}{{ loop.nope }}{{ loop['index'] }}",
    "{% set ns.b = loop.index0 %}",
    "{% if loop.last %}{% break %}{% endif %}",
    "{% if loop.index is odd %}{% continue %}{% endif %}",
)
_IN_MACROS: Final = (
    "{{ caller() if caller }}",
    "{{ caller(p) if caller }}",
    "{% if caller %}{% set z = caller(q, r='k') %}{{ z }}{% endif %}",
    "{{ varargs|join('+') }}",
    "{{ kwargs }}{{ varargs }}",
    "{% for k in kwargs %}{{ k }}{% endfor %}",
    "{% macro g(z) %}{{ z }}{{ p }}{{ q }}{% endmacro %}{{ g(1) }}{{ g(p) ~ 'g' }}",
)


class TemplateGenerator:
    """Generates random templates. Most render on most conversations; some don't even compile."""

    def __init__(self, rnd: random.Random) -> None:
        self._rnd = rnd
        self._names: list[str] = []
        self._messages: list[str] = []  # variables of loops over messages
        self._loops = self._macros = self._number = 0

    def make(self) -> str:
        """Generates a template."""
        self._names, self._messages, self._loops, self._number = ["v", "w"], [], 0, 0
        head = "{% set v = messages[0].v %}{% set w = messages[-1].content %}{% set ns = namespace(a=v, b=0, c='') %}"
        self._macros = 0
        macros = ""
        for _ in range(self._rnd.choice((0, 0, 1, 2))):
            macros += self._macro()
        body = "".join(self.statement(2) for _ in range(self._rnd.randrange(1, 4)))
        if self._rnd.random() < 0.6:
            body += "{% for m in messages %}<{{ m.role }}>" + self._inside("m", 2, True) + "</s>{% endfor %}"
        return head + macros + body

    def _inside(self, name: str, depth: int, over_messages: bool) -> str:
        names, messages = self._names, self._messages
        self._names = [*names, name]
        self._messages = [*messages, name, name] if over_messages else messages
        self._loops += 1
        text = "".join(self.statement(depth) for _ in range(self._rnd.randrange(1, 3)))
        self._loops -= 1
        self._names, self._messages = names, messages
        return text

    def _macro(self) -> str:
        names, messages, loops = self._names, self._messages, self._loops
        self._names, self._messages, self._loops = ["p", "q"], [], 0
        default = self.expression("e", 1)
        if self._rnd.random() < 0.2:
            default = self._rnd.choice(("p", "p ~ 1", "q", "nope"))
        body = "".join(self.statement(1) for _ in range(self._rnd.randrange(1, 3)))
        body += self._rnd.choice(("", "", *_IN_MACROS))
        self._names, self._messages, self._loops = names, messages, loops
        self._macros += 1
        return "{% macro f" + str(self._macros - 1) + "(p, q=" + default + ") %}" + body + "{% endmacro %}"

    def statement(self, depth: int) -> str:
        rnd = self._rnd
        kind = rnd.random() if depth else rnd.random() * 0.42
        self._number += 1
        name = f"x{self._number}"
        if depth and rnd.random() < 0.2:
            return self._control(name, depth - 1)
        if kind < 0.06:
            return rnd.choice(("\n", "text ", "<|im_end|>", "é", "  \n  "))
        if kind < 0.42:
            return "{{ " + self.expression(rnd.choice("tttee"), 3) + " }}"
        if kind < 0.54:
            other = "{% else %}" + self.statement(depth - 1) if rnd.random() < 0.5 else ""
            return "{% if " + self.expression("c", 2) + " %}" + self.statement(depth - 1) + other + "{% endif %}"
        if kind < 0.72:
            return self._loop(name, depth)
        if kind < 0.8:
            target = rnd.choice((name, name, rnd.choice(self._names), "ns.a", "ns.b", "ns.c"))
            made = "{% set " + target + " = " + self.expression("e", 3) + " %}"
            self._names = [*self._names, target]
            return made
        if kind < 0.86:
            made = "{% set " + name + " %}" + self.statement(depth - 1) + self.statement(depth - 1) + "{% endset %}"
            return (
                made + "{{ " + name + rnd.choice(("", "|trim", "[1:]", " ~ 'z'", ".split('a')[-1]", "|upper")) + " }}"
            )
        if kind < 0.89:
            how = rnd.choice(("upper", "trim", "replace('a', 'b')"))
            return "{% filter " + how + " %}" + self.statement(depth - 1) + "{% endfilter %}"
        if kind < 0.92:
            return "{% generation %}" + self.statement(depth - 1) + "{% endgeneration %}"
        if kind < 0.95 and self._loops:
            return "{% if " + self.expression("c", 1) + " %}{% " + rnd.choice(("break", "continue")) + " %}{% endif %}"
        if kind < 0.96:
            return (
                "{% if "
                + self.expression("c", 2)
                + " %}{{ raise_exception("
                + self.expression("t", 1)
                + ") }}{% endif %}"
            )
        if not self._macros:
            return "{{ v }}"
        called = f"f{rnd.randrange(self._macros)}(" + self.expression("e", 1)
        return (
            "{{ " + called + ") }}"
            if rnd.random() < 0.5
            else "{{ " + called + ", q=" + self.expression("t", 1) + ") ~ w }}"
        )

    def _control(self, name: str, depth: int) -> str:
        """Blocks that define functions, recursive loops, `with`, and what is not compiled."""
        rnd = self._rnd
        form = rnd.choice(_CONTROL)
        if "CALLED" in form and not self._macros:
            return "{{ w }}"
        if "{" in form and rnd.random() < 0.5 and self._loops:
            form += rnd.choice(_OF_LOOPS)
        names, loops = self._names, self._loops
        if "recursive" in form or "call" in form:
            self._loops = 0  # their bodies are functions, which `break` can't leave
        self._names = [*names, name]
        made = form.replace("BODY", self.statement(depth) + self.statement(depth))
        self._names, self._loops = names, loops
        made = (
            made.replace("ELSE", self.statement(0))
            .replace("NAME", name)
            .replace("CALLED", f"f{rnd.randrange(self._macros or 1)}")
        )
        return re.sub(r"EXPR_([a-z])", lambda found: self.expression(found[1], 1), made)

    def _loop(self, name: str, depth: int) -> str:
        over = self._rnd.choice(("messages", "messages", "messages[1:]", "range(messages|length)", "l", "l", "d"))
        items = self.expression(over, 2) if over in "ld" else over
        target, test = name, ""
        if over == "d":
            items, target = f"({items}).items()", f"k{name}, {name}"
        elif self._rnd.random() < 0.2:
            names, self._names = self._names, [*self._names, name]
            test = " if " + self.expression("c", 1)
            self._names = names
        if over.startswith("range"):
            body = "{{ messages[" + name + "].content }}" + self._inside(f"messages[{name}]", depth - 1, True)
        else:
            body = self._inside(name, depth - 1, over.startswith("messages"))
        body += self._rnd.choice(("", "", "", *_OF_LOOPS))
        body += "{% else %}" + self.statement(depth - 1) if self._rnd.random() < 0.15 else ""
        return "{% for " + target + " in " + items + test + " %}" + body + "{% endfor %}"

    def expression(self, kind: str, depth: int) -> str:
        """An expression that yields this kind of value on most conversations."""
        if depth <= 0:
            return self._leaf(kind)
        form = self._rnd.choice(_FORMS[kind]) if self._rnd.random() < 0.95 else self._rnd.choice(_WILD)
        made = re.sub(r"\{([a-z])\}", lambda found: self._part(found[1], depth - 1), form)
        return f"({made})"

    def _part(self, kind: str, depth: int) -> str:
        match kind:
            case "s":
                return self._rnd.choice(_CONSTANTS)
            case "i":
                return self._rnd.choice(("0", "1", "2", "-1", "-2", "5"))
            case "k":
                return self._rnd.choice(_NAMES)
            case _:
                return self.expression(kind, depth - self._rnd.randrange(2))

    def _leaf(self, kind: str) -> str:
        rnd, loops = self._rnd, self._loops and self._rnd.random() < 0.3
        messages = (*self._messages, *self._messages, "messages[0]", "messages[-1]")
        match kind:
            case "t":
                content = f"({rnd.choice(messages)}.content|string)"
                return rnd.choice(
                    (content, content, f"({rnd.choice(self._names)}|string)", "bos_token", rnd.choice(_CONSTANTS))
                )
            case "l":
                return rnd.choice(("messages", "[1, 'a']", "['b', 'a']", "[]", "range(3)", "messages[1:]", "(1, 2)"))
            case "n":
                return (
                    rnd.choice(("loop.index", "loop.index0", "loop.length"))
                    if loops
                    else rnd.choice(("0", "1", "2", "7"))
                )
            case "c":
                return rnd.choice(("loop.first", "loop.last")) if loops else rnd.choice(("true", "false", "v", "w"))
            case "d" | "m":
                return rnd.choice(messages)
            case _:
                if loops:
                    return rnd.choice(("loop.previtem", "loop.nextitem", "loop.index", "loop.last", "loop.revindex"))
                values = (
                    "none",
                    "0.5",
                    "nope",
                    "tools",
                    "enable_thinking",
                    "9007199254740993",
                    "true",
                    "1",
                    "ns.a",
                    "ns.b",
                    "ns.c",
                )
                return rnd.choice(
                    (*self._names, *self._names, *self._names, rnd.choice(values), rnd.choice(_CONSTANTS))
                )


def conversations(rnd: random.Random, count: int) -> list[Conversation]:
    """Conversations with unusual values under `v` and `content`, some with tools and variables."""
    base: list[dict[str, Any]] = [
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
        tools = rnd.choice((None, None, [], [{"name": "f", "parameters": odd_value(rnd)}, NESTED[12]]))
        variables = rnd.choice((None, None, {"enable_thinking": odd_value(rnd), "bos_token": rnd.choice(TEXTS)}))
        made.append(Conversation(messages or [dict(base[1])], tools, None, variables))
    return made
