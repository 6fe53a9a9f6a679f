"""The report: its figures equal `penstock stats --json`, its flow equals the ledger, and rows can't run anything."""

from __future__ import annotations

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import UsageError
from penstock.look.report import advice, flow, report, training_run
from penstock.look.tokens import CONTINUED, token_texts, visible_text
from tests.support.command import run

ROOT = Path(ps.__file__).parent.parent
OPTIONS = ["--max-length", "128", "--capacity", "200", "--holdout", "0.1"]


class Page(HTMLParser):
    """Collects every attribute of every element, and anything that would load or execute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def values(self, name: str) -> dict[str, int]:
        """The exact numbers of figures of one kind."""
        return {str(a[name]): int(str(a["data-value"])) for _, a in self.elements if name in a and "data-value" in a}


def penstock(*arguments: str | Path) -> str:
    done = run(*arguments)
    done.check_returncode()
    return done.stdout


def test_every_figure_equals_stats(dataset: ps.Dataset, tmp_path: Path) -> None:
    written = tmp_path / "report.html"
    assert str(written) in penstock("report", dataset.path, "-o", written, *OPTIONS)
    counted = json.loads(penstock("stats", dataset.path, "--json", *OPTIONS))
    text = written.read_text()
    page = Page(text)
    assert page.values("data-role") == counted["tokens_by_role"]
    trained = {role: count for role, count in page.values("data-trained").items() if count}
    assert trained == counted["trained_by_role"]
    assert page.values("data-limit") == {str(one["max_length"]): one["tokens"] for one in counted["limits"]}
    assert page.values("data-fill") == {str(one["capacity"]): one["rows"] for one in counted["packing"]}
    assert page.values("data-source") == {str(one["source"]): one["tokens"] for one in counted["sources"]}
    assert "200" in page.values("data-fill")
    titles = [a["title"] for tag, a in page.elements if tag == "dd" and "title" in a]
    ledger = counted["ledger"]
    lost = f"{ledger['truncated'] + ledger['dropped']:,} tokens"
    trained = f"{counted['trained']:,} of {ledger['tokens']:,} tokens"  # the same share as in the flow
    assert titles == [f"{counted['rows']:,}", f"{counted['tokens']:,}", trained, lost]
    bars = re.findall(r"<title>[\d, to]+ tokens: ([\d,]+) sequences</title>", text)
    assert [int(bar.replace(",", "")) for bar in bars] == [
        one["sequences"] for one in counted["full_histogram"] if one["sequences"]
    ]
    for name in ("longest", "emptiest", "copies"):
        for one in counted[name]:
            assert f"row {one['row']:,}" in text


def test_the_flow_adds_up_to_the_ledger(dataset: ps.Dataset) -> None:
    for options in ({}, {"max_length": 64}, {"max_length": 64, "overlong": "drop"}, {"holdout": 0.2}):
        stats = dataset.view(**options).stats()
        rows, tokens = flow(stats)
        for stage in (rows, tokens):
            left = stage.steps[0].amount
            for step in stage.steps[1:]:
                if step.kind in ("total", "trained"):
                    assert step.amount == left
                else:
                    left -= step.amount
            assert left == stage.steps[-1].amount
        assert rows.steps[0].amount == dataset.ledger.rows
        assert rows.steps[-1].amount == stats.rows == stats.ledger.kept
        assert tokens.steps[0].amount == stats.ledger.tokens
        assert tokens.steps[-1].amount == stats.trained == stats.ledger.trained
        gone = {"masked": stats.ledger.masked, "lost": stats.ledger.truncated + stats.ledger.dropped}
        for kind, amount in gone.items():
            assert sum(step.amount for step in tokens.steps if step.kind == kind) == amount


def test_a_report_needs_no_network_and_executes_nothing_from_rows(dataset: ps.Dataset) -> None:
    text = report(dataset.view(), samples=400)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and tags.count("style") == 1 and "img" not in tags and "link" not in tags
    for tag, attributes in page.elements:
        assert not any(name.startswith("on") or name in ("style", "src") for name in attributes), (tag, attributes)
        assert not str(attributes.get("href", "")).startswith(("http", "javascript"))
    assert "&lt;script&gt;window.hacked = 1" in re.sub(r"</?i[^>]*>", "", text)
    assert "\u202e" not in text and "\\u202e‿‿gnihtyna" in re.sub(r"</?i[^>]*>", "", text)
    assert "&lt;b&gt;own.jsonl" in text
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_problems_are_reported(dataset: ps.Dataset) -> None:
    view = dataset.view(max_length=64)  # which ends before the answer of row 0
    said = {one.title: one for one in advice(view.stats(), view.settings)}
    assert said["Answers cut by max_length"].first[0] == 1
    assert said["Duplicate rows"].rows == dataset.stats().duplicate_rows > 0
    cut, mute = said["Answers beyond max_length"], said["Rows with nothing trained"]
    assert cut.rows + mute.rows == view.ledger.dropped_rows["no_trained_token"]
    assert cut.first[0] == 0 and mute.first == (5,)  # row 0 answers too late, the answer of row 5 has the weight 0
    assert "max_length=64" in cut.text and "max_length" not in mute.text
    assert said["Rows rejected"].rows == 1
    assert said["Prepared: special tokens in text"].rows == 1
    assert "Tokens truncated" in said


def test_pairs_have_a_report(pairs: ps.Dataset) -> None:
    text = report(pairs.view(max_length=64))
    assert "chosen" in text and "rejected" in text and "Packing" not in text


def test_a_run_adds_curves_and_certificate(dataset: ps.Dataset, tmp_path: Path) -> None:
    step = {"lr": 1, "tokens": 10, "trained": 5, "efficiency": 0.9, "data_wait": 0.1, "seconds": 1.0}
    lines = [{"step": n, "loss": 3 / n, **step} for n in range(1, 40)] + [{"step": 39, "eval_loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    finding = {"promise": "packing.isolated", "verdict": "engaged", "evidence": ["<seen>"]}
    (tmp_path / "certificate.json").write_text(json.dumps({"findings": [finding]}))
    text = report(dataset.view(), run=training_run(tmp_path))
    assert '<polyline class="line thick"' in text and "packing.isolated" in text and "&lt;seen&gt;" in text
    with pytest.raises(UsageError, match="neither metrics.jsonl nor certificate.json"):
        training_run(tmp_path / "nothing")


def test_the_headline_is_about_the_capacity_asked_for(dataset: ps.Dataset) -> None:
    def headline(text: str) -> str:
        return re.sub(r"<[^>]*>", "", text.split('class="headline">')[1].split("</dl>")[0])

    view = dataset.view(max_length=128)
    assert "padding at 777" in headline(report(view, capacity=777))
    assert "padding at 777" not in headline(report(view))


def test_titles_are_file_names(dataset: ps.Dataset, examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    chats = (examples / "data" / "chats.jsonl").absolute()
    one = ps.prepare(chats, tokenizer=tokenizer, cache=tmp_path)
    assert "<h1>chats.jsonl</h1>" in report(one.view()) and "<title>chats.jsonl ·" in report(one.view())
    assert "<h1>2 sources</h1>" in report(dataset.view())


def test_a_character_split_over_tokens_is_shown_once() -> None:
    table = [
        b"\xe5",
        b"\xaf",
        b"\x9f",
        b" \xe5\xaf",
        b"\x9f!",
        b"\xff",
        b"ok",
        b"\xf0\x9f",
        b"\x99\x82\xe5",
        b"\xaf\x9f",
    ]
    shown = ["察", "‿", "‿", " 察", "‿!", "\\xff", "ok", "🙂", "‿察", "‿"]
    assert token_texts(range(10), table) == shown
    assert token_texts([0, 1], table) == ["\\xe5", "\\xaf"]  # cut off
    assert token_texts([5, 0, 1, 2, 99], table) == ["\\xff", "察", "‿", "‿", ""]


@given(st.text(max_size=4), st.lists(st.integers(1, 4), min_size=1))  # at most 13 tokens share characters
def test_texts_of_tokens_are_the_text_of_the_row(text: str, sizes: list[int]) -> None:
    data, table, at = text.encode("utf-8", "replace"), list[bytes](), 0
    while at < len(data):
        table.append(data[at : at + sizes[len(table) % len(sizes)]])
        at += len(table[-1])
    joined = "".join(token_texts(range(len(table)), table)).replace(CONTINUED, "")
    assert joined == visible_text(data).replace(CONTINUED, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small file system")
def test_a_full_disk_is_one_line_and_leaves_nothing(dataset: ps.Dataset, tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], check=False).returncode:
        pytest.skip("file systems can't be mounted here")
    try:
        full = run("report", dataset.path, "-o", tmp_path / "r.html")
        assert full.returncode == 1
        assert full.stderr == (
            f"penstock: {tmp_path / 'r.html'}: the report can't be written: the disk is full. "
            "Choose another place with --output.\n"
        )
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    missing = run("report", dataset.path, "-o", tmp_path / "no" / "r.html")
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1 and "No such file" in missing.stderr
