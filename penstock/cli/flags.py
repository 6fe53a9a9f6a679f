"""Derives command-line flags, with help and defaults, from the fields of a typed record of options."""

from __future__ import annotations

import glob
import inspect
import typing
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from penstock.cli.plain import flag_of, is_list, value_of
from penstock.options import bare_type
from penstock.spelling import learn

Command = Callable[..., None]


def with_flags(record: type[Any], *, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Add one flag per field of a record to a command, which receives the given values as `given`."""

    learn(record)

    def decorate(command: Command) -> Command:
        hints = typing.get_type_hints(record)
        options = {f.name: f for f in fields(record) if f.name not in leave_out}
        annotations = typing.get_type_hints(command, include_extras=True)  # in the command's own module
        parameters = inspect.signature(command).parameters.values()
        own = [p.replace(annotation=annotations[p.name]) for p in parameters if p.name != "given"]
        usual_first = sorted(options.values(), key=lambda option: bool(option.metadata.get("panel")))
        added = [_parameter(option, hints[option.name]) for option in usual_first]

        def run(**values: Any) -> None:
            given = {name: value_of(hints[name], values.pop(name)) for name in options}
            command(**values, given={name: value for name, value in given.items() if value is not None})

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return run

    return decorate


def _parameter(option: Field[Any], hint: Any) -> inspect.Parameter:
    text = str(option.metadata.get("help", ""))
    kind: Any = list[str] if is_list(hint) else bare_type(hint) if bare_type(hint) in (bool, int) else str
    default = option.default
    if default not in (MISSING, None, "", False) and not isinstance(default, tuple):
        text += f" [default: {'on' if default is True else default}]"
    flag = flag_of(option)
    names = [f"{flag}/--no-{flag.removeprefix('--')}"] if kind is bool and default is True else [flag]
    panel = option.metadata.get("panel") or None
    choices = option.metadata.get("choices") or _choices(hint)
    complete = completion_of(choices) if choices else None
    annotation = Annotated[
        kind | None,
        typer.Option(*names, help=escape(text), show_default=False, rich_help_panel=panel, autocompletion=complete),
    ]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _choices(hint: Any) -> list[str]:
    """The values of a closed choice, for the shell's completion."""
    kinds = typing.get_args(hint) or (hint,)
    return [member.value for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum) for member in kind]


def completion_of(choices: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one of these values."""

    def complete(incomplete: str) -> list[str]:
        return [str(choice) for choice in choices if choice.startswith(incomplete)]

    return complete


def dataset_keys(incomplete: str) -> list[str]:
    """Completes a dataset: `latest`, keys in the default cache, or folders."""
    from penstock.store.cache import default_cache

    keys = ["latest", *(path.name for path in sorted(Path(default_cache(), "datasets").glob("*")))]
    folders = [str(path) for path in Path().glob(f"{glob.escape(incomplete)}*/") if incomplete]
    return [key for key in keys if key.startswith(incomplete)] + folders
