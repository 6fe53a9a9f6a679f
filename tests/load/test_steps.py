"""Ranks come from the launcher, and the mean loss doesn't depend on how a step is divided."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import ranks
from penstock.errors import UsageError
from penstock.load import options as settings
from penstock.load.collate import Batch
from penstock.load.loader import Loader
from tests.support.feed_data import mixture, pair_view, view

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets a launcher's environment variables."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    settings._log_rank.cache_clear()

    def say(**said: int) -> None:
        for name, value in said.items():
            monkeypatch.setenv(name, str(value))

    return say


@pytest.mark.parametrize(("rank", "size"), [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_ranks_come_from_the_launcher(rank: str, size: str, launched: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    served = view()
    found = []
    for number in range(2):
        launched(**{rank: number, size: 2})
        load = Loader(served, batch_size=4)
        assert (load.settings.rank, load.settings.world_size) == (number, 2)
        Loader(served, batch_size=4)
        found.append([row for batch in load for row in batch.rows])
    assert not set(found[0]) & set(found[1]) and len(found[0]) + len(found[1]) == len(served)
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"loaders serve rank {number} of 2, as {rank} and {size} say" for number in range(2)]


def test_explicit_ranks_win(launched: Any) -> None:
    launched(RANK=3, WORLD_SIZE=4)
    chosen = Loader(view(), batch_size=4, rank=0, world_size=1).settings
    assert (chosen.rank, chosen.world_size) == (0, 1)
    assert Loader(view(), batch_size=4, world_size=4).settings.rank == 3
    with pytest.raises(UsageError, match="world_size=2, but RANK and WORLD_SIZE say 4. Give the rank, too"):
        Loader(view(), batch_size=4, world_size=2)


def test_a_world_size_needs_a_rank(launched: Any) -> None:
    with pytest.raises(UsageError, match="world_size=2 without a rank. Give the rank, from 0 on"):
        Loader(view(), batch_size=4, world_size=2)
    assert Loader(view(), batch_size=4).settings.world_size == 1


def test_the_innermost_launcher_decides(launched: Any) -> None:
    launched(SLURM_PROCID=1, SLURM_NTASKS=2, RANK=6, WORLD_SIZE=8)  # four processes per task
    assert ranks.launched() == (6, 8, "RANK and WORLD_SIZE", False)
    launched(WORLD_SIZE=1, RANK=0)
    with pytest.raises(UsageError, match="WORLD_SIZE say rank 0 of 1, SLURM_PROCID and SLURM_NTASKS say rank 1 of 2"):
        Loader(view(), batch_size=4)
    launched(WORLD_SIZE=2, RANK=2)
    with pytest.raises(UsageError, match="RANK=2 and WORLD_SIZE=2: ranks count from 0"):
        Loader(view(), batch_size=4)


@pytest.mark.slow
def test_a_process_group_without_a_launcher(tmp_path: Path) -> None:
    """`torch.multiprocessing.spawn` sets no variable."""
    script = tmp_path / "spawned.py"
    script.write_text(
        "import sys, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', rank=0, world_size=1)\n"
        "from penstock.ranks import launched\n"
        "print(launched())\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "Ranks(rank=0, world_size=1, said_by='torch.distributed', is_outer=False)"


# ---- the weight of a step

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "padded": (view, {}),
    "packed": (view, {"collate": "packed"}),
    "truncated": (lambda: view(overlong="truncate_left", max_length=20), {}),
    "split": (lambda: view(overlong="split", max_length=16), {"collate": "packed", "capacity": 64}),
    "all tokens": (lambda: view(train_on="all_tokens"), {"collate": "packed"}),
    "weighted": (lambda: view(train_on="customized"), {"shuffle": False}),
    "mixture": (mixture, {}),
}


def weight_of(batch: Batch) -> float:
    """The weight from a batch's own tensors; predictions start at a sequence's second token."""
    labels, weights = batch.tensors["labels"][:, 1:], batch.tensors["loss_weights"][:, 1:]
    return float(weights[labels != -100].sum(dtype=np.float64))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_batches_carry_the_weight_of_their_step(case: str, micro_batch: int | None) -> None:
    make, options = CASES[case]
    served = make()
    for world_size in (1, 3):
        chosen = {"batch_size": 7, "micro_batch": micro_batch, "world_size": world_size, "prefetch": 0, **options}
        batches = [batch for rank in range(world_size) for batch in Loader(served, rank=rank, **chosen)]
        for step in range(batches[-1].step + 1):
            own = [batch for batch in batches if batch.step == step]
            assert {batch.step_weight for batch in own} == {own[0].step_weight}
            assert own[0].step_weight == pytest.approx(sum(map(weight_of, own)), rel=1e-6)


def test_pairs_weigh_one_each() -> None:
    load = Loader(pair_view(), batch_size=4, micro_batch=1)
    assert [batch.step_weight for batch in load if batch.ends_step] == [4, 4, 3]
