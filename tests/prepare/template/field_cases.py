"""Small templates, a message of an assistant, and the fields that must be found in the text, for both engines.

Each rule of field provenance has its cases. The template of a case is the body of a loop over messages, `m`; a call is
`c`, its function `f`, and its arguments `a`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from penstock.prepare.chat.conversation import Conversation, Message
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import MARK_SHIFT, Field

Runs = list[tuple[str, str]]  # the name of a field, with the number of the mark if there is one, and the printed text

ARGUMENTS = {
    "city": "Zürich",
    "n": 3,
    "big": 2**70,
    "x": 1.5,
    "yes": True,
    "no": None,
    "l": [1, {"k": ["v", False]}],
    "e": {},
}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALL = {"id": "id7", "type": "function", "function": {"name": "get", "arguments": ARGUMENTS}}


class Case(NamedTuple):
    template: str
    message: Message
    runs: Runs
    spans: Sequence[Any] | None = None  # of the content, or of each of its parts

    @property
    def conversation(self) -> Conversation:
        """Another message comes before it, which has no fields."""
        asked = {"role": "user", "content": "<think>q</think>Hello", "thinking": "why", "tool_calls": []}
        messages = [asked, {"role": "assistant", **self.message}]
        if self.spans is None:
            return Conversation(messages)
        return Conversation(messages, spans=(None, tuple(self.spans)))


def runs_of(rendered: Rendered) -> list[Runs]:
    """The runs of each text."""
    found: list[Runs] = [[] for _ in rendered.text_ends]
    for row, label, start, end in zip(*(column.tolist() for column in rendered.fields), strict=True):
        found[row].append((named(label), rendered.data[start:end].decode()))
    return found


def named(label: int) -> str:
    mark = label >> MARK_SHIFT
    return Field(label & ((1 << MARK_SHIFT) - 1)).name + (f"+{mark}" if mark else "")


def each(body: str) -> str:
    return "{% for m in messages %}" + body + "{% endfor %}"


def said(body: str, runs: Runs, content: Any = "Hello", spans: Sequence[Any] | None = None, **more: Any) -> Case:
    return Case(each(body), {"content": content, **more}, runs, spans)


def called(body: str, runs: Runs, call: Any = CALL, **more: Any) -> Case:
    inside = "{% set f = c.function or c %}{% set a = f.arguments %}" + body
    calls = "{% for c in m.tool_calls or [] %}" + inside + "{% endfor %}"
    return Case(each(calls), {"content": "", "tool_calls": [call], **more}, runs)


def shown(body: str, *texts: str, **arguments: Any) -> Case:
    """A case whose call has these arguments; all of its runs are parts of them."""
    call = {"function": {"name": "get", "arguments": arguments or ARGUMENTS}}
    return called(body, [("CALL_ARGUMENTS", text) for text in texts], call)


ALL = "{{ m.content }}"
THINK = "<think>\nwhy\n</think>\n\nBecause"
THOUGHT = [("THINK_TAG", "<think>"), ("THOUGHT", "\nwhy\n"), ("THINK_TAG", "</think>"), ("CONTENT", "\n\nBecause")]
PARTS = [{"type": "text", "text": "a</think>b"}, {"type": "text", "text": "c"}]

VALUES = {
    "content": said(f"<{{{{ m.role }}}}>{ALL}", [("CONTENT", "Hello")]),
    "escaped content": said(ALL, [("CONTENT", 'a\n"b" \\ é日😀')], 'a\n"b" \\ é日😀'),
    "empty content": said(f"{ALL}{{{{ m.content|tojson }}}}", [], ""),
    "role and other keys": said("{{ m.role }}{{ m.name }}{{ m.x }}", [], name="bob", x={"content": "a"}),
    "content that is an object": said("{{ m.content|tojson }}", [], {"text": "a"}),
    "thought": said(ALL, THOUGHT, THINK),
    "thought without an opening": said(
        ALL, [("THOUGHT", "why"), ("THINK_TAG", "</think>"), ("CONTENT", "a<think>b")], "why</think>a<think>b"
    ),
    "closing alone": said(ALL, [("THINK_TAG", "</think>"), ("CONTENT", "a")], "</think>a"),
    "empty thought": said(ALL, [("THINK_TAG", "<think></think>"), ("CONTENT", "a")], "<think></think>a"),
    "two openings": said(
        ALL,
        [("CONTENT", "x<think>y"), ("THINK_TAG", "<think>"), ("THOUGHT", "z"), ("THINK_TAG", "</think>")],
        "x<think>y<think>z</think>",
    ),
    "a later closing": said(
        ALL,
        [("THINK_TAG", "<think>"), ("THOUGHT", "a"), ("THINK_TAG", "</think>"), ("CONTENT", "b</think>c</think>")],
        "<think>a</think>b</think>c</think>",
    ),
    "a closing after a closing alone": said(
        ALL, [("THOUGHT", "a"), ("THINK_TAG", "</think>"), ("CONTENT", "b</think>c")], "a</think>b</think>c"
    ),
    "two thoughts": said(
        ALL,
        [
            *(("THOUGHT", "a"), ("THINK_TAG", "</think>"), ("CONTENT", "b"), ("THINK_TAG", "<think>")),
            *(("THOUGHT", "c"), ("THINK_TAG", "</think>"), ("CONTENT", "d")),
        ],
        "a</think>b<think>c</think>d",
    ),
    "never closed": said(ALL, [("CONTENT", "<think>a")], "<think>a"),
    "parts": said(
        "{% for p in m.content if p.text %}[{{ p.type }}:{{ p.text }}]{% endfor %}",
        [("THOUGHT", "a"), ("THINK_TAG", "</think>"), ("CONTENT", "b"), ("CONTENT", "c")],
        PARTS,
    ),
    "parts of reasoning": said(
        "{% for p in m.content if p.type %}[{{ p.type }}:{{ p.y|tojson }}{{ p.x|tojson }}{{ p.text }}]{% endfor %}",
        [("REASONING", '["why"]5'), ("REASONING", "t</think>"), ("CONTENT", "c")],
        [
            {"type": "thinking", "y": ["why"], "x": 5},
            {"type": "reasoning", "text": "t</think>", "y": "", "x": ""},
            {"type": "text", "text": "c", "x": 6, "y": 7},
        ],
    ),
    "parts of reasoning as JSON": said(
        "{% for p in m.content if p.type %}{{ p|tojson }}{% endfor %}",
        [("REASONING", '"why"'), ("REASONING", '{"a": "</think>"}')],
        [{"type": "thinking", "thinking": "why", "x": {"a": "</think>"}}],
    ),
    "parts that are text": said(
        "{% for p in m.content %}[{{ p }}]{% endfor %}",
        [("THOUGHT", "a"), ("THINK_TAG", "</think>"), ("CONTENT", "b"), ("CONTENT", "c")],
        ["a</think>b", "c"],
    ),
    "reasoning_content": said(
        "{{ m.reasoning_content }}", [("REASONING", "a</think>b")], reasoning_content="a</think>b"
    ),
    "reasoning under another name": said(
        "[{{ m.thinking }}][{{ m.reasoning_content }}]", [("REASONING", "why")] * 2, reasoning="why"
    ),
    "two texts of reasoning": said(
        "[{{ m.thinking }}][{{ m.reasoning_content }}]",
        [("REASONING", "t"), ("REASONING", "r")],
        reasoning_content="r",
        thinking="t",
    ),
    "reasoning that is no text": said(
        "{% for r in m.reasoning or [] %}[{{ r.text }}{{ r.n }}{{ r|tojson }}]{% endfor %}{{ m.thinking|tojson }}",
        [("REASONING", 'why5{"text": "why", "n": 5}'), ("REASONING", '[{"text": "why", "n": 5}]')],
        reasoning=[{"text": "why", "n": 5}],
    ),
    "a call": called(
        "{{ c.id }}{{ c.type }}<{{ f.name }}>{{ a|tojson }}", [("CALL_NAME", "get"), ("CALL_ARGUMENTS", JSON)]
    ),
    "a bare call": called(
        "{{ f.name }}({{ a|tojson }})",
        [("CALL_NAME", "get"), ("CALL_ARGUMENTS", "{}")],
        {"name": "get", "arguments": {}, "id": "x"},
    ),
    "arguments as text": called(
        "{{ f.name }}({{ a }})",
        [("CALL_NAME", "get"), ("CALL_ARGUMENTS", '{"a": "é\\n"}')],
        {"function": {"name": "get", "arguments": '{"a": "é\\n"}'}},
    ),
    "parameters": called(
        "{{ f.name }}({{ f.parameters.a|tojson }})",
        [("CALL_NAME", "get"), ("CALL_ARGUMENTS", '["x"]')],
        {"name": "get", "parameters": {"a": ["x"]}},
    ),
    "parameters beside arguments": called(
        "{{ f.parameters.a }}({{ a|tojson }})",
        [("CALL_ARGUMENTS", "null")],
        {"name": "get", "parameters": {"a": "x"}, "arguments": None},
    ),
    "other keys of a call": called(
        "{{ f.description }}{{ c.index }}{{ f.a|tojson }}",
        [],
        {"index": 5, "function": {"name": "get", "description": "d", "a": ["x"]}},
    ),
    "a function that is no object": called(
        "{{ c.function }}{{ c.name }}({{ c.arguments.a }})",
        [("CALL_NAME", "get"), ("CALL_ARGUMENTS", "x")],
        {"function": "f", "name": "get", "arguments": {"a": "x"}},
    ),
    "function_call": said(
        "{% if m.function_call %}{{ m.function_call.name }}({{ m.function_call.arguments }}){% endif %}",
        [("CALL_NAME", "get"), ("CALL_ARGUMENTS", "{}")],
        function_call={"name": "get", "arguments": "{}"},
    ),
    "tool_responses": said(
        "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response|tojson }};{% endfor %}",
        [("TOOL_RESPONSE", "get"), ("TOOL_RESPONSE", '{"r": [5]}')],
        tool_responses=[{"name": "get", "response": {"r": [5]}}],
    ),
    "another role": Case(each(ALL), {"role": "tool", "content": "r", "tool_calls": [CALL]}, []),
}

EXACT = {  # rule 1
    "slice": said("{{ m.content[1:3] }}{{ m.content[0] }}", [("CONTENT", "elH")]),
    "split": said(
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}|{{ m.content.split('</think>')[0].split('<think>')[-1] }}",
        [("CONTENT", "Because"), ("THOUGHT", "\nwhy\n")],
        THINK,
    ),
    "split with a limit": said("{{ m.content.split('l', 1)[1] }}", [("CONTENT", "lo")]),
    "rsplit": said("{{ m.content.rsplit('l', 1)[0] }}", [("CONTENT", "Hel")]),
    "split at white space": said("{{ m.content.split()[1] }}", [("CONTENT", "b")], "a b"),
    "partition": said("{{ m.content.partition('l')|join('|') }}", [("CONTENT", t) for t in ("He", "l", "lo")]),
    "strip": said("[{{ m.content.strip() }}{{ m.content|trim }}]", [("CONTENT", "aa")], " a\n"),
    "strip of characters": said("[{{ m.content.rstrip('lo') }}]", [("CONTENT", "He")]),
    "removeprefix": said("{{ m.content.removeprefix('He') }}", [("CONTENT", "llo")]),
    "splitlines": said("{{ m.content.splitlines()|join('|') }}", [("CONTENT", "a"), ("CONTENT", "é")], "a\né"),
    "characters": said(
        "{% for x in m.content %}{{ x }}{{ '-' }}{% endfor %}", [("CONTENT", "é"), ("CONTENT", "日")], "é日"
    ),
    "characters as a list": said("{{ m.content|list|last }}{{ m.content|first }}", [("CONTENT", "oH")]),
    "sum": said("{{ '<' + m.content + '>' }}", [("CONTENT", "Hello")]),
    "sum of two": said("{{ m.content + m.content }}", [("CONTENT", "HelloHello")]),
    "concat": said("{{ '<' ~ m.content ~ m.role ~ 5 }}", [("CONTENT", "Hello")]),
    "two fields that touch": said(
        "{{ m.content ~ m.thinking }}", [("CONTENT", "Hello"), ("REASONING", "why")], thinking="why"
    ),
    "kept concat": said(
        "{% set x = '<' ~ m.content ~ '>' %}{{ x[2:] }}{{ x }}", [("CONTENT", "ello"), ("CONTENT", "Hello")]
    ),
    "join": said("{{ ['a', m.content, 'b']|join(', ') }}", [("CONTENT", "Hello")]),
    "join by a field": said("{{ m.content.join(['1', '2', '3']) }}", [("CONTENT", "H"), ("CONTENT", "H")], "H"),
    "join of an attribute": called("{{ m.tool_calls|join('-', 'function.name') }}", [("CALL_NAME", "get")]),
    # inserted text without a label takes the one of the text that it replaces, if all of that has the same
    "replace": said("{{ m.content.replace('l', '<>') }}", [("CONTENT", "He<><>o")]),
    "replace in several fields": said(
        "{{ m.content|replace('\n', '|') }}",
        [("THINK_TAG", "<think>"), ("THOUGHT", "|why|"), ("THINK_TAG", "</think>"), ("CONTENT", "||Because")],
        THINK,
    ),
    "replace across fields": said(
        "{{ m.content.replace('k>a', 'X') }}", [("THINK_TAG", "</thin"), ("CONTENT", "b")], "</think>ab"
    ),
    "replace of what is no field": said(
        "{{ ('<' ~ m.content ~ '>').replace('<', '{').replace('>', m.thinking) }}",
        [("CONTENT", "Hello"), ("REASONING", "why")],
        thinking="why",
    ),
    "replace of one field by another": said(
        "{{ m.content.replace('l', m.thinking) }}",
        [("CONTENT", "H"), ("REASONING", "why"), ("CONTENT", "o")],
        "Hlo",
        thinking="why",
    ),
    "replace with a limit": said("{{ m.content.replace('l', 'L', 1) }}", [("CONTENT", "HeLlo")]),
    "replace of nothing at all": said("{{ m.content.replace('', '-') }}", [("CONTENT", "a"), ("CONTENT", "b")], "ab"),
    "replace by a field": said("{{ 'a-b'|replace('-', m.content) }}", [("CONTENT", "Hello")]),
    "replace of nothing": said("{{ m.content|replace('zz', 'y') }}", [("CONTENT", "Hello")]),
    "repeat": said("{{ m.content * 2 }}|{{ '-' * 3 }}", [("CONTENT", "HelloHello")]),
    "batch": said(
        "{% for x in m.content|batch(4) %}{{ x|join }}|{% endfor %}", [("CONTENT", "Hell"), ("CONTENT", "o")]
    ),
    "safe": said("{{ '<' ~ (m.content|safe) ~ '>' }}", [("CONTENT", "H&llo")], "H&llo"),
    "JSON that is safe": shown("{{ '<' ~ (a|tojson|safe) ~ '>' }}", '{"q": "a&b"}', q="a&b"),
    "default": said("{{ m.content|default('x') }}{{ m.zz|default(m.content) }}", [("CONTENT", "HelloHello")]),
    "condition": said("{{ m.content or 'x' }}{{ 'y' if m.zz else m.content }}", [("CONTENT", "HelloHello")]),
}

REWRITTEN = {  # rule 2
    "upper": said("{{ m.content|upper }}{{ m.content.lower() }}", [("CONTENT", "STRASSE'É日straße'é日")], "Straße'é日"),
    "case": said(
        "{{ m.content|title }}{{ m.content|capitalize }}{{ m.content.title() }}", [("CONTENT", "A-BA-bA-B")], "a-b"
    ),
    "swapcase": said("{{ m.content.swapcase() }}{{ m.content.casefold() }}", [("CONTENT", "hELLOhello")]),
    "mixed": said("{{ m.content|upper }}{{ ('<' ~ m.content)|upper }}", [], THINK),
    "partial": said("{{ ('<' ~ m.role ~ m.content)|upper }}{{ (m.content ~ ' ')|title }}", []),
    "part of mixed": said("{{ m.content.split('</think>')[-1].strip()|upper }}", [("CONTENT", "BECAUSE")], THINK),
    "indent": said("{{ m.content|indent(2) }}{{ m.content|indent(1, true) }}", [("CONTENT", "a\n  b a\n b")], "a\nb"),
    "center": said(
        "{{ m.content.center(9) }}|{{ m.content|center(7) }}", [("CONTENT", "  Hello  "), ("CONTENT", " Hello ")]
    ),
    "ljust": said("{{ m.content.ljust(7) }}|{{ m.content.zfill(6) }}", [("CONTENT", "Hello  "), ("CONTENT", "0Hello")]),
    "truncate": said("{{ m.content|truncate(8, true, '…', 0) }}", [("CONTENT", "Hello w…")], "Hello world"),
    "wordwrap": said("{{ m.content|wordwrap(5) }}", [("CONTENT", "Hello\nworld")], "Hello world"),
    "sum with markup": called(
        "{{ f.name + '[<' + (a.city|safe) + f.name }}",
        [("CALL_NAME", "a&lt;b\0"), ("CALL_ARGUMENTS", "<Rom>"), ("CALL_NAME", "a&lt;b\0")],
        {"function": {"name": "a<b\0", "arguments": {"city": "<Rom>"}}},
    ),
    "escape": said(
        "{{ m.content|e }}|{{ m.content|forceescape }}", [("CONTENT", "a&lt;b"), ("CONTENT", "a&lt;b")], "a<b"
    ),
    "urlencode": said("{{ m.content|urlencode }}", [("CONTENT", "a%20b")], "a b"),
    "striptags": said("{{ m.content|striptags }}", [("CONTENT", "ab")], "a<i>b</i>"),
    "reverse": said(
        "{% if m.content is string %}{{ m.content|reverse }}{{ m.content[::2] }}{% endif %}", [("CONTENT", "olleHHlo")]
    ),
    "arguments don't count": said("{{ 'x'.center(m.content|length) }}{{ 'a\nb'|indent(m.content) }}", []),
    "length": said("{{ m.content|length }}{{ m.content == 'a' }}{{ m.content|wordcount }}", []),
    "rewritten and kept": said(
        "{% set x = m.content|upper %}[{{ x[:2] }}]{{ x ~ 1 }}", [("CONTENT", "HE"), ("CONTENT", "HELLO")]
    ),
    "text of a number": shown("{{ a.n|string }}|{{ a.yes|string|lower }}|{{ a.no|string|upper }}", "3", "true", "NONE"),
    "text of text": said("{{ m.content|string }}", THOUGHT, THINK),
    "trim of a number": shown("{{ a.n|trim }}|{{ a.yes|lower }}", "3", "true"),
}

FORMATTED = {  # rule 3
    "percent": said("{{ '<%s|%s>' % (m.content, m.role) }}", [("CONTENT", "Hello")]),
    "percent of one": said("{{ '<%s>%%' % m.content }}", [("CONTENT", "Hello")]),
    "percent of mixed": said("{{ '<%s>' % m.content }}", THOUGHT, THINK),
    "percent of numbers": shown("{{ '%d-%s-%s' % (a.n, a.yes, a.l) }}", "3", "True", "[1, {'k': ['v', False]}]"),
    "filter format": said("{{ '<%s|%s>'|format(m.content, 5) }}", [("CONTENT", "Hello")]),
    "method format": said("{{ '<{}|{{}}{}>'.format(m.content, m.role) }}", [("CONTENT", "Hello")]),
    "method format by names": said("{{ '{x}{0}{x}'.format(m.role, x=m.content) }}", [("CONTENT", "Hello")] * 2),
    "method format of numbers": shown("{{ '{}-{}'.format(a.n, a.no) }}", "3", "None"),
    "format of an unlabelled object": called("{{ '<%s>' % {'a': f.name} }}", [("CALL_NAME", "'get'")]),
    "percent with a width": said(
        "{{ '[%7s]' % m.content }}{{ '[%-6s|%.2s]' % (m.content, m.content) }}",
        [("CONTENT", "  Hello"), ("CONTENT", "Hello "), ("CONTENT", "He")],
    ),
    "method format with a width": said("{{ '[{:>7}]'.format(m.content) }}", [("CONTENT", "  Hello")]),
    "percent of a float": shown("{{ '%.2f' % a.x }}", "1.50"),
}

PRINTED = {  # rule 4
    "JSON of arguments": shown("{{ a|tojson }}", JSON),
    "JSON with an indent": shown("{{ a|tojson(indent=1) }}", '{\n "q": [\n  1\n ]\n}', q=[1]),
    "JSON in order": shown(
        "{{ a|tojson(sort_keys=true, ensure_ascii=true) }}", '{"a": "\\u00e9", "b": null}', b=None, a="é"
    ),
    "JSON that is kept": shown("{% set x = a|tojson %}{{ x[1:-1] }}", '"q": 1', q=1),
    "JSON of a call": called("{{ c|tojson }}", [("CALL_NAME", '"get"'), ("CALL_ARGUMENTS", JSON)]),
    "JSON of a message": said(
        "{{ m|tojson }}",
        [("REASONING", '{"a": 1}'), ("CONTENT", '"Hello"'), ("REASONING", '{"a": 1}')],
        thinking={"a": 1},
    ),
    "JSON of mixed text": said("{{ m.content|tojson }}", [], THINK),
    "JSON of a part of it": said(
        "{{ m.content.split('</think>')[1].strip()|tojson }}", [("CONTENT", '"Because"')], THINK
    ),
    "JSON of text": said("{{ m.content|tojson }}", [("CONTENT", '"a\\n\\"é"')], 'a\n"é'),
    "JSON of values": shown(
        "{% for k in a %}{{ k }}={{ a[k]|tojson }};{% endfor %}",
        *(t for k, v in ARGUMENTS.items() for t in (k, json.dumps(v, ensure_ascii=False))),
    ),
    "text of values": shown(
        "{% for k, v in a|items %}{{ v }};{% endfor %}",
        *map(str, ARGUMENTS.values()),
    ),
    "repr": shown("{{ a }}", str(ARGUMENTS)),
    "repr of a call": called("{{ f }}", [("CALL_NAME", "'get'"), ("CALL_ARGUMENTS", str(ARGUMENTS))]),
    "string of a call": called("{{ f|string }}", [("CALL_NAME", "'get'"), ("CALL_ARGUMENTS", str(ARGUMENTS))]),
    "concat of a call": called("{{ f ~ '' }}", [("CALL_NAME", "'get'"), ("CALL_ARGUMENTS", str(ARGUMENTS))]),
    "list of calls": called("{{ m.tool_calls|tojson }}", [("CALL_NAME", '"get"'), ("CALL_ARGUMENTS", JSON)]),
}

ELEMENTS = {  # rule 5
    "items": shown("{% for k, v in a.items() %}{{ k }}:{{ v }},{% endfor %}", "q", "1", "r", "é", q=1, r="é"),
    "items filter": shown("{% for k, v in a|items %}{{ k }}:{{ v }},{% endfor %}", "q", "1", q=1),
    "dictsort": shown("{% for k, v in a|dictsort %}{{ k }}:{{ v }},{% endfor %}", "a", "2", "b", "1", b=1, a=2),
    "keys": shown("{{ a.keys()|list|tojson }}", '"q"', '"r"', q=1, r=2),
    "values": shown("{{ a.values()|list|tojson }}", "1", "[true]", q=1, r=[True]),
    "list": shown("{{ a|list|join('-') }}{{ a|first }}", "q", "rq", q=1, r=2),
    "elements": shown(
        "{% for x in a.q %}{{ x }},{% endfor %}{{ a.q|first }}|{{ a.q[-1] }}", "1", "None", "1", "None", q=[1, None]
    ),
    "sort": shown("{{ a.q|sort|join(',') }}|{{ a.q|unique|list|tojson }}", "1", "2", "2", "1", q=[2, 1]),
    "reverse of a list": shown("{{ a.q|reverse|list|tojson }}", "1", "2", q=[2, 1]),
    "map": shown("{{ a.q|map(attribute='x')|join(',') }}", "1", "2", q=[{"x": 1}, {"x": 2}]),
    "map by a filter": shown("{{ a.q|map('upper')|join(',') }}", "A", "B", q=["a", "b"]),
    "select": shown(
        "{{ a.q|select|join(',') }}|{{ a.q|reject('none')|list|tojson }}", "True", "true", "0", q=[True, None, 0]
    ),
    "min": shown("{{ a.q|min }}|{{ a.q|max }}", "1", "2", q=[2, 1]),
    "groupby": shown(
        "{% for k, v in a.q|groupby('x') %}{{ k }}={{ v[0].y }};{% endfor %}", "1", "b", q=[{"x": 1, "y": "b"}]
    ),
    "list of slices": shown("{{ a.q[1:]|tojson }}", "2", "3", q=[1, 2, 3]),
    "sum of lists": shown("{{ (a.q + [0])|tojson }}", "1", q=[1]),
    "get": shown("{{ a.get('q') }}|{{ a['q'] }}|{{ a.get('zz', 5) }}", "1", "1", q=1),
    "arithmetic": shown("{{ a.n + 1 }}{{ a.n * 2 }}{{ -a.n }}{{ a.x / 2 }}{{ a.n|abs }}{{ a.n|int }}{{ a.x|round }}"),
    "comparisons": shown("{{ a.n > 1 }}{{ not a.yes }}{{ a.l|length }}{{ a.n is number }}{{ a.yes == true }}"),
    "tests": shown(
        "{{ [a.yes is true, a.no is none, a.n is integer, a.yes is boolean, a.l is sequence, a.e is mapping] }}"
    ),
    "conditions": shown("{% if a.no is none and a.yes %}{{ a.yes and a.n }}{% endif %}", "3"),
    "spread over lines": called(
        "{{ f.name ~ '(' }}{% for k in a|sort %}{{ ', ' if not loop.first }}{{ k }}={{ a[k]|tojson }}{% endfor %}",
        [
            ("CALL_NAME", "get"),
            ("CALL_ARGUMENTS", "a"),
            ("CALL_ARGUMENTS", '"b"'),
            ("CALL_ARGUMENTS", "c"),
            ("CALL_ARGUMENTS", "[2]"),
        ],
        {"name": "get", "arguments": {"c": [2], "a": "b"}},
    ),
}

MADE = {  # rule 6
    "an object": called(
        "{{ {'name': f.name, 'arguments': a}|tojson }}", [("CALL_NAME", '"get"'), ("CALL_ARGUMENTS", JSON)]
    ),
    "an object with a field as key": called(
        "{{ {f.name: 5}|tojson }}{{ {f.name: 5} }}", [("CALL_NAME", '"get"'), ("CALL_NAME", "'get'")]
    ),
    "a list": said("{{ [m.content, 5]|tojson }}{{ (m.content, 5) }}", [("CONTENT", '"Hello"'), ("CONTENT", "'Hello'")]),
    "a namespace": shown("{% set ns = namespace(x=a.n) %}{{ ns.x }}", "3"),
    "a copy": shown("{{ a.copy()|tojson }}", '"q"', "1", q=1),
}

CAPTURED = {  # rule 7
    "set block": said("{% set x %}<{{ m.content }}>{% endset %}{{ x }}{{ x }}", [("CONTENT", "Hello")] * 2),
    "set block after a field": said(
        "{{ m.content }}{% set x %}{{ m.content }}{% endset %}{{ m.content }}|{{ x }}",
        [("CONTENT", "HelloHello"), ("CONTENT", "Hello")],
    ),
    "set block with a filter": said("{% set x | upper %}{{ m.content }}{% endset %}{{ x }}", [("CONTENT", "HELLO")]),
    "filter block": said("{% filter upper %}{{ m.content }}{% endfilter %}", [("CONTENT", "HELLO")]),
    "macro": said(
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(m.content) }}{{ f(m.content)|upper }}{{ f(m.content)[1:-1] }}",
        [("CONTENT", "Hello"), ("CONTENT", "Hello")],
    ),
    "call block": said(
        "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}{{ m.content }}{% endcall %}",
        [("CONTENT", "Hello")],
    ),
    "twice": said("{{ m.content }}\n{{ m.content }}", [("CONTENT", "Hello")] * 2),
    "a capture that is left": said(
        f"{ALL}{{% for x in 'ab' %}}{{% set y %}}{ALL}{{% break %}}{{% endset %}}{{% endfor %}}{ALL}",
        [("CONTENT", "HelloHello")],
    ),
    "a recursive loop": said(
        "{% for x in m.l or [] recursive %}{{ m.content }}{% if x is sequence %}<{{ loop(x) }}>{% endif %}{% endfor %}",
        [("CONTENT", "Hello"), ("CONTENT", "Hello")],
        l=[[1]],
    ),
}

MARKED = {  # spans in the data
    "a mark": said(ALL, [("CONTENT", "é"), ("CONTENT+1", "日😀"), ("CONTENT", "x")], "é日😀x", [(1, 3)]),
    "marks that touch": said(ALL, [("CONTENT+1", "a"), ("CONTENT+2", "bc")], "abc", [(0, 1), (1, 3)]),
    "an empty mark": said(ALL, [("CONTENT", "ab"), ("CONTENT+2", "c")], "abc", [(1, 1), (2, 3)]),
    "a mark across a thought": said(
        ALL,
        [
            *(("THOUGHT", "w"), ("THOUGHT+1", "hy"), ("THINK_TAG+1", "</think>"), ("CONTENT+1", "B"), ("CONTENT", "e")),
        ],
        "why</think>Be",
        [(1, 12)],
    ),
    "a mark inside a tag": said(
        ALL, [("THINK_TAG", "</"), ("THINK_TAG+1", "th"), ("THINK_TAG", "ink>")], "</think>", [(2, 4)]
    ),
    "marks in parts": said(
        "{% for p in m.content if p.text %}[{{ p.text }}]{% endfor %}",
        [("CONTENT", "a"), ("CONTENT+1", "b"), ("CONTENT", "c"), ("CONTENT+2", "d"), ("CONTENT+3", "e")],
        [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}, {"type": "text", "text": "de"}],
        [((1, 2),), None, ((0, 1), (1, 2))],
    ),
    "a marked text": said("{{ m.content|upper }}{{ m.content|tojson }}", [("CONTENT+1", 'AB"ab"')], "ab", [(0, 2)]),
    "a text that is marked in part": said("{{ m.content|upper }}{{ m.content|tojson }}", [], "ab", [(0, 1)]),
}

CASES = {
    f"{rule}: {name}": case
    for rule, cases in (
        *(("values", VALUES), ("exact", EXACT), ("rewritten", REWRITTEN), ("formatted", FORMATTED)),
        *(("printed", PRINTED), ("elements", ELEMENTS), ("made", MADE), ("captured", CAPTURED), ("marked", MARKED)),
    )
    for name, case in cases.items()
}


# ---- sentinels: words that occur once in a conversation


class Sentinels(NamedTuple):
    """A conversation, and the words that the fields of its assistants give, each once."""

    conversation: Conversation
    words: dict[str, Field]

    def printed(self, text: str) -> Iterator[tuple[Field, int, int]]:
        """The field of each word in a text, and where it is printed: as it is, or as JSON or Python escape it."""
        for word, field in self.words.items():
            forms = {word, *(json.dumps(word, ensure_ascii=ascii)[1:-1] for ascii in (False, True)), repr(word)[1:-1]}
            for form in forms:
                start = text.find(form)
                while start >= 0:
                    yield field, start, start + len(form)
                    start = text.find(form, start + 1)


def sentinels(*, as_text: bool = False, in_content: bool = False, flag: bool = True) -> Sentinels:
    """A chat with calls and reasoning; `flag` is a boolean in its arguments, which has no word of its own.

    `as_text`: arguments are JSON text. `in_content`: reasoning is given as `<think>` inside of content.
    """
    words: dict[str, Field] = {}

    def word(text: str, field: Field) -> str:
        words[text] = field
        return text

    def number(n: int) -> int:
        return int(word(str(7130000 + n), Field.CALL_ARGUMENTS))

    def call(n: int) -> Message:
        keys = [word(f"Kzq{n}{k}k", Field.CALL_ARGUMENTS) for k in range(9)]
        values = [
            word(f"Vzq{n}{k}k{more}", Field.CALL_ARGUMENTS) for k, more in enumerate(("", '"\\\n<&', "é日😀", "", ""))
        ]
        nested = [number(10 * n + 1), [values[3], None, {keys[5]: values[4]}]]
        plain = [values[0], values[1], values[2], number(10 * n), nested, flag, None, []]
        arguments: Any = {keys[k]: value for k, value in zip((0, 1, 2, 3, 4, 6, 7, 8), plain, strict=True)}
        if as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": word(f"Nzq{n}k", Field.CALL_NAME), "arguments": arguments}
        return {"id": f"call0000{n}", "type": "function", "function": function}

    def says(n: int, *calls: Message) -> Message:
        content, reasoning = word(f"Azq{n}k", Field.CONTENT), f"Rzq{n}k é"
        message: Message = {"role": "assistant", "content": content}
        if in_content:
            message["content"] = f"<think>\n{word(reasoning, Field.THOUGHT)}\n</think>\n\n{content}"
        else:
            message["reasoning_content"] = word(reasoning, Field.REASONING)
        return {**message, "tool_calls": list(calls)} if calls else message

    def result(n: int) -> Message:
        return {"role": "tool", "tool_call_id": f"call0000{n}", "name": f"Nzq{n}k", "content": f"Tzq{n}k"}

    messages = [
        *({"role": "system", "content": "Szq0k"}, {"role": "user", "content": "Uzq1k"}),
        *(says(2, call(2)), result(2), says(4), {"role": "user", "content": "Uzq5k"}),
        *(says(6, call(6)), result(6), says(8)),
    ]
    return Sentinels(Conversation(messages), words)
