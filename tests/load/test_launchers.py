"""Real processes of a launcher: ranks share one dataset, and no row is served twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import penstock as ps

SCRIPT = """
import json, os, sys
import penstock as ps

if os.environ.get("MASTER_ADDR"):  # torchrun's; ranks meet before they read
    import torch.distributed as dist
    dist.init_process_group("gloo")
load = ps.open(sys.argv[1]).view().loader(batch_size=4, epochs=1)
rows = [row.row for batch in load for row in batch.rows]
rank = load.settings.rank
with open(os.path.join(sys.argv[2], f"{rank}.json"), "w") as file:
    json.dump({"rows": rows, "world": load.settings.world_size}, file)
if os.environ.get("MASTER_ADDR"):
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture
def script(tokenizer: Path, tmp_path: Path) -> list[str]:
    """The script with its arguments: a dataset of 30 rows, and a folder for what ranks report."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]})
        for n in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    ds = ps.prepare(tmp_path / "rows.jsonl", tokenizer=str(tokenizer), cache=tmp_path / "cache", workers="1")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return [str(tmp_path / "script.py"), str(ds.path), str(tmp_path / "out")]


def environment(**more: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR")
    return {k: v for k, v in os.environ.items() if k not in launchers} | {"OMP_NUM_THREADS": "1"} | more


def assert_disjoint(out: Path) -> None:
    found = [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]
    assert [one["world"] for one in found] == [2, 2]
    assert sorted(found[0]["rows"] + found[1]["rows"]) == list(range(30)) and all(one["rows"] for one in found)


@pytest.mark.skipif(shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None, reason="needs torchrun")
@pytest.mark.slow
def test_torchrun_gives_ranks_disjoint_rows(script: list[str]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, *script], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_disjoint(Path(script[-1]))


def test_tasks_of_slurm_get_disjoint_rows(script: list[str]) -> None:
    tasks = [
        subprocess.Popen([sys.executable, *script], env=environment(SLURM_PROCID=str(rank), SLURM_NTASKS="2"))
        for rank in range(2)
    ]
    assert [task.wait(timeout=300) for task in tasks] == [0, 0]
    assert_disjoint(Path(script[-1]))
