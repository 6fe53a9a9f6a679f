"""Plans batches: which rows each global step holds, as a pure function of (lengths, settings, step).

In: the lengths of a view or mixture, and `PlanSettings`. Out: `plan.Plan`, which maps a step to its rows, and
`balance.shares`, which splits a step's rows over ranks and micro-batches.

With a capacity, rows are bins of packed sequences (`best_fit`, `bins`); otherwise each item is a row (`epoch`). Epochs
are shuffled by a permutation computed per position (`permute`), so any step is found without replaying earlier ones.
Other packages use `plan`, `settings`, `balance` and `bins.ranges`.
"""

from penstock.pack.settings import PlanSettings, Tail

__all__ = ["PlanSettings", "Tail"]
