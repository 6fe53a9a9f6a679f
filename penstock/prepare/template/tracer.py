"""Renders a template again with traced messages, to find out which message printed which characters.

The template gets additional nodes that mark loops, printed expressions and generation blocks. The caller compares its
text with the plain one; if they differ, the row's regions are unknown.
"""

# ruff: noqa: N802, N815 (jinja2 finds visitors by name)
from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.filters import do_join, do_replace
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext
from jinja2.visitor import NodeTransformer

from penstock.prepare.chat.conversation import Message, Role, roles_of
from penstock.prepare.template.provenance import (
    Buffer,
    Event,
    Iteration,
    Loop,
    Mark,
    Span,
    Traced,
    claim_statement,
    concat,
    owned_spans,
    trace,
    traced,
)
from penstock.prepare.template.sandbox import Sandbox, call_filter, is_generation

ENTER: Final = "penstock_enter"
ITERATION: Final = "penstock_iteration"
LEAVE: Final = "penstock_leave"
PRINTED: Final = "penstock_printed"
GENERATION: Final = "penstock_generation"
# These filters produce new text, but their implementations would keep some spans.
REWRITING_FILTERS: Final = ("format", "indent", "truncate", "wordwrap")


class Trace(NamedTuple):
    """A rendered text and its owners; positions are character offsets."""

    text: str
    spans: list[Span]
    generations: list[tuple[int, int]]
    known: bool


class Tracer(Sandbox):
    """A sandbox that traces the messages of one row at a time."""

    def __init__(self, date: datetime.date) -> None:
        super().__init__(date)
        self._numbers: dict[int, int] = {}  # id of a message -> its number
        self._assistants: list[bool] = []
        self._loops: list[Loop] = []
        self._captured_generation = False
        self.filters |= {name: self._rewriting(name) for name in REWRITING_FILTERS}
        self.filters |= {
            "join": self.metered("join", _join),
            "replace": self.metered("replace", _replace),
            ENTER: self.enter_loop,
            ITERATION: self.begin_iteration,
            LEAVE: self.leave_loop,
            PRINTED: self.printed,
            GENERATION: self.generation,
        }

    def prepare(self, tree: nodes.Template) -> None:
        super().prepare(tree)
        _Annotating().visit(tree)

    def trace(self, template: jinja2.Template, context: Mapping[str, Any]) -> Trace:
        """Render a row with traced messages."""
        messages: Sequence[Message] = context["messages"]
        copies = [self._trace_message(message, number) for number, message in enumerate(messages)]
        self._numbers = {id(copy): number for number, copy in enumerate(copies)}
        self._assistants = [role is Role.ASSISTANT for role in roles_of(messages)]
        self._loops.clear()
        self._captured_generation = False
        self.budget.start(context)
        root = Buffer(self._assistants)
        text = root.collect(
            template.root_render_func(template.new_context({**context, "messages": copies})), self.budget
        )
        spans = owned_spans(text.spans, self._assistants)
        return Trace(text, spans, sorted(root.generations), not self._captured_generation)

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
        return _plain(made) if operator == "%" else made

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
        def run(eval_ctx: EvalContext, /, *args: Any, **kwargs: Any) -> Any:
            return _plain(function(eval_ctx, *args, **kwargs))

        return run

    # ---- messages

    def _trace_message(self, message: Message, number: int) -> Message:
        """Copies a message with traced strings. Its role stays plain, since it is not part of the message's text."""
        return {
            trace(key, number, self.budget): value if key == "role" else trace(value, number, self.budget)
            for key, value in message.items()
        }

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look up an item; an iteration over integers belongs to the first message indexed with its integer."""
        found = super().getitem(obj, argument)
        if type(argument) is int and self._loops:
            iteration = self._loops[-1].iteration
            if iteration and iteration.message is None and type(iteration.item) is int and iteration.item == argument:
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
        if not isinstance(value, Traced) or any(loop.message is not None for loop in self._loops):
            return value
        return claim_statement(value)

    @jinja2.pass_context
    def generation(self, _: Context, begins: bool) -> Mark:
        return Mark(Event.GENERATION if begins else Event.END_GENERATION)


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


@jinja2.pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: Any = "", attribute: Any = None) -> str:
    text: str = do_join(eval_ctx, value, traced(str(d)), attribute)
    return text


@jinja2.pass_eval_context
def _replace(eval_ctx: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    return do_replace(eval_ctx, traced(str(s)), old, new, count)
