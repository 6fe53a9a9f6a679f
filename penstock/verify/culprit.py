"""Which kernels make a run wrong: bisection over what is turned off.

Enters: the kernels that ran, and a question that runs the target with some of them off. Leaves: sentences with the
override that disables the culprits. Costs about log2(kernels) + 1 runs for each culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

IsWrong = Callable[[tuple[str, ...]], bool | None]  # None: the run failed, so that nothing can be told


def culprits(kernels: Sequence[str], is_wrong: IsWrong, override: Callable[[list[str]], str]) -> list[str]:
    """What to do about a run that is wrong with these kernels on, and right with all of them off."""
    found: list[str] = []
    while len(found) < len(kernels):
        one = _one([kernel for kernel in kernels if kernel not in found], kernels, is_wrong)
        if one is None:
            return [_told(found, override, "A run of the search failed, so the search is not complete.")]
        found.append(one)
        still = is_wrong(tuple(found))
        if still is None:
            return [_told(found, override, "A run of the search failed, so the search is not complete.")]
        if not still:
            return [_told(found, override, "With it, the loss is right again.")]
    return [_told(found, override, "No smaller set of kernels is enough.")]


def _one(candidates: list[str], kernels: Sequence[str], is_wrong: IsWrong) -> str | None:
    """One culprit among candidates, by halving those that stay on."""
    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        wrong = is_wrong(tuple(kernel for kernel in kernels if kernel not in half))
        if wrong is None:
            return None
        candidates = half if wrong else candidates[len(half) :]
    return candidates[0]


def _told(found: list[str], override: Callable[[list[str]], str], more: str) -> str:
    if not found:
        return more
    return f"Liger's {' and '.join(found)} makes the difference. Disable it: {override(found)}. {more}"
