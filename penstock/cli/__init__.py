"""The `penstock` command. Exit codes: 0 done, 1 the work failed, 2 wrong usage."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from penstock.cli.plain import plain_arguments
from penstock.cli.prepare import run_prepare
from penstock.errors import PenstockError, StoreError, UsageError
from penstock.other_names import check_flags, prepare_flags
from penstock.spelling import speaking_flags


def _app() -> Callable[..., Any]:
    """The commands that need typer, which takes longer to import than a hit takes."""
    from penstock.cli.commands import app

    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(name)


def main() -> None:
    """Run the command; errors raised on purpose become one line and an exit code."""
    takes_keys = sys.argv[1:2] == ["train"]  # its options are keys of a file
    with contextlib.nullcontext() if takes_keys else speaking_flags(_app):
        try:
            _run(sys.argv[1:])
        except UsageError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(2)
        except PenstockError as error:
            print(f"penstock: {error}", file=sys.stderr)
            sys.exit(1)
        except KeyboardInterrupt:
            print("penstock: interrupted; finished slices are kept; rerun the command to resume", file=sys.stderr)
            sys.exit(130)
    if sys._getframe(1).f_globals.get("__name__") == "__main__":  # the command, not a program that calls it
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(0)  # freeing the engines object by object takes a tenth of a second
    sys.exit()


def _run(arguments: list[str]) -> None:
    check_flags(arguments)
    output = sys.stdout
    sys.stdout = explained = _Output.replacing(output)
    try:
        if arguments[:1] != ["prepare"]:
            _app()(arguments)
        elif (plain := plain_arguments(flags := prepare_flags(arguments))) is None:
            _app()(flags)
        else:
            run_prepare(plain.sources, plain.given, json=plain.json)
    finally:
        try:
            explained.flush()
        finally:
            explained.detach()  # or it would close the output when it is collected
            sys.stdout = output


class _Output(io.TextIOWrapper):
    """Standard output, whose failures are errors of ours. If the reader of a pipe is gone, the command just ends."""

    @classmethod
    def replacing(cls, output: TextIO) -> _Output:
        """The same output, with its errors explained."""
        is_line_buffered = bool(getattr(output, "line_buffering", False))
        return cls(output.buffer, output.encoding, output.errors, line_buffering=is_line_buffered)

    def write(self, text: str, /) -> int:
        with self._explained():
            return super().write(text)

    def flush(self) -> None:
        with self._explained():
            super().flush()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # what is left is not tried again at exit
            if isinstance(error, BrokenPipeError):
                sys.exit(1)
            raise StoreError(
                f"standard output can't be written: {error.strerror}. Free some space, or send it elsewhere."
            ) from error
