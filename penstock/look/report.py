"""The report: one self-contained HTML file that needs no network.

Style and script are inlined and allowed by hash only, so rows can't execute anything. All figures come from `stats`,
which `penstock stats --json` prints. The cost is that of the statistics plus a few milliseconds.
"""

from __future__ import annotations

import contextlib
import errno
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from penstock import __version__
from penstock.errors import StoreError, UsageError
from penstock.load.options import LossPolicy, ViewOptions
from penstock.load.view import Served
from penstock.load.windows import Reason
from penstock.look.html import render, running_mean, script, source_hash, stylesheet
from penstock.look.packing_fill import best
from penstock.look.statistics import Stats, stats
from penstock.look.terminal import label_name
from penstock.look.tokens import MessageBlock, blocks, safe_bytes, sides_of
from penstock.prepare.chat.notes import Note, describe_note
from penstock.store.dataset import Dataset
from penstock.store.files import read_regular

# ---- advice ----------------------------------------------------------------------------------------------------------
#
# Warnings derived from statistics: what is wrong, the number of rows, the first of them, and the remedy.


_MUCH_LOST = 0.01  # of the tokens


class Level(StrEnum):
    """Severity of a warning."""

    WRONG = "wrong"  # trains on unintended tokens
    LOSS = "loss"  # data is lost or counted twice
    NOTE = "note"


class Advice(NamedTuple):
    """One warning; `flag` is the viewer's filter that lists its rows, if there is one."""

    level: Level
    title: str
    text: str
    rows: int
    first: tuple[int, ...] = ()
    flag: str = ""


_FLAGS = {
    "no_stop": (
        Level.WRONG,
        "Stop token not trained",
        "An answer is trained but its stop token is not, so the model doesn't learn to stop. Use a template that "
        "prints a stop token, or --stop next_marker.",
    ),
    "double_bos": (
        Level.WRONG,
        "Two beginning-of-sequence tokens",
        "Rows start with the token twice, but at inference the model sees it once. Remove it from rows or template.",
    ),
    "cut_answer": (
        Level.LOSS,
        "Answers cut by max_length",
        "Their end, stop token included, is never trained. Raise max_length, or use overlong=drop or split.",
    ),
    "regions_unknown": (
        Level.WRONG,
        "Regions not certain",
        "It is uncertain which message each token belongs to, so only all_tokens can serve these rows.",
    ),
}
_INFORMATIVE = {Note.EOS_APPENDED, Note.STOP_APPENDED, Note.ARROW_NULLS, Note.ARGUMENTS_PARSED, Note.ARGUMENTS_DUMPED}


def advice(stats: Stats, settings: ViewOptions | None = None) -> list[Advice]:
    """All warnings, most severe first."""
    found = [
        Advice(level, title, text, stats.flags[name].rows, stats.flags[name].first, name)
        for name, (level, title, text) in _FLAGS.items()
        if name in stats.flags
    ]
    if stats.rows_with_unknown_regions and "regions_unknown" not in stats.flags:
        level, title, text = _FLAGS["regions_unknown"]
        found.append(Advice(level, title, f"{text} They are dropped.", stats.rows_with_unknown_regions))
    found += _of_loss(stats, settings or ViewOptions(train_on=LossPolicy.ALL_ASSISTANT_MESSAGES))
    for note, count in stats.build.get("notes", {}).items():
        level = Level.NOTE if note in _INFORMATIVE else Level.WRONG
        found.append(Advice(level, f"Prepared: {note.replace('_', ' ')}", f"{describe_note(note, count)}.", count))
    order = list(Level)
    return sorted(found, key=lambda one: (order.index(one.level), -one.rows))


def _of_loss(stats: Stats, settings: ViewOptions) -> list[Advice]:
    found = []
    if stats.untrained.rows:
        text = (
            f"train_on={settings.train_on} trains none of their tokens, so they are not served: "
            "they have no such message, or it has the weight 0."
        )
        found.append(Advice(Level.LOSS, "Rows with nothing trained", text, *stats.untrained, "nothing_trained"))
    if stats.beyond.rows:
        text = (
            f"All of their trained tokens are beyond max_length={settings.max_length}, so they are not served. "
            "Raise max_length, or use overlong=truncate_left."
        )
        found.append(Advice(Level.LOSS, "Answers beyond max_length", text, *stats.beyond, "nothing_trained"))
    rejected = stats.build.get("rejected", {})
    if rejected:
        reasons = ", ".join(f"{count:,} {kind}" for kind, count in rejected.items())
        text = f"{reasons}. `penstock prepare` names them by file and line."
        found.append(Advice(Level.LOSS, "Rows rejected", text, sum(rejected.values())))
    if stats.duplicate_rows:
        text = "They repeat the content of an earlier row, which therefore counts more than once."
        first = tuple(one.row for one in stats.copies)
        found.append(Advice(Level.LOSS, "Duplicate rows", text, stats.duplicate_rows, first, "duplicate"))
    lost = stats.ledger.truncated / stats.ledger.tokens if stats.ledger.tokens else 0.0
    if lost > _MUCH_LOST:
        longer = next((one.sequences for one in stats.limits if one.max_length == settings.max_length), 0)
        text = f"{lost:.1%} of all tokens are beyond max_length={settings.max_length}."
        found.append(Advice(Level.LOSS, "Tokens truncated", text, longer, (), "overlong"))
    return found


# ---- flow ------------------------------------------------------------------------------------------------------------
#
# The ledgers as a flow chart, from source rows to trained tokens, with the losses at each step.
#
# The steps of a stage add up: input equals losses plus what is passed on. The last step is the trained tokens.


_TOLD = {
    Reason.REGIONS_UNKNOWN: "regions not certain",
    Reason.PARTS_UNKNOWN: "not divided into parts",
    Reason.OVERLONG: "longer than max_length",
    Reason.NO_TRAINED_TOKEN: "nothing trained",
    Reason.CHUNK_WITHOUT_TRAINED_TOKEN: "chunk with nothing trained",
}


class Step(NamedTuple):
    """A bar of the flow: `amount` of `whole`, starting at `before`. Totals start and end a stage."""

    kind: str  # total, lost, masked, trained
    label: str
    amount: int
    before: int
    whole: int


class Stage(NamedTuple):
    """Rows, or tokens."""

    unit: str
    steps: tuple[Step, ...]


Lost = tuple[str, str, int]  # kind, label, count


def flow(stats: Stats) -> list[Stage]:
    """Rows from the sources to the view, then tokens from the view's rows to the trained ones."""
    ledger = stats.ledger
    prepared = ledger.rows + ledger.other_part
    not_served = [("lost", f"not served: {_label(reason)}", count) for reason, count in ledger.dropped_rows.items()]
    if ledger.other_part:
        not_served.insert(0, ("lost", "on the other side of the hold-out", ledger.other_part))
    rows = [("rows prepared", not_served)]
    whole = prepared
    if stats.build:
        whole = stats.build["rows"]
        rejected = [("lost", f"rejected: {kind}", count) for kind, count in stats.build["rejected"].items()]
        rows.insert(0, ("rows in the sources", rejected))
    gone = [("lost", f"not served: {_label(reason)}", count) for reason, count in ledger.dropped_tokens.items()]
    if ledger.truncated:
        gone.append(("lost", "cut by max_length", ledger.truncated))
    gone.append(("masked", "masked: read, not trained", ledger.masked))
    return [
        Stage("rows", _steps(rows, whole, "total", "rows served")),
        Stage("tokens", _steps([("tokens of the prepared rows", gone)], ledger.tokens, "trained", "tokens trained")),
    ]


def _steps(parts: list[tuple[str, list[Lost]]], whole: int, last: str, label: str) -> tuple[Step, ...]:
    """A total before each part, the losses in the part, and the final total."""
    steps, left = list[Step](), whole
    for total, lost in parts:
        steps.append(Step("total", total, left, 0, whole))
        for kind, text, count in lost:
            left -= count
            steps.append(Step(kind, text, count, left, whole))
    return (*steps, Step(last, label, left, 0, whole))


def _label(reason: str) -> str:
    return _TOLD[Reason(reason)] if reason in set(Reason) else reason


# ---- lineage ---------------------------------------------------------------------------------------------------------
#
# The provenance of a dataset: recipe, sources, engines and checks, as (name, text) pairs.


@dataclass(frozen=True, slots=True)
class Lineage:
    """The provenance of a dataset; `templates` by name."""

    key: str
    name: str
    facts: tuple[tuple[str, str], ...]
    engines: tuple[tuple[str, str], ...]
    templates: Mapping[str, str]
    rejected: tuple[str, ...]  # the first rejected rows


def lineage(dataset: Dataset) -> Lineage:
    """Read the provenance from the manifest and the notes stored with the shards."""
    recipe, origins = dataset.recipe, dataset.origins
    files = dataset.source_names
    mapping = recipe.get("mapping") or {}
    facts = {
        "dataset": dataset.key,
        "sources": ", ".join(files[:6]) + (f" and {len(files) - 6:,} more" if len(files) > 6 else ""),
        "row format": str(mapping.get("format", "")),
        "tokenizer": f"{origins.get('tokenizer', '')} ({recipe['tokenizer'][:15]}…)".strip(),
        "special tokens": ", ".join(f"{name} {text}" for name, text in recipe.get("special_tokens", {}).items()),
        "template variables": _plain(recipe.get("template_vars")),
        "date in templates": str(recipe.get("date") or ""),
        "regions": str(recipe.get("regions", "")),
        "special tokens in text": str(recipe.get("special_tokens_in_text", "")),
        "reference engines": ", ".join(f"{name} {text}" for name, text in recipe.get("references", {}).items()),
        "shards": f"{len(dataset.shards):,}, {sum(dataset.shards.bytes):,} bytes",
    }
    return Lineage(
        dataset.key,
        _name(files) or dataset.key[:15],
        tuple((name, text) for name, text in facts.items() if text),
        tuple(_engines(dataset)),
        recipe.get("templates") or {},
        tuple(_rejected(dataset)),
    )


def mixture_lineage(mixture: Served) -> Lineage:
    """The members of a mixture, in place of one dataset's provenance."""
    facts = []
    for name, member in mixture.members.items():
        view, dataset = member.view, member.view.dataset
        amount = f"{member.per_epoch:,} of {len(view):,} items per epoch, train_on {view.settings.train_on}"
        facts.append((name, ", ".join(filter(None, (amount, _name(dataset.source_names), dataset.key)))))
    return Lineage(mixture.digest, f"Mixture of {', '.join(mixture.members)}", tuple(facts), (), {}, ())


def _name(files: list[str]) -> str:
    """A title: one file's own name, without its folder, or the number of files."""
    return PurePath(files[0]).name if len(files) == 1 else f"{len(files)} sources" if files else ""


def _plain(value: Any) -> str:
    return orjson.dumps(value).decode() if value else ""


def _engines(dataset: Dataset) -> list[tuple[str, str]]:
    """The engines used and the checks against the references, from the notes stored with the shards."""
    checked = mismatches = 0
    encoders, reasons = Counter[str](), Counter[str]()
    paths = set[tuple[int, ...]]()
    for shard in dataset.shards.names:
        with contextlib.suppress(OSError, orjson.JSONDecodeError, TypeError, ValueError, AttributeError):
            note = orjson.loads(read_regular(dataset.cache.shard_path(shard).with_suffix(".json")))
            checked += int(note.get("checked", 0))
            mismatches += int(note.get("mismatches", 0))
            encoders[str(note.get("encoder", ""))] += 1
            paths.add(tuple(note.get("paths", ())))
            for stage, why in note.get("engines", {}).items():
                reasons.update({f"{stage}: {reason}": int(count) for reason, count in why.items()})
    found = [("encoder", ", ".join(name for name in encoders if name))]
    found += [
        ("rendered or encoded more slowly", f"{count:,} rows, {reason}") for reason, count in reasons.most_common(5)
    ]
    if checked:
        differed = f", {mismatches:,} differed and were redone" if mismatches else ", all equal"
        found.append(("spot check", f"{checked:,} rows compared with the reference engines{differed}"))
    return [(name, text) for name, text in found if text]


def _rejected(dataset: Dataset, most: int = 5) -> list[str]:
    """The first rejected rows. Shards are opened only if the ledger counts any."""
    found = list[str]()
    if not dataset.ledger.rejected:
        return found
    for shard in range(len(dataset.shards)):
        for row in dataset.shards.meta(shard).rejected:
            number = dataset.manifest.shards.first_rows[shard] + int(row.get("row", 0))
            found.append(f"row {number:,}: {row.get('reason', row.get('kind', ''))}")
            if len(found) == most:
                return found
    return found


# ---- runs folder -----------------------------------------------------------------------------------------------------
#
# A training run's folder as a report shows it: curves from `metrics.jsonl`, verdicts from `certificate.json`.


Points = list[tuple[float, float]]


class TrainingRun(NamedTuple):
    """The metrics and certificate of a training run."""

    name: str
    steps: int
    loss: Points
    smooth: Points
    evaluations: Points
    figures: tuple[tuple[str, str], ...]
    findings: tuple[tuple[str, str, str], ...]  # promise, verdict, evidence


def training_run(folder: Path) -> TrainingRun:
    """Read a run's folder. Either file may be missing, but not both."""
    metrics, certificate = folder / "metrics.jsonl", folder / "certificate.json"
    if not metrics.is_file() and not certificate.is_file():
        raise UsageError(f"{folder}: not the folder of a run: it has neither metrics.jsonl nor certificate.json")
    lines = [orjson.loads(line) for line in metrics.read_bytes().splitlines()] if metrics.is_file() else []
    steps = [line for line in lines if "loss" in line]
    loss = [(float(line["step"]), _float(line["loss"])) for line in steps]
    evaluations = [(float(line["step"]), _float(line["eval_loss"])) for line in lines if "eval_loss" in line]
    return TrainingRun(
        folder.name, len(steps), loss, running_mean(loss), evaluations, tuple(_figures(steps)), _findings(certificate)
    )


def _float(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _figures(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not steps:
        return []
    seconds, waited = sum(line["seconds"] for line in steps), sum(line["data_wait"] for line in steps)
    tokens, trained = sum(line["tokens"] for line in steps), sum(line["trained"] for line in steps)
    return [
        ("steps", f"{len(steps):,}"),
        ("last loss", f"{_float(steps[-1]['loss']):.4g}"),
        ("tokens seen", f"{tokens:,}, {trained:,} trained"),
        ("places filled", f"{sum(line['efficiency'] for line in steps) / len(steps):.1%}"),
        ("waited for data", f"{waited / seconds:.1%} of the time" if seconds else "0%"),
    ]


def _findings(certificate: Path) -> tuple[tuple[str, str, str], ...]:
    if not certificate.is_file():
        return ()
    return tuple(
        (finding["promise"], finding["verdict"], "; ".join(finding["evidence"]))
        for finding in orjson.loads(certificate.read_bytes())["findings"]
    )


# ---- report ----------------------------------------------------------------------------------------------------------


SAMPLES: Final = 6
SAMPLE_TOKENS: Final = 700  # tokens shown per sampled sequence


class Sample(NamedTuple):
    """A sequence shown in the report."""

    row: int
    side: str  # of a pair, or KTO's label
    tokens: int
    trained: int
    blocks: list[MessageBlock]


def report(view: Served, *, capacity: int | None = None, run: TrainingRun | None = None, samples: int = SAMPLES) -> str:
    """The report on a view of a cached dataset, or on a mixture of such views, as HTML."""
    style, code = stylesheet(), script()
    policy = f"default-src 'none'; style-src {source_hash(style)}; script-src {source_hash(code)}; base-uri 'none'"
    figures = report_figures(view, capacity, run, samples)
    return render("report.html", **figures, style=style, script=code, csp=f"{policy}; form-action 'none'", linked=False)


def report_figures(
    view: Served, capacity: int | None, run: TrainingRun | None, samples: int = SAMPLES
) -> dict[str, Any]:
    """The variables of the report's template, apart from style and script."""
    first = view.views[0]
    counted, settings, dataset = stats(view, capacity), first.settings, first.dataset
    return {
        "stats": counted,
        "settings": settings,
        "flow": flow(counted),
        "advice": advice(counted, settings),
        "best": best(counted.packing),
        "packed": next((fill for fill in counted.packing if fill.capacity == capacity), best(counted.packing)),
        "lineage": mixture_lineage(view) if view.single is None else lineage(dataset),
        "row_name": partial(_row_name, _first_rows(view)),
        "samples": _samples(view, samples),
        "bytes_of": safe_bytes(dataset),
        "run": run,
        "preference": dataset.is_preference,
        "path": "" if view.single is None else str(dataset.path),
        "version": __version__,
    }


def _first_rows(view: Served) -> dict[str, int]:
    """The number of each member's first row, in the numbering of `stats`."""
    return dict(zip(view.members, accumulate((len(one.dataset) for one in view.views), initial=0), strict=False))


def _row_name(members: dict[str, int], row: int) -> str:
    name, first = max(((n, f) for n, f in members.items() if f <= row), key=itemgetter(1), default=("", 0))
    return f"{name}, row {row - first:,}" if name else f"row {row:,}"


def _samples(view: Served, count: int) -> list[Sample]:
    """A deterministic sample of items across the lengths: the shortest, the longest, and some in between."""
    if not len(view):
        return []
    lengths = view.lengths if view.lengths.ndim == 1 else view.lengths.max(axis=1)
    spread = np.quantile(np.arange(len(lengths)), np.linspace(0, 1, count), method="nearest")
    order = np.argsort(lengths, kind="stable")
    found, members = [], _first_rows(view)
    for item in dict.fromkeys(order[spread.astype(np.int64)].tolist()):
        name, number = view.place(item)
        row = members[name] + int(view.members[name].view.index.rows[number])
        for side, example, prompt in sides_of(view[item]):
            label = " · ".join(filter(None, (side, "" if example.desirable is None else label_name(example.desirable))))
            shown = blocks(example, SAMPLE_TOKENS, prompt)
            found.append(Sample(row, label, len(example), int(example.loss_mask.sum()), shown))
    return found


def write_report(page: str, path: Path) -> None:
    """Write the page atomically, so that a browser never sees half of it. A failure leaves nothing behind."""
    unfinished = path.with_name(f".{path.name}.part")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise StoreError(f"{path}: the report can't be written: {why}. Choose another place with --output.") from error
