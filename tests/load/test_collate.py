"""Collators against plain references, and against transformers' own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load.collate import Padding, PaddingSide, packed, padded, pairs
from penstock.load.gather import Gathered, Gatherer
from tests.support.feed_data import pair_view, view

SEQUENCES = st.lists(
    st.lists(st.tuples(st.integers(1, 99), st.sampled_from([0.0, 1.0, 0.5])), min_size=1, max_size=12), max_size=6
)


def gathered(sequences: list[list[tuple[int, float]]], prompts: list[int] | None = None) -> Gathered:
    flat = [token for sequence in sequences for token in sequence]
    return Gathered(
        np.array([token for token, _ in flat], np.int64),
        np.array([weight for _, weight in flat], np.float32),
        np.array([len(sequence) for sequence in sequences], np.int64),
        np.zeros((len(sequences), 2), np.int64),
        np.array(prompts or [], np.int64),
    )


@settings(deadline=None)
@given(SEQUENCES, st.integers(0, 3), st.sampled_from(PaddingSide), st.sampled_from([1, 8]))
def test_padded(sequences: list[list[tuple[int, float]]], fillers: int, side: PaddingSide, multiple: int) -> None:
    if not sequences and not fillers:
        return
    arrays, counts = padded(gathered(sequences), fillers, Padding(77, side, multiple))
    filled = sequences + [[(77, 0.0)]] * fillers
    width = max(len(sequence) for sequence in filled)
    width += -width % multiple
    for row, sequence in enumerate(filled):
        gap = width - len(sequence)
        before, behind = (0, gap) if side is PaddingSide.RIGHT else (gap, 0)
        ids, weights = [token for token, _ in sequence], [weight for _, weight in sequence]
        labels = [token if weight else -100 for token, weight in sequence]
        wanted = {"input_ids": (77, ids), "labels": (-100, labels), "loss_weights": (0, weights)}
        wanted["attention_mask"] = (0, [1] * len(sequence))
        for name, (empty, values) in wanted.items():
            assert arrays[name][row].tolist() == [empty] * before + values + [empty] * behind, name  # type: ignore[index]
    tokens = sum(map(len, sequences))
    trained = sum(weight > 0 for sequence in sequences for _, weight in sequence[1:])
    assert counts == (len(sequences), tokens, trained, len(filled) * width - tokens, fillers)


@settings(deadline=None)
@given(SEQUENCES, st.sampled_from([1, 4]), st.sampled_from([1, 8]), st.sampled_from([0, 40, 200]))
def test_packed(sequences: list[list[tuple[int, float]]], align: int, multiple: int, total: int) -> None:
    arrays, counts = packed(
        gathered(sequences), align, 0, Padding(77, multiple=multiple * align, total=total, segment=32)
    )
    width = arrays["input_ids"].shape[1]  # type: ignore[union-attr]
    ids, labels, weights, positions, owners, bounds = [], [], [], [], [], [0]
    for number, sequence in enumerate(sequences):
        gap = -len(sequence) % align
        ids += [token for token, _ in sequence] + [77] * gap
        labels += [-100] + [token if weight else -100 for token, weight in sequence[1:]] + [-100] * gap
        weights += [0.0] + [weight for _, weight in sequence[1:]] + [0.0] * gap
        positions += range(len(sequence) + gap)
        owners += [number] * (len(sequence) + gap)
        bounds.append(len(ids))
    while len(ids) < width:
        size = min(width - len(ids), 32)
        ids, labels, weights = ids + [77] * size, labels + [-100] * size, weights + [0.0] * size
        positions, owners = positions + list(range(size)), owners + [len(bounds) - 1] * size
        bounds.append(len(ids))
    wanted: dict[str, list[Any]] = {
        "input_ids": ids, "labels": labels, "loss_weights": weights, "position_ids": positions, "seq_idx": owners,
    }  # fmt: skip
    for name, values in wanted.items():
        assert arrays[name].tolist() == [values], name  # type: ignore[union-attr]
    longest = int(np.diff(bounds).max())
    for side in "qk":
        assert arrays[f"cu_seq_lens_{side}"].tolist() == bounds and arrays[f"max_length_{side}"] == longest  # type: ignore[union-attr]
    assert width % (align * multiple) == 0 and width >= max(total, 1)
    assert counts.padding == width - counts.tokens and counts.trained == sum(label != -100 for label in labels)


def test_packed_types_are_those_of_flash_attention() -> None:
    arrays, _ = packed(gathered([[(1, 1.0), (2, 1.0)]]), 1, 0, Padding())
    types = {name: str(getattr(array, "dtype", "int")) for name, array in arrays.items()}
    assert types == {
        "input_ids": "int64", "labels": "int64", "position_ids": "int64", "cu_seq_lens_q": "int32",
        "cu_seq_lens_k": "int32", "max_length_q": "int", "max_length_k": "int", "seq_idx": "int32",
        "loss_weights": "float32",
    }  # fmt: skip
    assert "attention_mask" not in arrays


@pytest.mark.parametrize("side", list(PaddingSide))
def test_pairs(side: PaddingSide) -> None:
    found = gathered(
        [
            [(1, 0.0), (2, 1.0)],
            [(3, 0.0), (4, 0.0), (5, 1.0)],
            [(1, 0.0), (6, 1.0), (7, 1.0)],
            [(3, 0.0), (4, 0.0), (8, 0.5)],
        ],
        prompts=[1, 2],
    )
    arrays, counts = pairs(found, 1, Padding(9, side))
    right = {
        "input_ids": [[1, 2, 9], [3, 4, 5], [9, 9, 9], [1, 6, 7], [3, 4, 8], [9, 9, 9]],
        "completion_mask": [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]],
        "attention_mask": [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1], [1, 0, 0]],
        "labels": [[-100, 2, -100], [-100, -100, 5], [-100] * 3, [-100, 6, 7], [-100, -100, 8], [-100] * 3],
    }
    left = {
        **right,
        "input_ids": [[9, 1, 2], [3, 4, 5], [9, 9, 9], [1, 6, 7], [3, 4, 8], [9, 9, 9]],
        "completion_mask": [[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]],
        "attention_mask": [[0, 1, 1], [1, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]],
        "labels": [[-100, -100, 2], [-100, -100, 5], [-100] * 3, [-100, 6, 7], [-100, -100, 8], [-100] * 3],
    }
    for name, values in (right if side is PaddingSide.RIGHT else left).items():
        assert arrays[name].tolist() == values, name  # type: ignore[union-attr]
    assert (counts.sequences, counts.tokens, counts.trained, counts.filler_rows) == (4, 11, 5, 1)


def test_completions_begin_behind_the_common_prompt() -> None:
    served = pair_view()
    arrays, _ = pairs(Gatherer(served)(np.arange(len(served))), 0, Padding())
    for number in range(len(served)):
        pair = served.pair(number)
        for row, side in ((number, pair.chosen), (len(served) + number, pair.rejected)):
            mask = arrays["completion_mask"][row]  # type: ignore[index]
            assert mask.sum() == len(side) - pair.prompt_length and not mask[: pair.prompt_length].any()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_equals_transformers(side: str) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    served = view()
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 7}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", padding_side=side)
    pad = tokenizer.pad_token_id
    features = [{"input_ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in map(served.example, range(9))]
    theirs = transformers.DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8, return_tensors="np")(features)
    ours, _ = padded(Gatherer(served)(np.arange(9)), 0, Padding(pad, PaddingSide(side), 8))
    for name in ("input_ids", "attention_mask", "labels"):
        assert np.array_equal(ours[name], theirs[name]), name


def test_packed_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    served = view()
    features = [{"input_ids": e.input_ids.tolist(), "labels": e.labels.tolist()} for e in map(served.example, range(9))]
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="np"
    )
    theirs, (ours, _) = collator(features), packed(Gatherer(served)(np.arange(9)), 1, 0, Padding())
    assert set(theirs) == set(ours) - {"loss_weights"}
    for name, value in theirs.items():
        assert np.array_equal(ours[name], value), name
        assert getattr(ours[name], "dtype", int) == getattr(value, "dtype", int), name
