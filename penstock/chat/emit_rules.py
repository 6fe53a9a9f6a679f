"""What the fast engine may be asked to do: the constructs on which it is known to agree with jinja2.

`NATIVE` things are left to the engine, `PYTHON` things are done by Python functions that the engine calls, and anything
else is `NotServed`: the reference renders it. Found by comparing both engines over every operator, filter, test and
method with values of every type; a fast *error* is harmless (the row goes to the reference), a fast success
where the reference differs is not.
"""

from __future__ import annotations

from typing import Final


class NotServed(Exception):
    """The template uses something on which the engines are not known to agree; the reason is its text."""


# ---- filters
NATIVE_FILTERS: Final = frozenset(
    ["abs", "count", "d", "default", "first", "last", "length", "replace", "string", "trim"]
)
NONE_FAILS_FILTERS: Final = frozenset(("list", "join", "sum"))  # natively `none` counts as empty
LAZY_FILTERS: Final = frozenset(("select", "reject", "selectattr", "rejectattr", "items", "reverse", "map"))
LAZY_CONSUMERS: Final = frozenset(("list", "join", "first", "select", "reject", "selectattr", "rejectattr", "map"))
LISTING_FILTERS: Final = LAZY_FILTERS - {"reverse"} | {"list", "sort", "dictsort"}  # a list or an error
PYTHON_FILTERS: Final = frozenset(
    ["capitalize", "dictsort", "format", "indent", "int", "lower", "sort", "title", "tojson", "upper"]
)
TEXT_FILTERS: Final = frozenset(("title", "capitalize", "upper", "lower"))  # of undefined: the empty string
MAPPED_FILTERS: Final = TEXT_FILTERS | {"trim", "tojson"}
NATIVE_FILTER_ARGUMENTS: Final = {  # name -> (positional, keywords) at most; more is not served
    "length": (0, ()),
    "count": (0, ()),
    "trim": (1, ()),
    "string": (0, ()),
    "first": (0, ()),
    "last": (0, ()),
    "abs": (0, ()),
    "default": (2, ("default_value", "boolean")),
    "d": (2, ("default_value", "boolean")),
    "replace": (2, ()),
    "list": (0, ()),
    "join": (1, ()),
    "sum": (0, ()),
    "items": (0, ()),
    "reverse": (0, ()),
}

# ---- tests
NATIVE_TESTS: Final = frozenset(
    [
        "!=",
        "==",
        "boolean",
        "defined",
        "eq",
        "equalto",
        "false",
        "integer",
        "mapping",
        "ne",
        "none",
        "number",
        "string",
        "true",
        "undefined",
    ]
)
TEST_OPERATORS: Final = {
    "in": "in",
    "lt": "lt",
    "lessthan": "lt",
    "<": "lt",
    "le": "lteq",
    "<=": "lteq",
    "gt": "gt",
    "greaterthan": "gt",
    ">": "gt",
    "ge": "gteq",
    ">=": "gteq",
    "eq": "eq",
    "equalto": "eq",
    "==": "eq",
    "ne": "ne",
    "!=": "ne",
}

# ---- methods
NATIVE_METHODS: Final = frozenset(
    [
        "endswith",
        "get",
        "items",
        "join",
        "keys",
        "lstrip",
        "replace",
        "rstrip",
        "split",
        "startswith",
        "strip",
        "values",
    ]
)
VIEWS: Final = frozenset(("items", "keys", "values"))
PYTHON_METHODS: Final = frozenset(
    [
        "capitalize",
        "casefold",
        "center",
        "count",
        "find",
        "index",
        "isalnum",
        "isalpha",
        "isdecimal",
        "isdigit",
        "isidentifier",
        "islower",
        "isnumeric",
        "isspace",
        "istitle",
        "isupper",
        "ljust",
        "lower",
        "partition",
        "removeprefix",
        "removesuffix",
        "rfind",
        "rindex",
        "rjust",
        "rpartition",
        "rsplit",
        "splitlines",
        "swapcase",
        "title",
        "upper",
        "zfill",
    ]
)
MUTATING_METHODS: Final = frozenset(
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"]
)
DICT_ATTRIBUTES: Final = frozenset(name for name in dir(dict) if not name.startswith("_"))
VALUE_ATTRIBUTES: Final = frozenset(
    name for kind in (str, list, tuple, int, bool) for name in dir(kind) if not name.startswith("_")
)
LOOP_NUMBERS: Final = frozenset(("index", "index0", "revindex", "revindex0", "length", "depth", "depth0"))
LOOP_ATTRIBUTES: Final = LOOP_NUMBERS | {"first", "last", "previtem", "nextitem"}

# ---- functions
NATIVE_FUNCTIONS: Final = frozenset(("range", "dict"))
PYTHON_FUNCTIONS: Final = frozenset(("raise_exception", "strftime_now"))
UNSERVED_NAMES: Final = frozenset(("self", "super", "varargs", "kwargs", "cycler", "joiner", "lipsum", "debug"))

PREFIX: Final = "penstock_"  # of everything the emitter adds to a template's names
REFUSE: Final = f"{PREFIX}refuse()"  # the row goes to the reference
