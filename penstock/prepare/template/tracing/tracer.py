"""Renders a template again with traced messages, to find out which message and field printed which characters.

The template gets additional nodes that mark loops, printed expressions and generation blocks. The caller compares its
text with the plain one; if they differ, the row's regions are unknown.
"""

# ruff: noqa: N802, N815 (jinja2 finds visitors by name)
from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat, zip_longest
from typing import Any, Final, NamedTuple, cast

import jinja2
from jinja2 import nodes
from jinja2.filters import do_join, do_replace
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from penstock.prepare.chat.conversation import Message, Role, roles_of
from penstock.prepare.template.budget import Budget
from penstock.prepare.template.sandbox import Sandbox, call_filter, is_generation
from penstock.prepare.template.tracing.provenance import (
    Buffer,
    Event,
    Iteration,
    Loop,
    Mark,
    Span,
    Traced,
    TracedSpan,
    add_span,
    claim_statement,
    concat,
    owned_spans,
    trace,
    traced,
    without_owners,
)
from penstock.prepare.template.tracing.values import (
    TracingFormatter,
    marked_safe,
    percent,
    rewritten,
    text_of,
    tojson,
    trace_field,
    unlabelled,
)
from penstock.prepare.template.turns import MARK_SHIFT, Field

ENTER: Final = "penstock_enter"
ITERATION: Final = "penstock_iteration"
LEAVE: Final = "penstock_leave"
PRINTED: Final = "penstock_printed"
GENERATION: Final = "penstock_generation"
# These filters produce new text. The implementations of some would keep some spans.
REWRITING_FILTERS: Final = (
    *("e", "escape", "filesizeformat", "forceescape", "indent", "pprint", "safe", "striptags", "title", "truncate"),
    *("urlencode", "urlize", "wordwrap", "xmlattr"),
)
TESTS_OF_CONSTANTS: Final = ("boolean", "false", "integer", "none", "number", "sameas", "true")
Marks = Sequence[Any] | None  # the marked spans of each message: of its content, or of each of the content's parts


class Trace(NamedTuple):
    """A rendered text, its owners and its fields; positions are character offsets."""

    text: str
    spans: list[Span]
    fields: list[tuple[int, int, int]]  # label, start, end
    generations: list[tuple[int, int]]
    known: bool


class Tracer(Sandbox):
    """A sandbox that traces the messages of one row at a time."""

    formatter = TracingFormatter
    whole_text = staticmethod(text_of)

    def __init__(self, date: datetime.date) -> None:
        super().__init__(date)
        self._numbers: dict[int, int] = {}  # id of a message -> its number
        self._assistants: list[bool] = []
        self._loops: list[Loop] = []
        self._captured_generation = False
        self._only_text = False  # whether only strings have labels
        self.filters |= {name: self._rewriting(name) for name in REWRITING_FILTERS}
        self.tests |= {name: _of_constants(cast(Callable[..., Any], self.tests[name])) for name in TESTS_OF_CONSTANTS}
        self.filters |= {
            "format": self._format(self.filters["format"]),
            "join": self.metered("join", _join),
            "replace": self.metered("replace", _replace),
            "string": self.metered("string", self._string),
            "tojson": self.metered("tojson", tojson),
            ENTER: self.enter_loop,
            ITERATION: self.begin_iteration,
            LEAVE: self.leave_loop,
            PRINTED: self.printed,
            GENERATION: self.generation,
        }

    def prepare(self, tree: nodes.Template) -> None:
        super().prepare(tree)
        _Annotating().visit(tree)

    def trace(
        self, template: jinja2.Template, context: Mapping[str, Any], marks: Marks = None, only_text: bool = False
    ) -> Trace:
        """Render a row with traced messages. With `only_text`, values that are not strings have no label."""
        messages: Sequence[Message] = context["messages"]
        self._assistants = [role is Role.ASSISTANT for role in roles_of(messages)]
        self._only_text = only_text
        given = zip_longest(messages, (marks or ())[: len(messages)])
        copies = [self._trace_message(message, number, own) for number, (message, own) in enumerate(given)]
        self._numbers = {id(copy): number for number, copy in enumerate(copies)}
        self._loops.clear()
        self._captured_generation = False
        self.budget.start(context)
        root = Buffer(self._assistants)
        text = root.collect(
            template.root_render_func(template.new_context({**context, "messages": copies})), self.budget
        )
        spans = owned_spans(text.spans, self._assistants)
        fields = [(label, start, end) for start, end, label, _ in text.labels]
        return Trace(text, spans, fields, sorted(root.generations), not self._captured_generation)

    # ---- text

    def concat(self, chunks: Iterable[str]) -> str:
        parts = list(chunks)
        self.budget.join(list(map(len, parts)))
        capture = Buffer(self._assistants)
        text = capture.collect(parts, self.budget)
        self._captured_generation |= bool(capture.generations)
        return text

    def join(self, values: Iterable[Any]) -> str:
        parts = list(map(self.text, values))
        self.budget.join(list(map(len, parts)))
        return concat(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        made = super().call_binop(context, operator, left, right)
        if operator == "%" and isinstance(made, str):
            return percent(left, right, _plain(made), self.text) if not isinstance(made, Markup) else made
        return made

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a value; each level of a recursive loop is a loop of its own."""
        if not isinstance(__obj, LoopContext):
            return super().call(__context, __obj, *args, **kwargs)
        __self._loops.append(Loop())
        made = super().call(__context, __obj, *args, **kwargs)
        __self._loops.pop()
        return made

    def call_method(self, context: Context, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make `join` and `replace` of plain strings keep the origin of traced arguments."""
        if type(method.__self__) is str and method.__name__ in ("join", "replace"):
            method = getattr(Traced(method.__self__), method.__name__)
        return super().call_method(context, method, args, kwargs)

    def _rewriting(self, name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = self.filters[name]

        @jinja2.pass_eval_context
        def run(eval_ctx: EvalContext, value: Any, /, *args: Any, **kwargs: Any) -> Any:
            made = _plain(function(eval_ctx, value, *args, **kwargs))
            if not isinstance(made, Markup):
                return rewritten(value, made)
            same = name == "safe" and isinstance(value, Traced)
            return marked_safe(made, without_owners(value) if same else rewritten(value, str(made)))

        return run

    def _format(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter `format`, given without the labels of inserted values."""

        @jinja2.pass_eval_context
        def run(eval_ctx: EvalContext, value: Any, /, *args: Any, **kwargs: Any) -> Any:
            made = _plain(function(eval_ctx, value, *args, **kwargs))
            return made if isinstance(made, Markup) else percent(self.text(value), kwargs or args, made, self.text)

        return run

    def _string(self, value: Any) -> str:
        return value if isinstance(value, str) else self.text(value)

    # ---- messages

    def _trace_message(self, message: Message, number: int, marks: Any) -> Message:
        """Copies a message with traced strings. Its role stays plain, since it is not part of the message's text."""
        budget = self.budget
        copies = {trace(key, number, budget): value for key, value in message.items()}
        for key, value in message.items():
            if key != "role" and self._assistants[number]:
                copies[key] = self._trace_value(key, value, number, marks)
            elif key != "role":
                copies[key] = trace(value, number, budget)
        return copies

    def _trace_value(self, key: str, value: Any, number: int, marks: Any) -> Any:
        """Copies a value of an assistant's message with labels."""
        match key:
            case "content" if isinstance(value, str):
                return traced_content(value, number, marks or (), self.budget)
            case "content" if isinstance(value, list):
                return self._parts(value, number, marks or ())
            case "tool_calls" if isinstance(value, list):
                return [self._call(call, number) for call in value]
            case "function_call":
                return self._call(value, number)
            case "tool_responses":
                return self._field(value, number, Field.TOOL_RESPONSE)
            case "reasoning_content" | "reasoning" | "thinking":
                return self._field(value, number, Field.REASONING)
        return trace(value, number, self.budget)

    def _field(self, value: Any, number: int, field: Field = Field.NONE) -> Any:
        if field is Field.NONE:
            return trace(value, number, self.budget)
        return trace_field(value, number, field, self.budget, self._only_text)

    def _parts(self, parts: list[Any], number: int, marks: Sequence[Any]) -> list[Any]:
        """Copies the parts of a content. Marked spans are given for each part, and numbered through the message."""
        copies: list[Any] = []
        first = 1
        for part, own in zip(parts, (*marks, *repeat(None, len(parts))), strict=False):
            copy = trace(part, number, self.budget)
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(part, dict) and part.get("type") in ("thinking", "reasoning"):
                for key, value in part.items():
                    copy[key] = self._field(value, number, Field.NONE if key == "type" else Field.REASONING)
            elif isinstance(text, str):
                text = traced_content(text, number, own or (), self.budget, first)
                first += len(own or ())
                copy = {**copy, "text": text} if isinstance(part, dict) else text
            copies.append(copy)
        return copies

    def _call(self, call: Any, number: int) -> Any:
        """Copies a call with the fields of its function, or of the call itself."""
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            return self._function(call, number)
        copies = ((key, self._function if key == "function" else self._field) for key in call)
        return {trace(key, number, self.budget): copy(call[key], number) for key, copy in copies}

    def _function(self, call: Any, number: int) -> Any:
        copy = trace(call, number, self.budget)
        if isinstance(call, dict):
            arguments = "arguments" if "arguments" in call else "parameters"
            for key, field in (("name", Field.CALL_NAME), (arguments, Field.CALL_ARGUMENTS)):
                if key in call:
                    copy[key] = self._field(call[key], number, field)
        return copy

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; an iteration over integers belongs to the first message indexed with its integer."""
        found = super().getitem(obj, argument)
        if self._loops and isinstance(argument, int) and not isinstance(argument, bool):
            iteration = self._loops[-1].iteration
            if (
                iteration
                and iteration.message is None
                and isinstance(iteration.item, int)
                and not isinstance(iteration.item, bool)
                and iteration.item == argument
            ):
                iteration.message = self._numbers.get(id(found))
        return found

    @jinja2.pass_context
    def enter_loop(self, _: Context, items: Any) -> Any:
        self._loops.append(Loop())
        return items

    @jinja2.pass_context
    def begin_iteration(self, _: Context, item: Any) -> Mark:
        loop = self._loops[-1]
        loop.iteration = Iteration(item, self._numbers.get(id(item)))
        return Mark(Event.ITERATION, loop)

    @jinja2.pass_context
    def leave_loop(self, _: Context, nothing: None) -> Mark:
        return Mark(Event.LEAVE, self._loops.pop())

    @jinja2.pass_context
    def printed(self, _: Context, value: Any) -> Any:
        if not isinstance(value, Traced):
            return value
        for loop in self._loops:
            if loop.iteration is not None and loop.iteration.message is not None:
                return value
        return claim_statement(value)

    @jinja2.pass_context
    def generation(self, _: Context, begins: bool) -> Mark:
        return Mark(Event.GENERATION if begins else Event.END_GENERATION)


# ---- contents

_THINK, _END_THINK = "<think>", "</think>"


def traced_content(text: str, message: int, marks: Sequence[tuple[int, int]], budget: Budget, first: int = 1) -> Traced:
    """A text of an assistant's content. Its marked spans are numbered from `first`."""
    own = (TracedSpan(0, len(text), message),) if text else ()
    if not marks and _END_THINK not in text:
        return Traced(text, own, budget, (TracedSpan(0, len(text), Field.CONTENT),) if text else ())
    fields = content_fields(text)
    edges = [edge for number, (start, end) in enumerate(marks, first) for edge in ((start, 0), (end, number))]
    edges.reverse()
    labels: list[TracedSpan] = []
    position = 0
    for end, field in fields:
        while position < end:
            until, number = edges[-1] if edges else (end, 0)
            stop = min(until, end)
            add_span(labels, TracedSpan(position, stop, field | number << MARK_SHIFT))
            position = stop
            if edges and until == stop:
                edges.pop()
    return Traced(text, own, budget, labels)


def content_fields(text: str) -> list[tuple[int, Field]]:
    """The fields of an assistant's content, and where each ends.

    A block of thinking begins at the last tag since the previous block; the first one may begin with the text.
    """
    fields: list[tuple[int, Field]] = []
    position = 0
    while (close := text.find(_END_THINK, position)) >= 0:
        start = text.rfind(_THINK, position, close)
        if start >= 0:
            fields += [(start, Field.CONTENT), (start + len(_THINK), Field.THINK_TAG)]
        if start >= 0 or not position:
            fields += [(close, Field.THOUGHT), (close + len(_END_THINK), Field.THINK_TAG)]
        position = close + len(_END_THINK)
    return [*fields, (len(text), Field.CONTENT)]


class _Annotating(NodeTransformer):
    """Adds the marking nodes to a tree, in place."""

    def __init__(self) -> None:
        self._captures = 0  # how many captures enclose the current node

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self._captures += node.recursive
        self.generic_visit(node)
        self._captures -= node.recursive
        target, items = node.target, node.iter
        assert isinstance(items, nodes.Expr)
        item = nodes.Name(target.name, "load") if isinstance(target, nodes.Name) else nodes.Const(None)
        node.iter = call_filter(ENTER, items)
        node.body.insert(0, _output(ITERATION, item))
        if node.else_:  # not a part of the loop, nor of its last iteration
            again = nodes.ExprStmt(call_filter(ENTER, nodes.Const(None)))
            node.else_ = [_output(LEAVE, nodes.Const(None)), *node.else_, again]
        return [node, _output(LEAVE, nodes.Const(None))]

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        if not self._captures:
            node.nodes = [_printed(child) for child in node.nodes]
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        if not is_generation(node):
            return self._capture(node)
        self.generic_visit(node)
        begin, end = (_output(GENERATION, nodes.Const(begins)) for begins in (True, False))
        return nodes.Scope([begin, *node.body, end])

    def _capture(self, node: nodes.Node) -> nodes.Node:
        self._captures += 1
        self.generic_visit(node)
        self._captures -= 1
        return node

    visit_Macro = visit_AssignBlock = visit_FilterBlock = _capture


def _output(name: str, node: nodes.Expr) -> nodes.Output:
    return nodes.Output([call_filter(name, node)])


def _printed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.TemplateData) else call_filter(PRINTED, node)


def _plain(value: Any) -> Any:
    return str.__str__(value) if isinstance(value, Traced) else value


def _of_constants(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test that compares identities, given plain constants."""

    def run(*args: Any) -> Any:
        return test(*map(unlabelled, args))

    return run


@jinja2.pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    text: str = do_join(eval_ctx, value, traced(str(d)), attribute)
    return text


@jinja2.pass_eval_context
def _replace(eval_ctx: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return do_replace(eval_ctx, traced(str(s)), old, new, count)
