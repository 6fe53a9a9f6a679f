"""transformers' jinja2 environment with bounded work.

A template renders to the same bytes as in transformers, except that the date is fixed, random functions are refused,
and a render fails once its `Budget` is used up. Charging adds about 40% to the time of a typical render.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from string import Formatter
from types import BuiltinMethodType
from typing import Any, Final, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined, markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer
from markupsafe import Markup, escape

from penstock.errors import TemplateError
from penstock.prepare.template import budget as costs
from penstock.prepare.template.budget import Budget

# ---- the tag, filters and globals that transformers adds to jinja2


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


# ---- metering: nodes added to the syntax tree that charge for loops, macros, comparisons, keys and slices
#
# jinja2's sandbox has hooks for everything else. The added nodes are filters that return their input.


# ruff: noqa: N802, N815 (jinja2 finds visitors by name)


STEP: Final = "penstock_step"
COMPARED: Final = "penstock_compared"
SEARCHED: Final = "penstock_searched"
SLICED: Final = "penstock_sliced"
FILTER_NODES: Final = 6  # a filter takes about as long as 6 other nodes


def call_filter(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    """Builds the node for `node|name(*args)`."""
    return nodes.Filter(node, name, list(args), [], None, None)


class Metering(NodeTransformer):
    """Adds the charging nodes to a tree, in place."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        steps = _count(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(steps)))
        if node.test is not None:
            node.test = nodes.And(_step(_count([node.test])), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        steps = _count(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_step(steps)))
        return node

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """A comparison costs no more than its cheaper side, so a constant side makes it free."""
        left = node.expr
        self.generic_visit(node)
        for operand in node.ops:
            right = operand.expr
            if operand.op in ("in", "notin"):
                operand.expr = _charged(SEARCHED, right)
                node.expr = _charged(COMPARED, node.expr)
            elif not is_constant(left):
                operand.expr = _charged(COMPARED, right)
            left = right
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:
        self.generic_visit(node)
        node.key = _charged(COMPARED, node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if is_constant(node.node):
            return node  # it is small, and the compiler must still be able to fold it
        if not isinstance(node.arg, nodes.Slice):
            node.arg = _charged(COMPARED, node.arg)
            return node
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return call_filter(SLICED, node.node, *(bound or nodes.Const(None) for bound in bounds))


def is_constant(node: nodes.Node) -> bool:
    """Whether an expression is a literal."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(is_constant, node.items))
    return isinstance(node, nodes.Const)


def _charged(name: str, node: nodes.Expr) -> nodes.Expr:
    return node if is_constant(node) else call_filter(name, node)


def _step(count: int) -> nodes.Filter:
    return call_filter(STEP, nodes.Const(count))


def _count(body: Iterable[nodes.Node]) -> int:
    """The largest number of nodes that one run of a body evaluates; nested loops and macros are charged separately."""
    count, todo = 1, list(body)
    for node in todo:  # grows while it is iterated
        count += FILTER_NODES if isinstance(node, nodes.Filter | nodes.Test) else 1
        counts_itself = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        todo += node.iter_child_nodes(exclude=("body", "test") if counts_itself else ())
    return count


# ---- sandbox


CALL_STEPS: Final = 20  # a call takes about as long as 20 other nodes
COMPILER_FUEL: Final = 1 << 20  # constants that need more are computed during the render
ITEM_STEPS: Final = 8  # an item of a filter such as `map`

Filter = Callable[..., Any]
_BUILT_IN = (str, dict, list, tuple, bytes, int)
_CHEAP_TO_PRINT = (str, int, float, Undefined)


class _Generator(CodeGenerator):
    """Makes compiled templates produce text with the environment's own functions."""

    def write_commons(self) -> None:
        super().write_commons()
        for name, own in (("str", "text"), ("escape", "escape"), ("str_join", "join"), ("markup_join", "join_markup")):
            self.writeline(f"{name} = environment.{own}")


class MeteredFormatter(SandboxedFormatter):
    """`str.format`, charging for each field before it is formatted."""

    _env: Sandbox

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            self._env.budget.allocate(2 * self._env.budget.estimate(value))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._env.budget.allocate(self._env.budget.estimate(value) + costs.numbers_in(format_spec))
        return super().format_field(value, format_spec)


class _MeteredEscapeFormatter(MeteredFormatter, SandboxedEscapeFormatter):
    """`Markup.format`, charging for each field before it is formatted."""


class Sandbox(ImmutableSandboxedEnvironment):
    """transformers' environment, with a budget for each render."""

    code_generator_class = _Generator
    formatter: type[MeteredFormatter] = MeteredFormatter
    whole_text: Callable[[Any], str] = staticmethod(str)  # of a container
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, date: datetime.date) -> None:
        super().__init__(extensions=[GenerationTag, loopcontrols], trim_blocks=True, lstrip_blocks=True)
        self.budget = Budget()
        self.filters |= {
            "tojson": tojson,
            "indent": indent,
            "random": refuse_random,
        }
        self.filters |= {name: self.metered(name) for name in self.filters if name not in costs.CHEAP_FILTERS}
        self.tests |= {name: self._metered_test(name, cost) for name, cost in costs.TESTS.items()}
        self.filters |= {STEP: self.step, COMPARED: self.compared, SEARCHED: self.searched, SLICED: self.sliced}
        midnight = datetime.datetime(date.year, date.month, date.day)
        self.globals |= {
            "raise_exception": raise_exception,
            "strftime_now": lambda format: self.strftime(midnight, format),
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
            "lipsum": refuse_random,
        }

    # ---- compiling

    def parse_template(self, source: str) -> nodes.Template:
        """The syntax tree, or a TemplateError that names the line."""
        try:
            return self.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("the chat template is not valid: it is nested too deeply") from error

    def build(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a tree, adding the nodes that charge for its work."""
        try:
            self.budget.start(None, COMPILER_FUEL)
            self.prepare(tree)
            tree.set_environment(self)
            tree.set_lineno(1)  # for the added nodes, which have none
            return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
            raise TemplateError(f"the chat template can't be compiled: {error}") from error

    def prepare(self, tree: nodes.Template) -> None:
        """Add the environment's own nodes to a tree, in place."""
        Metering().visit(tree)

    def render(self, template: jinja2.Template, context: Mapping[str, Any]) -> str:
        """Render one row."""
        self.budget.start(context)
        return template.render(context)

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Re-raise the error as it is; jinja2's rewritten tracebacks would keep frames, and thereby rows, alive."""
        raise  # the exception being handled

    # ---- text

    def text(self, value: Any) -> str:
        """`str(value)`, for printed expressions."""
        if type(value) is str:
            return value
        if isinstance(value, _CHEAP_TO_PRINT):
            return str(value)
        self.budget.allocate(self.budget.estimate(value))
        return self.whole_text(value)

    def escape(self, value: Any) -> Markup:
        """`escape(value)`, for printed expressions inside `{% autoescape true %}`."""
        self.budget.allocate(5 * self.budget.estimate(value))
        return escape(value)

    def concat(self, chunks: Iterable[str]) -> str:
        """Joins the output of a template, macro or block."""
        parts = list(chunks)
        self.budget.join(list(map(len, parts)))
        return "".join(parts)

    def join(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return self.concat(map(self.text, values))

    def join_markup(self, values: tuple[Any, ...]) -> str:
        """The operator `~` inside `{% autoescape true %}`."""
        self.budget.allocate(5 * self.budget.estimate(values))
        return markup_join(values)

    def strftime(self, moment: datetime.datetime, format: str) -> str:
        self.budget.allocate(256 * len(format))  # C's strftime produces no more
        return moment.strftime(format)

    # ---- operations

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.budget.append(len(left), len(right))
            return left + right
        costs.binary_operator(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a macro, method or function; the mangled parameter names can't clash with keyword arguments."""
        budget = __self.budget
        budget.step(CALL_STEPS)
        if isinstance(getattr(__obj, "__self__", None), _BUILT_IN):
            return __self.call_method(__context, __obj, args, kwargs)
        if not isinstance(__obj, (Macro, LoopContext)):
            for arg in args:
                costs.whole_value(budget, arg)
        budget.enter()
        made = super().call(__context, __obj, *args, **kwargs)
        budget.leave()
        return made if isinstance(__obj, Macro) else budget.result(made)

    def call_method(self, context: Context, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a built-in type."""
        name = method.__name__
        if name == "join":
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        if name not in costs.CHEAP_METHODS:
            own = {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}
            charge(costs.method_cost(name), self.budget, method.__self__, *args, **own)
            return self.budget.result(super().call(context, method, *args, **kwargs))
        if args and isinstance(args[0], tuple):
            costs.comparison(self.budget, args[0])
        return super().call(context, method, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, charging for each field before it is formatted."""
        if not isinstance(value, BuiltinMethodType) or super().wrap_str_format(value) is None:
            return None
        template: str = value.__self__  # type: ignore[assignment]
        formatter: Formatter
        if isinstance(template, Markup):
            formatter = _MeteredEscapeFormatter(self, escape=template.escape)
        else:
            formatter = self.formatter(self)

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                if kwargs or len(args) != 1:
                    raise TypeError(f"format_map() takes exactly one argument ({len(args) + len(kwargs)} given)")
                text: str = formatter.vformat(template, (), args[0])
            else:
                text = formatter.vformat(template, args, kwargs)
            return type(template)(text) if isinstance(template, Markup) else text

        return format

    def metered(self, name: str, function: Filter | None = None) -> Filter:
        """Wraps a filter to charge for it. The compiler folds it on constants wherever it would fold the filter."""
        function = self.filters[name] if function is None else function
        cost, lazy, eager = costs.filter_cost(name), name in costs.LAZY_FILTERS, name in costs.EAGER_FILTERS
        first = _PassArg.from_obj(function)

        def run(context: Context | EvalContext, value: Any, /, *args: Any, **kwargs: Any) -> Any:
            if eager and isinstance(value, Iterator):
                value = list(value)
            if not lazy or name == "batch":
                charge(cost, self.budget, value, *args, **kwargs)
            if lazy and value:
                value = self._charge_items(value, name, args)
            if first is None:
                made = function(value, *args, **kwargs)
            else:
                made = function(self if first is _PassArg.environment else context, value, *args, **kwargs)
            return self.budget.result(made)

        return jinja2.pass_context(run) if first is _PassArg.context else jinja2.pass_eval_context(run)

    def _charge_items(self, values: Iterable[Any], name: str, args: tuple[Any, ...]) -> Iterator[Any]:
        """Yields the items of a lazy filter, charging for each."""
        steps = ITEM_STEPS + sum(len(arg) for arg in args if isinstance(arg, str)) // 16
        for value in values:
            self.budget.step(steps)
            if name == "unique":
                costs.whole_value(self.budget, value)  # `unique` keeps every item
            yield value

    def _metered_test(self, name: str, cost: costs.Cost) -> Filter:
        function = cast(Filter, self.tests[name])

        def run(value: Any, /, *args: Any, **kwargs: Any) -> Any:
            charge(cost, self.budget, value, *args, **kwargs)
            return function(value, *args, **kwargs)

        return run

    # ---- filters that `Metering` adds; since they take the context, the compiler does not fold them

    @jinja2.pass_context
    def step(self, _: Context, count: int) -> bool:
        self.budget.step(count)
        return True

    @jinja2.pass_context
    def compared(self, _: Context, value: Any) -> Any:
        costs.comparison(self.budget, value)
        return value

    @jinja2.pass_context
    def searched(self, _: Context, value: Any) -> Any:
        costs.membership(self.budget, value)
        return value

    @jinja2.pass_context
    def sliced(self, _: Context, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return self.budget.result(value[start:stop:step])


def charge(cost: costs.Cost, budget: Budget, /, *args: Any, **kwargs: Any) -> None:
    """Charge for an operation. With invalid arguments it costs nothing, since the operation itself will fail."""
    try:
        cost(budget, *args, **kwargs)
    except (TypeError, AttributeError):
        pass
