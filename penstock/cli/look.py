"""`penstock show`, `stats`, `report`, `view` and `diff`: inspect prepared datasets."""

from __future__ import annotations

import os
import secrets
import tempfile
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.exchange import with_passes
from penstock.cli.flags import dataset_keys, with_flags
from penstock.errors import SourceError, UsageError
from penstock.load.options import LossPolicy
from penstock.look.options import LookOptions, look_options, open_to_look
from penstock.printable import printable_json

if TYPE_CHECKING:
    from penstock.api import Dataset, View
    from penstock.build.turns_preview import TurnsCompared
    from penstock.load.view import Served
    from penstock.look.progress import Terminal

Where = Annotated[
    str,
    typer.Argument(metavar="DATASET", help="A dataset's folder, or its key in the cache", autocompletion=dataset_keys),
]
Several = Annotated[
    list[str],
    typer.Argument(
        metavar="DATASET…", help="Datasets by folder or key; several, or DATASET@PASSES, are mixed",
        show_default=False, autocompletion=dataset_keys,
    ),
]  # fmt: skip
Cached = Annotated[str | None, typer.Option("--cache", help="Cache in which to look up keys")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")]


@with_flags(LookOptions, leave_out=("capacity",))
def show(
    datasets: Several,
    row: Annotated[int, typer.Option(help="Number of the example or pair, from 0")] = 0,
    noted: Annotated[
        str | None,
        typer.Option(help="List the rows with this note, such as tools_dropped; --row counts these"),
    ] = None,
    turns: Annotated[
        bool, typer.Option("--turns", help="All chains of the row, and what later turns see of each answer")
    ] = False,
    cache: Cached = None,
    *,
    given: dict[str, Any],
) -> None:
    """Print an example's tokens, with the role and part of each run and whether it is trained."""
    from penstock.look.progress import Terminal
    from penstock.look.terminal import show as show_item
    from penstock.look.terminal import show_turns

    console = Terminal()
    opened, view = _opened(datasets, cache, given, console)
    items: Sequence[int] = range(len(view))
    if noted is not None:
        items = _noted(opened, _one(view, "--noted"), noted, console)
    if not 0 <= row < len(items):
        kind = "rows" if noted is None else f"rows with the note {noted}"
        raise UsageError(f"--row {row}: there are {len(items):,} {kind}, numbered from 0")
    table = opened.vocabulary.token_bytes
    print_item = show_turns if turns else show_item
    print_item(view, items[row], lambda token: table[token], console)


@with_flags(LookOptions)
def stats(datasets: Several, cache: Cached = None, json: Json = False, *, given: dict[str, Any]) -> None:
    """Print statistics: rows, tokens, trained shares, lengths, roles, duplicates."""
    from penstock.look.progress import Terminal
    from penstock.look.statistics import stats as count
    from penstock.look.terminal import stats_table

    console = Terminal(stderr=json)
    opened, view = _opened(datasets, cache, given, console)
    turns = None if view.single is None else _turns(opened, console)
    counted = replace(count(view, look_options(given).capacity), turns=turns)
    if json:
        print(printable_json(counted.to_json()))
    else:
        console.print(stats_table(counted))


@with_flags(LookOptions)
def report(
    datasets: Several,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write")] = Path("report.html"),
    run: Annotated[
        Path | None, typer.Option("--run", help="A training run's folder; adds its curves and certificate")
    ] = None,
    cache: Cached = None,
    *,
    given: dict[str, Any],
) -> None:
    """Write a report on a dataset, or on a mixture, as one self-contained HTML file."""
    from penstock.look.progress import Terminal
    from penstock.look.report import report as make
    from penstock.look.report import training_run, write_report

    console = Terminal()
    training = None if run is None else training_run(run)
    _, view = _opened(datasets, cache, given, console)
    write_report(make(view, capacity=look_options(given).capacity, run=training), output)
    console.print(f"{output.absolute()}", highlight=False, soft_wrap=True, markup=False)


@with_flags(LookOptions)
def view(
    dataset: Where,
    against: Annotated[str | None, typer.Option("--against", help="Another dataset, to show differences from")] = None,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any free port", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option(help="Open a browser if there is a display")] = True,
    cache: Cached = None,
    *,
    given: dict[str, Any],
) -> None:
    """Browse a dataset in a local web page: rows, tokens, masks, batches."""
    from penstock.api import open_

    try:
        from penstock.look.viewer.app import listen, serve
        from penstock.look.viewer.session import Session
    except ImportError as error:
        raise UsageError(f"the viewer needs {error.name}: pip install 'penstock[look]'") from error

    opened = open_(dataset, cache=cache)
    session = Session(opened, look_options(given), open_(against, cache=cache) if against else None)
    try:
        listening = listen(port)
    except OSError as error:
        raise UsageError(f"--port {port}: {error.strerror}. Omit it to use any free port.") from error
    token = secrets.token_urlsafe(32)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
    print(f"{address}\nOnly requests with this token are answered. Press Ctrl-C to stop.", flush=True)
    shown = browser and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    with _in_browser(address) if shown else nullcontext():
        serve(session, listening, token)


@contextmanager
def _in_browser(address: str) -> Iterator[None]:
    """Open a browser through a private file: any user of the machine can read the browser's command line."""
    with tempfile.NamedTemporaryFile("w", prefix="penstock-view-", suffix=".html") as redirect:
        redirect.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">')
        redirect.flush()
        webbrowser.open(Path(redirect.name).as_uri())
        yield


_OF_MASKS = ("train_on", "parts", "part_weights")


@with_flags(LookOptions, leave_out=tuple(f.name for f in fields(LookOptions) if f.name not in _OF_MASKS))
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A dataset's folder, or its key in the cache")],
    b: Annotated[str, typer.Argument(metavar="B", help="The dataset to compare it with")],
    cache: Cached = None,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Compare two datasets row by row. The exit code is 0 if they are equal and 1 if they differ."""
    from penstock.api import open_
    from penstock.look.compare import compare
    from penstock.look.progress import Terminal
    from penstock.look.terminal import print_comparison

    options = look_options(given)
    mask = replace(options.view, train_on=options.train_on or LossPolicy.ALL_ASSISTANT_MESSAGES).mask
    compared = compare(open_(a, cache=cache), open_(b, cache=cache), mask)
    if json:
        print(printable_json(compared.to_json()))
    else:
        print_comparison(compared, Terminal())
    raise typer.Exit(0 if compared.equal else 1)


def _noted(dataset: Dataset, view: View, note: str, console: Terminal) -> list[int]:
    """List the items of a view whose rows have a note, with their locations."""
    import numpy as np

    from penstock.prepare.chat.notes import describe_note

    numbers = dataset.rows_with(note)
    items: list[int] = np.flatnonzero(np.isin(view.index.rows, numbers)).tolist()
    described = describe_note(note, dataset.ledger.notes[note], dataset.recipe)
    console.print(f"{note}: {described}", highlight=False, markup=False)
    for k, item in enumerate(items):
        place = view[item].row
        console.print(
            "{:>6}  {} row {}".format(k, *dataset.file_row(*place)),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print()
    return items


def _turns(dataset: Dataset, console: Terminal) -> TurnsCompared | None:
    """Both modes of `--turns` on the first rows, if their source is still there."""
    from penstock.build.turns_preview import compare_stored

    try:
        return compare_stored(dataset)
    except (SourceError, OSError) as error:
        console.print(f"--turns conversation and faithful are not compared: {error}", style="yellow", soft_wrap=True)
        return None


def _opened(datasets: list[str], cache: str | None, given: dict[str, Any], console: Terminal) -> tuple[Dataset, Served]:
    """The first dataset, and a view of it or a mixture of several."""
    from penstock.api import mix, open_

    options = look_options(given)  # reports a wrong option before anything is read
    opened: list[Dataset] = []
    members: dict[str, tuple[View, float]] = {}
    for text in datasets:
        where, passes = with_passes(text)
        dataset = open_(where, cache=cache)
        name = dataset.key[:11]
        if name in members:
            raise UsageError(f"{where}: the dataset is given twice. Give it once, with @2 for two passes.")
        view = open_to_look(dataset, options, lambda said: console.print(said, style="yellow"))
        opened.append(dataset)
        members[name] = (view, passes)
    ((first, passes), *others) = members.values()
    return opened[0], first if not others and passes == 1 else mix(members)


def _one(view: Served, flag: str) -> View:
    if view.single is None:
        raise UsageError(f"{flag} needs one dataset, not a mixture")
    return view.single
