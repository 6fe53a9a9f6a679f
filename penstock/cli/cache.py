"""`penstock cache`: list, explain, verify, copy and clean up the cache."""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from penstock.build.options import PrepareOptions
from penstock.cli.flags import with_flags
from penstock.errors import StoreError, UsageError
from penstock.printable import printable, printable_json

if TYPE_CHECKING:
    from penstock.build.explain import Explanation
    from penstock.store.gc import GcReport
    from penstock.store.listing import ShardEntry
    from penstock.store.verify import VerifyReport

cache_app = typer.Typer(help="List, explain, verify, copy and clean up the cache.", no_args_is_help=True)

Folder = Annotated[
    str | None,
    typer.Option(
        "--cache", help="Cache: a folder, or s3://BUCKET/PREFIX; default: PENSTOCK_CACHE or ~/.cache/penstock"
    ),
]
Trusted = Annotated[
    str, typer.Option(help="Shards of other users: checked (refused until you have checked them), own, all")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output")]

RECHECKED = "1%"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


@cache_app.command("ls")
def list_(
    shards: Annotated[bool, typer.Option("--shards", help="List shards with owner and host, not datasets")] = False,
    cache: Folder = None,
    json: Json = False,
) -> None:
    """List the datasets in the cache: name, rows, tokens, bytes, age, last use."""
    from penstock.store.cache import open_cache
    from penstock.store.listing import list_datasets, list_shards

    home = open_cache(cache)
    if shards:
        _print_shards(home.address, list_shards(home), json)
        return
    found = list_datasets(home)
    if json:
        _print_json({"cache": home.address, "datasets": [asdict(entry) for entry in found]})
        return
    from rich.table import Table
    from rich.text import Text

    from penstock.look.progress import Terminal, amount

    table = Table("key", "name", "rows", "tokens", "bytes", "age", "last use", box=None, pad_edge=False)
    for entry in found:
        if entry.problem is not None:
            table.add_row(entry.key[:11], Text(entry.problem, "red"))
            continue
        numbers = (f"{entry.rows:,}", f"{entry.tokens:,}", amount(entry.bytes, "B"))
        table.add_row(entry.key[:11], entry.name, *numbers, age(entry.prepared), age(entry.used))
    Terminal().print(table if found else f"{home.address}: no datasets yet", highlight=False)


def _print_shards(address: str, found: list[ShardEntry], json: bool) -> None:
    if json:
        _print_json({"cache": address, "shards": [asdict(entry) for entry in found]})
        return
    for entry in found:
        needed = ", ".join(key[:11] for key in entry.datasets) or "no dataset"
        _say(f"{entry.name}  {entry.bytes:>12,}  {entry.user}@{entry.host or '?'}  {age(entry.written)}  {needed}")
    by = Counter(f"{entry.user}@{entry.host or '?'}" for entry in found)
    _say(f"{len(found)} shards: {', '.join(f'{n} by {who}' for who, n in by.most_common())}")


@cache_app.command()
@with_flags(PrepareOptions)
def explain(
    sources: Annotated[list[str], typer.Argument(help="As for prepare", show_default=False)],
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Explain whether `prepare` would be a cache hit and, if not, how the nearest dataset differs."""
    from penstock.build.explain import explain as explained
    from penstock.build.options import prepare_options

    found = explained(sources, prepare_options(given))
    if json:
        _print_json(asdict(found))
    else:
        for line in explanation_lines(found):
            _say(line)


def explanation_lines(found: Explanation) -> list[str]:
    """An explanation as lines of text."""
    lines = list(found.notices)
    if found.hit:
        return [*lines, f"hit: {found.key} ({found.slices} slices)"]
    lines.append(f"miss: {found.slices - found.found} of {found.slices} slices to encode")
    if found.nearest is None:
        return [*lines, "there is no dataset in this cache yet"]
    lines.append(f"nearest: {found.nearest}")
    return [*lines, *(f"  {difference}" for difference in found.differences)]


class _OptionalShare(TyperCommand):
    """Allows `--recheck` without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default share after a `--recheck` without a value."""
        given = list(args)
        if "--recheck" in given:
            after = given.index("--recheck") + 1
            if after == len(given) or not re.fullmatch(r"[\d.]+%?", given[after]):
                given.insert(after, RECHECKED)
        return super().parse_args(ctx, given)


@cache_app.command(cls=_OptionalShare)
def verify(
    datasets: Annotated[list[str] | None, typer.Argument(help="Folders or keys; default: the whole cache")] = None,
    recheck: Annotated[
        str | None,
        typer.Option(
            metavar="[SHARE]",
            help=f"Also recompute a random share of all rows from their sources, such as 10% [default: {RECHECKED}]",
        ),
    ] = None,
    cache: Folder = None,
    json: Json = False,
) -> None:
    """Check digests, counts and ledgers. Corrupt shards are marked and rebuilt by the next prepare."""
    from penstock.store.cache import open_cache
    from penstock.store.dataset import open_dataset
    from penstock.store.listing import dataset_folders
    from penstock.store.trust import Trust
    from penstock.store.verify import VerifyReport, verify_cache

    share = None if recheck is None else share_of(recheck, "--recheck")
    total, home = VerifyReport(), open_cache(cache, Trust.ALL)  # what is in the cache, not this user's copies
    opened = [open_dataset(where, cache=cache) for where in datasets or ()]
    if opened:
        for dataset in opened:
            dataset.cache.trust = Trust.ALL
            total.add(verify_cache(dataset.cache, [dataset.path]))
    else:
        total.add(verify_cache(home))
    if share is not None:
        from penstock.build.recheck import recheck as redo

        for place, folder in [(d.cache, d.path) for d in opened] or [(home, f) for f in dataset_folders(home)]:
            total.add(redo(place, folder, share))
    if json:
        _print_json({**asdict(total), "ok": not total.findings})
    else:
        _print_verified(total)
    if total.findings:
        raise typer.Exit(1)


def _print_verified(found: VerifyReport) -> None:
    for finding in found.findings:
        _say(str(finding))
    redone = f", {found.redone:,} rows recomputed from their sources" if found.redone else ""
    verdict = f"{len(found.findings)} problems" if found.findings else "no problems"
    print(f"{found.datasets} datasets, {found.shards} shards, {found.bytes:,} bytes{redone}: {verdict}")


@cache_app.command()
def gc(
    older_than: Annotated[str, typer.Option(help="Keep anything younger than this, such as 12h or 7d")] = "1d",
    max_bytes: Annotated[
        str | None, typer.Option(help="Delete only until the cache is below this size, such as 50GB")
    ] = None,
    drop_unused: Annotated[
        str | None, typer.Option(help="First drop datasets that have not been opened for this long, such as 30d")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted")] = False,
    cache: Folder = None,
    json: Json = False,
) -> None:
    """Delete what no dataset needs. Safe while other processes read and build."""
    from penstock.store.cache import open_cache
    from penstock.store.gc import collect_garbage

    found = collect_garbage(
        open_cache(cache),
        older_than=seconds(older_than, "--older-than"),
        max_bytes=None if max_bytes is None else size(max_bytes, "--max-bytes"),
        drop_unused=None if drop_unused is None else seconds(drop_unused, "--drop-unused"),
        dry_run=dry_run,
    )
    if json:
        _print_json({**asdict(found), "dry_run": dry_run})
    else:
        _print_collected(found, dry_run)
    if max_bytes is not None and found.kept_bytes > size(max_bytes, "--max-bytes"):
        raise StoreError(
            f"{found.kept_bytes:,} bytes remain: datasets need them, or they are too young to delete. "
            "Drop datasets with --drop-unused 30d, or lower --older-than."
        )


@cache_app.command()
def push(
    datasets: Annotated[list[str], typer.Argument(help="Folders or keys of datasets in --cache", show_default=False)],
    to: Annotated[str, typer.Option(help="The cache to copy to, such as s3://BUCKET/PREFIX", show_default=False)],
    cache: Folder = None,
    trust: Trusted = "checked",
    json: Json = False,
) -> None:
    """Copy datasets to another cache, usually from a folder to an object store. Only missing shards are copied."""
    _copy(datasets, cache, to, trust, json)


@cache_app.command()
def pull(
    datasets: Annotated[list[str], typer.Argument(help="Addresses, or keys of datasets in --from", show_default=False)],
    origin: Annotated[
        str, typer.Option("--from", help="The cache to copy from, such as s3://BUCKET/PREFIX", show_default=False)
    ],
    cache: Folder = None,
    trust: Trusted = "checked",
    json: Json = False,
) -> None:
    """Copy datasets from another cache, usually from an object store to a folder."""
    _copy(datasets, origin, cache, trust, json)


def _copy(datasets: list[str], source: str | None, target: str | None, trust: str, json: bool) -> None:
    from penstock.options import nearest
    from penstock.store.cache import open_cache
    from penstock.store.dataset import open_dataset
    from penstock.store.transfer import copy_dataset
    from penstock.store.trust import Trust

    if trust not in [entry.value for entry in Trust]:
        raise UsageError(f"--trust {trust}: expected checked, own or all.{nearest(trust, [t.value for t in Trust])}")
    made = []
    for where in datasets:
        dataset = open_dataset(where, source)
        dataset.cache.trust = Trust(trust)
        made.append(copy_dataset(dataset, open_cache(target)))
    if json:
        _print_json({"datasets": [asdict(entry) for entry in made]})
        return
    for entry in made:
        _say(f"{entry.address}: {entry.copied} of {entry.shards} shards copied ({entry.bytes:,} bytes)")


def _print_collected(found: GcReport, dry_run: bool) -> None:
    verb = "would delete" if dry_run else "deleted"
    print(
        f"{verb} {len(found.datasets)} datasets, {found.shards} shards ({found.bytes:,} bytes), "
        f"{found.tokenizers} tokenizers, {found.leftovers} leftovers; {found.kept_bytes:,} bytes of shards remain"
    )
    for key in found.datasets:
        print(f"  {key}")
    if found.refused:
        print(f"{found.refused} files belong to other users and could not be deleted")


def seconds(text: str, flag: str) -> float:
    """`90m`, `12h`, `7d` as seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip().lower())
    if not found:
        raise UsageError(f"{flag} {text!r}: expected a duration such as 90m, 12h or 7d")
    return float(found[1]) * _UNITS[found[2]]


def size(text: str, flag: str) -> int:
    """`500MB`, `50GB` as bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if not found:
        raise UsageError(f"{flag} {text!r}: expected a size such as 500MB or 50GB")
    factor = _SIZES[found[2]] if not found[3] else 1024 ** list(_SIZES).index(found[2])
    return int(float(found[1]) * factor)


def share_of(text: str, flag: str) -> float:
    """`0.01` or `1%` as a fraction."""
    found = re.fullmatch(r"(\d*\.?\d+)\s*(%?)", text.strip())
    share = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{flag} {text!r}: expected a share of the rows such as 0.01 or 1%")
    return share


def age(then: float) -> str:
    """The time since then: 5m, 3h, 12d."""
    passed = max(0.0, time.time() - then)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if passed >= length:
            return f"{passed / length:.0f}{unit}"
    return "now"


def _say(line: str) -> None:
    print(printable(line))


def _print_json(value: Any) -> None:
    print(printable_json(value, sort_keys=True, default=str))
