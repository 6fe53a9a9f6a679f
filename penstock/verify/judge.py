"""From facts to verdicts, by rules that need no GPU and no torch. Each finding says what it rests on.

Engaged means seen to happen in a training step. Not engaged means that the step ran, that it could have been seen, and
was not. Everything else is unknown: a failed import, a run that broke, sources that contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.verify.certificate import Finding, Subject, Verdict
from penstock.verify.facts import RunFacts
from penstock.verify.subjects import PACKAGES

ENGAGED, NOT_ENGAGED, UNKNOWN = Verdict.ENGAGED, Verdict.NOT_ENGAGED, Verdict.UNKNOWN
LAYER_KERNELS = ("rms_norm", "rope", "mlp", "cross_entropy", "fused_linear_cross_entropy")
LARGE = 2048  # tokens from which on a whole tensor of logits can't be one chunk of a fused loss


def judged(facts: RunFacts) -> list[Finding]:
    """The findings about one training run."""
    about = _subjects(facts)
    ran = bool(facts["steps"]["losses"])
    rules = (_kernels, _fused_dpo, _logits, _attention, _bf16, _checkpointing, _lora)
    found = [finding for rule in rules for finding in rule(facts)]
    if not ran:
        reason = facts["error"] or "no training step was seen"
        found = [Finding(f.promise, UNKNOWN, (reason,), f.asked) for f in found]
    found.append(_finite(facts))
    return [Finding(f.promise, f.verdict, f.evidence, f.asked, _relevant(f.promise, about)) for f in found]


def _subjects(facts: RunFacts) -> list[Subject]:
    return [Subject(str(s["package"]), s["version"], s["file"], s["commit"]) for s in facts["subjects"]]


_ABOUT = {
    "liger": ("liger_kernel", "triton", "transformers", "trl"),
    "lora": ("peft", "transformers"),
    "attention": ("transformers", "torch"),
    "packing": ("transformers", "trl", "penstock"),
    "data": ("penstock", "trl", "transformers"),
}


def _relevant(promise: str, subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    wanted = _ABOUT.get(promise.partition(".")[0], ("torch", "transformers", "trl"))
    own = [s for s in subjects if s.package in wanted]
    others = [s for s in subjects if s.package == "penstock" or s.package not in PACKAGES]
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
            reason = f"Liger's kernels can't be imported here: {facts['liger_error']}"
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
        reason = f"{facts['graphs']} compiled graphs ran, inside which calls can't be counted"
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
        yield "the fused loss takes its place"
    elif kernel == "fused_linear_cross_entropy" and facts["kernels"]["cross_entropy"]["forward"]:
        yield "the plain cross entropy takes its place"
    elif kernel == "fused_linear_cross_entropy" and facts["promised"].get("liger") and _trl(facts) >= (1, 15):
        yield "TRL from 1.15 on turns it off: its own chunked loss takes the place"


def _trl(facts: RunFacts) -> tuple[int, ...]:
    """Major and minor version of TRL, where the trainer is its own; else nothing."""
    versions = [s["version"] for s in facts["subjects"] if s["package"] == "trl" and facts["promised"].get("trl")]
    parts = (versions[0] or "").split(".")[:2] if versions else []
    return tuple(int(part) for part in parts if part.isdigit())


def _fused_dpo(facts: RunFacts) -> Iterator[Finding]:
    if facts["promised"].get("dpo") is not True and not facts["kernels"]["fused_dpo_loss"]["forward"]:
        return
    promised = facts["promised"]
    asked = promised["kernels"]["fused_dpo_loss"] if "kernels" in promised else bool(promised.get("liger"))
    if facts["liger_dpo_error"] is not None:
        reason = f"Liger's DPO loss can't be imported here: {facts['liger_dpo_error']}"
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
        yield Finding(promise, UNKNOWN, ("no embedding of tokens was seen",))
        return
    largest = max(facts["logit_rows"], facts["head_rows"])
    size = f"the largest tensor of logits had {largest} rows for {tokens} tokens (vocabulary {facts['vocabulary']})"
    if facts["head_rows"] >= 0.9 * tokens or (largest >= 0.9 * tokens and tokens >= LARGE):
        yield Finding(promise, NOT_ENGAGED, (size,))
    elif largest <= 0.6 * tokens:
        yield Finding(promise, ENGAGED, (size,))
    else:
        yield Finding(promise, UNKNOWN, (size, "with so few tokens, one chunk of a fused loss may hold them all"))


def _attention(facts: RunFacts) -> Iterator[Finding]:
    asked, operations = facts["attention"], facts["operations"]
    ran = ran_attention(operations)
    evidence = f"transformers was set to {asked!r}; the profiler saw {_listed(operations)}"
    if asked is None or ran is None:
        yield Finding("attention", UNKNOWN, (evidence,))
        return
    wanted = facts["promised"].get("attention") or asked
    family = "flash" if "flash" in wanted else "flex" if "flex" in wanted else wanted
    verdict = ENGAGED if ran == family else NOT_ENGAGED
    yield Finding("attention", verdict, (f"{ran} ran", evidence), True)


def ran_attention(operations: dict[str, int]) -> str | None:
    """The family of attention that operators of a run belong to."""
    names = " ".join(operations).lower()
    if "scaled_dot_product" in names:
        return "sdpa"
    if "flex_attention" in names:
        return "flex"
    if "flash" in names:
        return "flash"
    return "eager" if "aten::_softmax" in operations else None


def _listed(operations: dict[str, int]) -> str:
    return ", ".join(f"{name} ×{count}" for name, count in operations.items()) or "no operator of attention"


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
    again, back = facts["layer_recomputed"], facts["layer_backwards"]
    asked = facts["promised"].get("gradient_checkpointing")
    evidence = f"{facts['layer_forwards']} layer forwards, {again} more inside backward passes, {back} layer backwards"
    if not back:
        yield Finding("gradient_checkpointing", UNKNOWN, (evidence, "no layer was seen in a backward pass"), asked)
        return
    yield Finding("gradient_checkpointing", ENGAGED if again >= back else NOT_ENGAGED, (evidence,), asked)


def _lora(facts: RunFacts) -> Iterator[Finding]:
    asked, trainable, total = facts["promised"].get("lora"), facts["trainable"], facts["parameters"]
    if not total:
        yield Finding("lora", UNKNOWN, ("no trained model was seen",), asked)
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


def compared(facts: RunFacts, plain: RunFacts) -> tuple[Verdict, str]:
    """Whether a run's losses and gradients equal those of the run without Liger's kernels."""
    tolerance = 2e-2 if "bfloat16" in {**facts["linear_dtypes"], **plain["linear_dtypes"]} else 1e-5
    ours, theirs = facts["steps"]["losses"], plain["steps"]["losses"]
    if not ours or not theirs:
        return UNKNOWN, "; ".join(filter(None, (facts["error"], plain["error"]))) or "no loss was seen"
    if None in theirs:
        return UNKNOWN, "the loss is not finite without Liger's kernels either"
    if None in ours or None in facts["steps"]["gradients"]:
        return NOT_ENGAGED, "the loss or its gradient is not finite, and it is without Liger's kernels"
    apart = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(ours, theirs, strict=False) if a is not None and b)
    shown = f"losses {_numbers(ours)} with Liger's kernels, {_numbers(theirs)} without"
    return (ENGAGED if apart <= tolerance else NOT_ENGAGED), f"{shown}: apart by {apart:.2g} (tolerance {tolerance:g})"


def engaged_kernels(facts: RunFacts) -> list[str]:
    """The kernels that ran, whether or not they came back."""
    return [kernel for kernel, seen in facts["kernels"].items() if seen["forward"] or seen["patched"]]


def batch_findings(batches: dict[str, Any] | None, packing: bool, about: tuple[Subject, ...]) -> Iterator[Finding]:
    """What the batches of a trainer say about masks and packing."""
    if batches is None:
        return
    share = f"{batches['trained']:,} of {batches['tokens']:,} tokens trained in {batches['rows']} rows seen"
    stops = f"{batches['stops_trained']} of {batches['stops']} stop tokens trained"
    rows = f"{batches['rows_untrained']} rows train nothing"
    sound = batches["stops_trained"] > 0 and not batches["rows_untrained"]
    verdict = ENGAGED if sound else NOT_ENGAGED if batches["stops"] or batches["rows_untrained"] else UNKNOWN
    yield Finding("data.masks", verdict, (share, stops, rows), None, about)
    if packing:
        full = batches["tokens"] / max(batches["cells"], 1)
        yield Finding(
            "data.packing", ENGAGED if full >= 0.9 else NOT_ENGAGED, (f"rows {100 * full:.1f}% full",), True, about
        )
