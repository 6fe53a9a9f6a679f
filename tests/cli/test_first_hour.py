"""The command line for new users: option names of other tools, typos, Ctrl-C, conveniences."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

import penstock as ps
from penstock import other_names
from penstock.build.options import PrepareOptions, prepare_options
from penstock.build.workers import runner
from penstock.errors import SourceError, UsageError
from penstock.exchange.options import ExportOptions
from penstock.load.options import LoaderOptions, ViewOptions
from penstock.look.statistics import stats
from penstock.look.terminal import show
from penstock.options import read_options
from penstock.train.config import TrainConfig, flat, plain, read_config
from penstock.train.verify.target import TargetSpec, _factory
from tests.support.command import run

pytestmark = pytest.mark.slow


def test_option_names_of_other_tools_are_accepted(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    assert prepare_options({"tokenizer": "t", "engine": "ray"}).runner == "ray"
    options = prepare_options({"tokenizer_name_or_path": "t", "num_proc": 3, "cache_dir": "c", "max_samples": 7})
    assert (options.tokenizer, options.workers, str(options.cache), options.limit) == ("t", "3", "c", 7)
    common = ("--cache-dir", tmp_path, "--num-proc=1", "--max-samples", "5", "--json")
    done = run("prepare", examples / "data/chats.jsonl", "--tokenizer", tokenizer, *common)
    assert json.loads(done.stdout)["examples"] == 5
    config = read_config({"learning_rate": 3e-4, "num_train_epochs": 2, "output_dir": "o", "max_length": 9})
    assert (config.optim.lr, config.loader.epochs, str(config.output), config.view.max_length) == (3e-4, 2, "o", 9)
    with pytest.raises(UsageError, match="'num_proc' means 'workers', which is given too"):
        prepare_options({"tokenizer": "t", "num_proc": 3, "workers": 2})


def test_option_names_with_another_meaning_are_explained() -> None:
    with pytest.raises(UsageError, match=r"'max_length' is decided when loading.*ds.view\(max_length=…\)"):
        prepare_options({"tokenizer": "t", "max_length": 9})
    with pytest.raises(UsageError) as caught:
        read_config({"per_device_train_batch_size": 4, "packing": True, "num_proc": 2})
    assert "loader.micro_batch" in str(caught.value)
    assert "loader.collate: packed" in str(caught.value)
    assert "data.prepare.workers" in str(caught.value)
    done = run("prepare", "x.jsonl", "--max-length", "512")
    assert done.returncode == 2
    assert "--max-length is decided when loading" in done.stderr
    assert "--part is called --holdout-side." in run("export", "latest", "--part", "held_out").stderr


@pytest.mark.parametrize(
    ("record", "name", "ours"),
    [
        (LoaderOptions, "ahead", "'prefetch': Batches prefetched in the background"),
        (LoaderOptions, "drop_last", "'incomplete_step': An incomplete last step"),
        (LoaderOptions, "packing", "'collate': Layout of a batch: padded, packed, pairs, tree"),
        (LoaderOptions, "side", "'padding_side': Padded and pairs"),
        (ViewOptions, "part", "'holdout_side': Side of the hold-out"),
        (ViewOptions, "train_on_what", "'train_on': Loss policy"),
        (ViewOptions, "truncation", "'overlong': Longer rows"),
    ],
)
def test_names_of_other_tools_come_before_names_that_look_alike(record: type, name: str, ours: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown option '{name}'\. Here it is {ours}"):
        read_options(record, {name: 1}, "x")


def test_cache_options_of_other_tools() -> None:
    options = prepare_options({"tokenizer": "t", "force_recache": True})
    assert options.force
    assert prepare_options({"tokenizer": "t", "disable_cache": True}).no_cache
    with pytest.raises(UsageError, match="'use_tokenized_cache' is not needed: the cache is always used. no_cache"):
        prepare_options({"tokenizer": "t", "use_tokenized_cache": True})
    with pytest.raises(UsageError, match=r"'train_on_what' is decided when loading.*ds.view\(train_on=…\)"):
        prepare_options({"tokenizer": "t", "train_on_what": "all_assistant_messages"})


def test_every_synonym_refers_to_an_option_and_hides_none() -> None:
    records = (PrepareOptions, LoaderOptions, ViewOptions, ExportOptions)
    known = {entry.name for record in records for entry in fields(record)}
    assert set(other_names.SYNONYMS.values()) <= known
    assert not known & other_names.SYNONYMS.keys()


def test_every_alias_refers_to_an_existing_option() -> None:
    known = {entry.name for entry in PrepareOptions.__dataclass_fields__.values()}
    assert set(other_names.PREPARE.values()) <= known
    assert not known & {*other_names.PREPARE, *other_names.PREPARE_HINTS}
    keys = flat(plain(TrainConfig())).keys()
    assert set(other_names.TRAIN.values()) <= keys
    assert {place for place in other_names.MOVED.values() if "." in place} <= keys
    assert not set(other_names.MOVED) & {*keys, *(key.split(".")[0] for key in keys)}
    assert not {key.split(".")[0] for key in keys} & {*other_names.TRAIN, *other_names.TRAIN_HINTS}


def test_all_typos_in_a_configuration_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        read_config({"modle": {}, "optim": {"lrr": 1}, "loader": {"batchsize": 2}})
    for told in ("'modle'", "'optim.lrr'", "'loader.batchsize'", "Did you mean 'batch_size'"):
        assert told in str(caught.value)


def test_an_unknown_format_error_names_the_column(tokenizer: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"id": "1", "dialog": turns}]
    with pytest.raises(SourceError, match="If 'dialog' holds the conversation, say so: messages_key='dialog'."):
        ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path)
    assert len(ps.prepare(rows, tokenizer=tokenizer, cache=tmp_path, messages_key="dialog")) == 1


def test_ctrl_c_prints_one_line(tokenizer: Path, tmp_path: Path) -> None:
    """Sends a real SIGINT to the whole process group, workers included; rerunning the command resumes."""
    row = json.dumps({"text": "Row with some words in it, again and again. " * 200})
    (tmp_path / "rows.jsonl").write_text("".join(row.replace("Row", f"Row {n}") + "\n" for n in range(6000)))
    line = [
        sys.executable,
        "-m",
        "penstock.cli",
        "prepare",
        str(tmp_path / "rows.jsonl"),
        "--tokenizer",
        str(tokenizer),
    ]
    line += ["--cache", str(tmp_path / "c"), "--workers", "2", "--no-fast"]
    process = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, text=True)
    claims = tmp_path / "c" / "claims"
    began = time.monotonic()
    while not (claims.is_dir() and any(claims.iterdir())) and time.monotonic() - began < 60:
        time.sleep(0.05)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in told
    assert told.splitlines()[-1] == "penstock: stopped; the same command resumes from here"


def test_version_and_completion() -> None:
    assert run("--version").stdout == f"penstock {ps.__version__}\n"
    assert (
        "complete_bash"
        in run(
            "--show-completion", "bash", env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        ).stdout
    )
    assert "--no-no-cache" not in run("prepare", "--help").stdout
    assert set(ps.__all__) <= set(dir(ps))


def test_stats_report_what_a_length_limit_cuts(examples: Path, tokenizer: Path, tmp_path: Path) -> None:
    ds = ps.prepare(examples / "data/chats.jsonl", tokenizer=tokenizer, cache=tmp_path)
    lengths = [len(ds.input_ids(number)) for number in range(len(ds))]
    counted = stats(ds.view(max_length=60))
    assert counted.cut_rows == sum(length > 60 for length in lengths) > 0
    assert counted.cut_tokens == sum(max(0, length - 60) for length in lengths)
    whole = stats(ds).lengths
    assert dict(ds.ledger.lengths) == {"p50": whole.p50, "p90": whole.p90, "p99": whole.p99, "max": whole.max}
    done = run("stats", "latest", "--cache", tmp_path, "--max-length", 60)
    assert f"{counted.cut_rows:,} rows, {counted.cut_tokens:,} tokens cut" in done.stdout


def test_a_dataset_can_be_named_by_a_short_key_or_latest(tokenizer: Path, tmp_path: Path) -> None:
    first = ps.prepare([{"text": "a"}], tokenizer=tokenizer, cache=tmp_path)
    os.utime(first.path / "manifest.json", (1, 1))
    (first.path / "used").unlink(missing_ok=True)
    second = ps.prepare([{"text": "b"}], tokenizer=tokenizer, cache=tmp_path)
    for name in (second.key[:9], second.key[3:12], "latest"):
        assert ps.open(name, cache=tmp_path).key == second.key
    assert ps.open(first.key[3:11], cache=tmp_path).key == first.key
    with pytest.raises(ps.PenstockError, match="latest: there is no dataset"):
        ps.open("latest", cache=tmp_path / "empty")


def test_several_datasets_for_one_name_are_listed(tokenizer: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = ps.prepare([{"text": "a"}], tokenizer=tokenizer, cache=cache)
    assert ps.open(f"{cache}/datasets/b3-*").key == ps.open(cache).key == first.key
    second = ps.prepare([{"text": "b"}], tokenizer=tokenizer, cache=cache)
    keys = sorted((first.key, second.key))
    for where in ("b3-", "b3-*", f"{cache}/datasets/b3-*", cache):
        with pytest.raises(ps.PenstockError) as caught:
            ps.open(where, cache=cache)
        assert str(caught.value) == (
            f"{where}: 2 datasets match: {keys[0][:11]} (1 examples); {keys[1][:11]} (1 examples). Give more of one "
            "key, or `latest` for the one used last; `penstock cache ls` lists them with their sources."
        )


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("assistant", "all_assistant_messages"),
        ("completion", "all_assistant_messages"),
        ("last", "last_assistant_message"),
        ("all", "all_tokens"),
        ("User", "all_user_and_system_messages"),
    ],
)
def test_values_by_other_names_are_explained(value: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"train_on='{value}' is unknown; did you mean '{meant}'\\? Use one of: all_"):
        read_options(ViewOptions, {"train_on": value}, "a view")


def test_values_by_other_names_are_values_of_ours() -> None:
    required: dict[type, dict[str, int]] = {ViewOptions: {}, LoaderOptions: {"batch_size": 1}}
    for record, given in required.items():
        for entry in fields(record):
            for meant in set(other_names.VALUES.get(entry.name, {}).values()):
                read_options(record, {**given, entry.name: meant}, "them")
    assert set(other_names.VALUES) <= {
        entry.name for record in (ViewOptions, LoaderOptions) for entry in fields(record)
    }


def test_no_rows(tokenizer: Path, tmp_path: Path) -> None:
    for source, said in (
        ([], "there are no rows: the list is empty. Give rows as dicts, or names of files and datasets."),
        (iter([]), "<list_iterator>: there are no rows."),
        (pa.table({"text": pa.array([], pa.string())}), "<Table>: there are no rows of up to 32,000,000 bytes"),
    ):
        with pytest.raises(ps.PenstockError) as caught:
            ps.prepare(source, tokenizer=tokenizer, cache=tmp_path)
        assert str(caught.value).startswith(said)


def test_rows_of_several_formats(tokenizer: Path, tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    alpaca, pair = {"instruction": "q", "output": "a"}, {"prompt": "q", "chosen": "a", "rejected": "b"}
    unlike = (
        "there is no column 'messages'; the row's columns are {} (format {}), unlike those of the first rows (format "
    )
    for other, columns, remedy in (
        (alpaca, ("instruction, output", "alpaca"), "apart and mix the datasets (ps.mix)"),
        (pair, ("prompt, chosen, rejected", "preference"), "apart"),
    ):
        with pytest.raises(ps.PenstockError) as caught:
            ps.prepare([chat] * 30 + [other], tokenizer=tokenizer, cache=tmp_path)
        said = f"{unlike.format(*columns)}messages). Prepare rows of different formats {remedy}"
        assert str(caught.value) == f"<list>:31: {said}"


def test_show_wraps_in_its_column(tokenizer: Path, tmp_path: Path) -> None:
    ds = ps.prepare([{"text": "word " * 60}], tokenizer=tokenizer, cache=tmp_path)
    table = ds.vocabulary.token_bytes
    out = io.StringIO()
    show(ds.view(), 0, lambda token: table[token], Console(file=out, width=80, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("│" in line for line in lines) >= 5


def test_workers_are_capped_with_a_message(monkeypatch: pytest.MonkeyPatch, tokenizer: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "_limits", lambda: (4, 100))
    assert runner.worker_count("auto") == (4, "")
    assert runner.worker_count("3") == (3, "")
    assert runner.worker_count("64") == (4, "--workers 64 is capped at 4, the number of cores this process may use")
    monkeypatch.setattr(runner, "_limits", lambda: (8, 2))
    assert "is capped at 2, the number of that the free memory" not in runner.worker_count("3")[1]
    assert runner.worker_count("3")[0] == 2


def test_a_target_that_cannot_be_imported() -> None:
    with pytest.raises(UsageError, match="--target nowhere_to_be_found:make: 'nowhere_to_be_found' can't be imported"):
        _factory(TargetSpec(None, None, (), "nowhere_to_be_found:make"))


def test_progress_counts_the_rows_of_the_split(tokenizer: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n} " * 50}) + "\n" for n in range(100)))
    seen: list[tuple[int, int]] = []
    ps.prepare(
        rows,
        tokenizer=tokenizer,
        cache=tmp_path / "c",
        split="train[:10]",
        on_progress=lambda p: seen.append((p.bytes_seen, p.bytes_total)),
    )
    assert seen[-1][0] == pytest.approx(seen[-1][1], rel=0.01)
    assert seen[-1][1] < rows.stat().st_size / 5


def test_train_reports_progress_from_the_start(examples: Path, tmp_path: Path) -> None:
    """It prints a line before any heavy import, and a finished run says so."""
    line = [sys.executable, "-m", "penstock.cli", "train", "sft", str(examples / "sft.yaml")]
    changes = [
        "loader.epochs=null",
        "loader.steps=2",
        f"output={tmp_path / 'run'}",
        f"data.prepare.cache={tmp_path / 'c'}",
    ]
    variables = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    more: dict[str, Any] = {"cwd": examples.parent, "env": variables}
    done = subprocess.run([*line, *changes], capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert told[0].startswith("penstock train sft: ")
    assert any(entry.startswith("data: 400 rows") and "prepared" in entry for entry in told)
    assert any("parameters trained (100.0%), on cpu × 1, 2 steps" in entry for entry in told)
    assert "finished: 2 steps; the model is in" in done.stdout
    again = subprocess.run([*line, *changes], capture_output=True, text=True, **more)
    assert "found in the cache" in again.stderr
    assert "all 2 steps are done already" in again.stderr
    assert "all 2 steps are already done" in again.stdout
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("")
    refused = subprocess.run([*line, *changes, f"output={tmp_path / 'other'}"], capture_output=True, text=True, **more)
    assert refused.returncode == 1
    assert "checkpoints: it is not a folder. Choose another output" in refused.stderr
    assert "model: loading" not in refused.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["cache", "ls", "--json"], ["prepare", "--help"]])
def test_standard_output_on_a_full_device(arguments: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", *arguments],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PENSTOCK_CACHE": str(tmp_path)},
        )  # fmt: skip
    assert done.returncode == 1
    said = "penstock: standard output can't be written: No space left on device. Free some space, or send it elsewhere."
    assert done.stderr.strip() == said
