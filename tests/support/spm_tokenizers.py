"""Small tokenizers built like those of Gemma, Mistral and T5."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "def f(x):\n    return x  # code with   runs of spaces",
    "Hello there, how are you? I am fine.",
    "don't you see 1234 things, señor? café",
] * 4
TURNS = ["<s>", "</s>"]
RUNS = ["▁▁", "▁▁▁", "▁▁▁▁"]
SPACES = normalizers.Replace(" ", "▁")


def bpe(normalizer: Any, splitting: Any = None, added: tuple[str, ...] = ()) -> bytes:
    """A BPE tokenizer with byte fallback, as in Llama 2, Mistral and Gemma."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    if splitting is not None:
        trained.pre_tokenizer = splitting
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *TURNS], show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    for run in RUNS:
        for left in ("▁" * n for n in range(1, len(run))):
            merges.append((left, run[len(left) :]))
        vocab.setdefault(run, len(vocab))
    vocab.setdefault("▁", len(vocab))
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    if splitting is not None:
        tokenizer.pre_tokenizer = splitting
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.add_special_tokens(["<unk>", *TURNS])
    tokenizer.add_tokens([AddedToken(run, normalized=False) for run in added])
    return tokenizer.to_str().encode()


def unigram() -> bytes:
    """A Unigram tokenizer that drops white space, like T5's."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", *TURNS], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str().encode()


SHAPES: dict[str, Callable[[], bytes]] = {
    "gemma": lambda: bpe(SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), added=tuple(RUNS)),
    "mistral": lambda: bpe(normalizers.Sequence([normalizers.Prepend("▁"), SPACES])),
    "metaspace": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    "metaspace, first": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "metaspace, never": lambda: bpe(None, pre_tokenizers.Metaspace(prepend_scheme="never")),
    "t5": unigram,
}
