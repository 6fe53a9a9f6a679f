"""Turns facts into verdicts. The rules need neither torch nor a GPU, and each finding carries its evidence.

Engaged: seen in a training step. Not engaged: the step ran, it would have been seen, and it was not. Everything else is
unknown: a failed import, a run that broke, sources that contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from penstock.train.verify.certificate import PACKAGES, Finding, PackageInfo, Verdict
from penstock.train.verify.observations import DataFacts, IsolationCase, RunFacts

ENGAGED, NOT_ENGAGED, UNKNOWN = Verdict.ENGAGED, Verdict.NOT_ENGAGED, Verdict.UNKNOWN
LAYER_KERNELS = ("rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy")
LARGE = 2048  # tokens; from here on, a full tensor of logits can't be a single chunk of a fused loss
FULL = 0.9  # expected fill of packed rows


def judge_run(facts: RunFacts) -> list[Finding]:
    """The findings about one training run."""
    about = _packages(facts)
    ran = bool(facts["steps"]["losses"])
    rules = (_kernels, _fused_dpo, _logits, _attention, _bf16, _checkpointing, _lora)
    found = [finding for rule in rules for finding in rule(facts)]
    if not ran:
        reason = facts["error"] or "no training step was seen"
        found = [Finding(f.promise, UNKNOWN, (reason,), f.asked) for f in found]
    found.append(_finite(facts))
    return [Finding(f.promise, f.verdict, f.evidence, f.asked, _relevant(f.promise, about)) for f in found]


def _packages(facts: RunFacts) -> list[PackageInfo]:
    return [PackageInfo(str(p["package"]), p["version"], p["file"], p["commit"]) for p in facts["packages"]]


_ABOUT = {
    "liger": ("liger_kernel", "triton", "transformers", "trl"),
    "lora": ("peft", "transformers"),
    "attention": ("transformers", "torch"),
    "packing": ("transformers", "trl", "penstock"),
    "data": ("penstock", "trl", "transformers"),
}


def _relevant(promise: str, packages: Sequence[PackageInfo]) -> tuple[PackageInfo, ...]:
    names = _ABOUT.get(promise.partition(".")[0], ("torch", "transformers", "trl"))
    own = [p for p in packages if p.package in names]
    others = [p for p in packages if p.package == "penstock" or p.package not in PACKAGES]
    return tuple(dict.fromkeys([*own, *others]))


def _asked(facts: RunFacts, kernel: str) -> bool | None:
    promised = facts["promised"]
    if "kernels" in promised:
        return bool(promised["kernels"].get(kernel, False))
    if "liger" not in promised:
        return None
    chosen = promised.get("liger_config", {})
    flags = {"mlp": ("swiglu", "geglu")}.get(kernel, (kernel,))
    default = kernel not in ("cross_entropy", "fused_dpo_loss")
    return bool(promised["liger"]) and any(chosen.get(flag, default) for flag in flags)


def _kernels(facts: RunFacts) -> Iterator[Finding]:
    for kernel in LAYER_KERNELS:
        promise, asked = f"liger.{kernel}", _asked(facts, kernel)
        if facts["liger_error"] is not None:
            reason = f"Liger's kernels can't be imported: {facts['liger_error']}"
            yield Finding(promise, UNKNOWN, (reason,), asked)
        else:
            yield _kernel(promise, kernel, facts, asked)


def _kernel(promise: str, kernel: str, facts: RunFacts, asked: bool | None) -> Finding:
    seen = facts["kernels"][kernel]
    calls = f"{seen['forward']} forward and {seen['backward']} backward calls completed in the watched steps"
    patched = f"patched in {seen['patched']} of {seen['modules']} places"
    profiler = f"the profiler saw {seen['profiled']} calls of {', '.join(seen['names']) or 'it'}"
    if seen["forward"] and seen["backward"]:
        if not seen["profiled"]:
            return Finding(promise, UNKNOWN, (calls, f"{profiler}: the two sources contradict each other"), asked)
        return Finding(promise, ENGAGED, (calls, patched, profiler), asked)
    if facts["graphs"] and not seen["forward"]:
        reason = f"{facts['graphs']} compiled graphs ran, and calls inside them can't be counted"
        return Finding(promise, UNKNOWN, (reason, patched), asked)
    return Finding(promise, NOT_ENGAGED, (calls, patched, *_why_not(kernel, facts)), asked)


def _why_not(kernel: str, facts: RunFacts) -> Iterator[str]:
    if facts["promised"].get("liger") is False:
        yield "the configuration does not ask for Liger"
    elif facts["liger_support"] is None:
        yield f"Liger has no kernels for models of type {facts['model_type']!r}"
    elif kernel not in facts["liger_support"]:
        yield f"Liger has no {kernel} for models of type {facts['model_type']!r}"
    elif kernel == "cross_entropy" and facts["kernels"]["fused_linear_cross_entropy"]["forward"]:
        yield "the fused loss replaces it"
    elif kernel == "fused_linear_cross_entropy" and facts["kernels"]["cross_entropy"]["forward"]:
        yield "the unfused cross entropy replaces it"
    elif kernel == "fused_linear_cross_entropy" and facts["promised"].get("liger") and _trl(facts) >= (1, 15):
        yield "TRL turns it off from 1.15 on, in favour of its own chunked loss"


def _trl(facts: RunFacts) -> tuple[int, ...]:
    """Major and minor version of TRL if the trainer is one of its own, else empty."""
    versions = [p["version"] for p in facts["packages"] if p["package"] == "trl" and facts["promised"].get("trl")]
    parts = (versions[0] or "").split(".")[:2] if versions else []
    return tuple(int(part) for part in parts if part.isdigit())


def _fused_dpo(facts: RunFacts) -> Iterator[Finding]:
    if facts["promised"].get("dpo") is not True and not facts["kernels"]["fused_dpo_loss"]["forward"]:
        return
    promised = facts["promised"]
    asked = promised["kernels"]["fused_dpo_loss"] if "kernels" in promised else bool(promised.get("liger"))
    if facts["liger_dpo_error"] is not None:
        reason = f"Liger's DPO loss can't be imported: {facts['liger_dpo_error']}"
        yield Finding("liger.fused_dpo_loss", UNKNOWN, (reason,), asked)
        return
    found = _kernel("liger.fused_dpo_loss", "fused_dpo_loss", facts, asked)
    if found.verdict is NOT_ENGAGED:
        seen = facts["kernels"]["fused_dpo_loss"]
        calls = f"{seen['forward']} forward and {seen['backward']} backward calls completed in the watched steps"
        gone = asked and _trl(facts) >= (1, 13)
        why = ("use_liger_kernel fused it in TRL 0.28 to 1.12; from 1.13 on TRL has no Liger DPO loss",) if gone else ()
        found = Finding(found.promise, NOT_ENGAGED, (calls, *why), asked)
    yield found


def _logits(facts: RunFacts) -> Iterator[Finding]:
    promise, tokens = "logits.not_materialised", facts["tokens"]
    if not tokens or facts["vocabulary"] is None:
        yield Finding(promise, UNKNOWN, ("no token embedding was seen",))
        return
    largest = max(facts["logit_rows"], facts["head_rows"])
    size = f"the largest logits tensor had {largest} rows for {tokens} tokens (vocabulary {facts['vocabulary']})"
    if facts["head_rows"] >= 0.9 * tokens or (largest >= 0.9 * tokens and tokens >= LARGE):
        yield Finding(promise, NOT_ENGAGED, (size,))
    elif largest <= 0.6 * tokens:
        yield Finding(promise, ENGAGED, (size,))
    else:
        yield Finding(promise, UNKNOWN, (size, "with this few tokens, one chunk of a fused loss may hold them all"))


def _attention(facts: RunFacts) -> Iterator[Finding]:
    asked, operations = facts["attention"], facts["operations"]
    ran = ran_attention(operations)
    evidence = f"transformers was set to {asked!r}; the profiler saw {_listed(operations)}"
    if asked is None or ran is None:
        yield Finding("attention", UNKNOWN, (evidence,))
        return
    expected = facts["promised"].get("attention") or asked
    family = "flash" if "flash" in expected else "flex" if "flex" in expected else expected
    verdict = ENGAGED if ran == family else NOT_ENGAGED
    yield Finding("attention", verdict, (f"{ran} ran", evidence), True)


def ran_attention(operations: dict[str, int]) -> str | None:
    """The attention family that the profiled operators belong to."""
    names = " ".join(operations).lower()
    if "scaled_dot_product" in names:
        return "sdpa"
    if "flex_attention" in names:
        return "flex"
    if "flash" in names:
        return "flash"
    return "eager" if "aten::_softmax" in operations else None


def _listed(operations: dict[str, int]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in operations.items()) or "no attention operator"


def _bf16(facts: RunFacts) -> Iterator[Finding]:
    dtypes = facts["linear_dtypes"]
    asked = facts["promised"].get("bf16")
    if not dtypes:
        yield Finding("bf16", UNKNOWN, ("no linear layer ran",), asked)
        return
    share = dtypes.get("bfloat16", 0) / sum(dtypes.values())
    evidence = "outputs of linear layers: " + ", ".join(f"{n} in {dtype}" for dtype, n in sorted(dtypes.items()))
    yield Finding("bf16", ENGAGED if share >= 0.95 else NOT_ENGAGED, (evidence,), asked)


def _checkpointing(facts: RunFacts) -> Iterator[Finding]:
    recomputed, backwards = facts["layer_recomputed"], facts["layer_backwards"]
    asked = facts["promised"].get("gradient_checkpointing")
    evidence = (
        f"{facts['layer_forwards']} layer forwards, {recomputed} recomputed in backward passes, "
        f"{backwards} layer backwards"
    )
    if not backwards:
        yield Finding("gradient_checkpointing", UNKNOWN, (evidence, "no layer was seen in a backward pass"), asked)
        return
    yield Finding("gradient_checkpointing", ENGAGED if recomputed >= backwards else NOT_ENGAGED, (evidence,), asked)


def _lora(facts: RunFacts) -> Iterator[Finding]:
    asked, trainable, total = facts["promised"].get("lora"), facts["trainable"], facts["parameters"]
    if not total:
        yield Finding("lora", UNKNOWN, ("no model with trainable weights was seen",), asked)
        return
    share = f"{trainable:,} of {total:,} weights are trained ({100 * trainable / total:.2f}%)"
    adapters = f"{facts['adapters']} adapter matrices"
    engaged = facts["adapters"] > 0 and trainable < total / 2
    yield Finding("lora", ENGAGED if engaged else NOT_ENGAGED, (share, adapters), asked)


def _finite(facts: RunFacts) -> Finding:
    losses, gradients = facts["steps"]["losses"], facts["steps"]["gradients"]
    if not losses:
        return Finding("loss.finite", UNKNOWN, (facts["error"] or "no backward call was seen",))
    shown = f"losses {_numbers(losses)}; gradient norms {_numbers(gradients)}"
    wrong = None in losses or None in gradients
    return Finding("loss.finite", NOT_ENGAGED if wrong else ENGAGED, (shown,))


def _numbers(values: Sequence[float | None]) -> str:
    return ", ".join("not finite" if v is None else f"{v:.6g}" for v in values) or "none"


def compare_losses(facts: RunFacts, plain: RunFacts) -> tuple[Verdict, str]:
    """Whether a run's losses and gradients equal those of the run without Liger's kernels."""
    tolerance = 2e-2 if "bfloat16" in {**facts["linear_dtypes"], **plain["linear_dtypes"]} else 1e-5
    ours, theirs = facts["steps"]["losses"], plain["steps"]["losses"]
    if not ours or not theirs:
        return UNKNOWN, "; ".join(filter(None, (facts["error"], plain["error"]))) or "no loss was seen"
    if None in theirs:
        return UNKNOWN, "the loss is not finite without Liger's kernels either"
    if None in ours or None in facts["steps"]["gradients"]:
        return NOT_ENGAGED, "the loss or its gradient is not finite; without Liger's kernels it is"
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]
    apart = max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs)
    shown = f"losses {_numbers(ours)} with Liger's kernels, {_numbers(theirs)} without"
    return (
        ENGAGED if apart <= tolerance else NOT_ENGAGED
    ), f"{shown}: relative difference {apart:.2g} (tolerance {tolerance:g})"


def engaged_kernels(facts: RunFacts) -> list[str]:
    """The kernels that ran or are patched in, whether or not their backward pass completed."""
    return [kernel for kernel, seen in facts["kernels"].items() if seen["forward"] or seen["patched"]]


def batch_findings(batches: dict[str, Any] | None, packing: bool, about: tuple[PackageInfo, ...]) -> Iterator[Finding]:
    """Findings about masks and packing from a trainer's batches."""
    if batches is None:
        return
    share = f"{batches['trained']:,} of {batches['tokens']:,} tokens trained in the {batches['rows']} rows seen"
    stops = f"{batches['stops_trained']} of {batches['stops']} stop tokens trained"
    rows = f"{batches['rows_untrained']} rows have no trained token"
    sound = batches["stops_trained"] > 0 and not batches["rows_untrained"]
    verdict = ENGAGED if sound else NOT_ENGAGED if batches["stops"] or batches["rows_untrained"] else UNKNOWN
    yield Finding("data.masks", verdict, (share, stops, rows), None, about)
    if packing:
        full = batches["tokens"] / max(batches["cells"], 1)
        yield Finding(
            "data.packing", ENGAGED if full >= 0.9 else NOT_ENGAGED, (f"rows {100 * full:.1f}% full",), True, about
        )


FULL = 0.9  # how full packed rows are expected to be


def isolation_verdict(case: IsolationCase) -> tuple[Verdict, str]:
    """The verdict on one isolation experiment."""
    moved = f"{case['name']}: changing one of {case['sequences']} sequences moved its own states by {case['own']:.2g}"
    if case["error"] is not None:
        return UNKNOWN, f"{case['name']}: {case['error']}"
    if not case["packed"]:
        return NOT_ENGAGED, f"{case['name']}: every row holds a single sequence; nothing is packed"
    if not case["own"] > max(10 * case["noise"], 1e-6):
        return UNKNOWN, f"{moved}: the experiment has no power"
    shown = f"{moved} and those of the others by {case['others']:.2g} (noise {case['noise']:.2g})"
    if case["others"] > max(2 * case["noise"], 1e-5 * case["own"]):
        return NOT_ENGAGED, f"contaminated. {shown}"
    return ENGAGED, f"isolated. {shown}"


def isolation_finding(cases: Sequence[IsolationCase], asked: bool | None, about: tuple[PackageInfo, ...]) -> Finding:
    """The finding on packing; for a bare model, the last case (lengths with positions) decides."""
    verdicts = [isolation_verdict(case) for case in cases]
    if not verdicts:
        return Finding("packing.isolated", UNKNOWN, ("the target exposes no batches",), asked, about)
    return Finding("packing.isolated", verdicts[-1][0], tuple(words for _, words in verdicts), asked, about)


def data_findings(facts: DataFacts, about: tuple[PackageInfo, ...]) -> Iterator[Finding]:
    """Findings about data prepared by Penstock."""
    yield Finding("data.cache_hit", ENGAGED if facts["hit"] else NOT_ENGAGED, tuple(facts["reasons"]), True, about)
    yield _prefetch(facts, about)
    share = 100 * facts["trained"] / max(facts["tokens"], 1)
    sound = facts["stops"] > 0 and facts["stops_trained"] == facts["stops"]
    verdict = UNKNOWN if not facts["stops"] else ENGAGED if sound else NOT_ENGAGED
    evidence = (
        f"{facts['trained']:,} of {facts['tokens']:,} tokens trained ({share:.1f}%)",
        f"{facts['stops_trained']} of {facts['stops']} trained turns end with their stop token",
        f"{facts['untrained_rows']} of {facts['rows']} rows have no trained token; they are dropped and counted",
    )
    yield Finding("data.masks", verdict, evidence, True, about)
    if facts["efficiency"] is not None:
        full = f"packed rows are {100 * facts['efficiency']:.2f}% full"
        yield Finding("data.packing", ENGAGED if facts["efficiency"] >= FULL else NOT_ENGAGED, (full,), True, about)


def _prefetch(facts: DataFacts, about: tuple[PackageInfo, ...]) -> Finding:
    promise = "data.collate_ahead"
    if not facts["prefetch"]:
        return Finding(
            promise, NOT_ENGAGED, ("loader.prefetch is 0: batches are collated in the training loop",), False, about
        )
    wait, collate = median(facts["waits"]) if facts["waits"] else 0.0, facts["collate_seconds"]
    shown = (
        f"collating a batch takes {1e3 * collate:.2f} ms; with {1e3 * facts['step_seconds']:.0f} ms between batches, "
        f"the wait for the next one was {1e3 * wait:.3f} ms (median of {len(facts['waits'])})"
    )
    return Finding(promise, ENGAGED if wait < max(collate / 3, 2e-4) else NOT_ENGAGED, (shown,), True, about)
