"""Bisects Liger's kernels to find those that cause a wrong loss.

Takes about log2(kernels) + 1 runs of the target per faulty kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

IsWrong = Callable[[tuple[str, ...]], bool | None]  # runs with these kernels off; None: the run failed


def bisect_kernels(kernels: Sequence[str], is_wrong: IsWrong, override: Callable[[list[str]], str]) -> list[str]:
    """Finds the faulty kernels of a run that is wrong with all of them on and right with all off.

    Returns remedies: sentences with the configuration override that disables the faulty kernels.
    """
    found: list[str] = []
    while len(found) < len(kernels):
        faulty = _find_one([kernel for kernel in kernels if kernel not in found], kernels, is_wrong)
        if faulty is None:
            return [_remedy(found, override, "A run of the bisection failed, so it is not complete.")]
        found.append(faulty)
        still = is_wrong(tuple(found))
        if still is None:
            return [_remedy(found, override, "A run of the bisection failed, so it is not complete.")]
        if not still:
            return [_remedy(found, override, "The loss is then correct.")]
    return [_remedy(found, override, "No smaller set of kernels is enough.")]


def _find_one(candidates: list[str], kernels: Sequence[str], is_wrong: IsWrong) -> str | None:
    """Finds one faulty kernel by halving the set that stays on."""
    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        wrong = is_wrong(tuple(kernel for kernel in kernels if kernel not in half))
        if wrong is None:
            return None
        candidates = half if wrong else candidates[len(half) :]
    return candidates[0]


def _remedy(found: list[str], override: Callable[[list[str]], str], outcome: str) -> str:
    if not found:
        return outcome
    return f"The difference comes from Liger's {' and '.join(found)}. To disable: {override(found)}. {outcome}"
