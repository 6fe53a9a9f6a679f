"""Reads rank and world size from the launcher: torch's process group, torchrun or accelerate, Slurm."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from penstock.errors import UsageError


class Ranks(NamedTuple):
    """Rank and world size of this process, and the launcher that set them."""

    rank: int
    world_size: int
    said_by: str
    is_outer: bool = False  # True for Slurm, which counts tasks rather than the processes they start


def launched() -> Ranks | None:
    """Returns this process's rank and world size, or None without a launcher.

    The innermost launcher decides: inside a Slurm task, torchrun may start several processes. Any other disagreement is
    an error, because processes with wrong ranks would take the same rows.
    """
    slurm = _named("SLURM_PROCID", "SLURM_NTASKS", is_outer=True)
    inner = [found for found in (_process_group(), _named("RANK", "WORLD_SIZE")) if found is not None]
    if len(inner) == 2 and inner[0][:2] != inner[1][:2]:
        raise _contradiction(*inner)
    if inner and slurm is not None and inner[0].world_size % slurm.world_size:
        raise _contradiction(inner[0], slurm)
    return inner[0] if inner else slurm


def _process_group() -> Ranks | None:
    """Returns the ranks of torch's process group if it is initialized; never imports torch."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return Ranks(distributed.get_rank(), distributed.get_world_size(), "torch.distributed")


def _named(rank_name: str, size_name: str, *, is_outer: bool = False) -> Ranks | None:
    rank, size = os.environ.get(rank_name, ""), os.environ.get(size_name, "")
    if not rank.isdigit() or not size.isdigit():
        return None
    if int(rank) >= int(size):
        raise UsageError(f"{rank_name}={rank} and {size_name}={size}: ranks count from 0 to {size_name} - 1.")
    return Ranks(int(rank), int(size), f"{rank_name} and {size_name}", is_outer)


def _contradiction(one: Ranks, other: Ranks) -> UsageError:
    says = [f"{found.said_by} say rank {found.rank} of {found.world_size}" for found in (one, other)]
    return UsageError(f"{says[0]}, {says[1]}. Give rank and world_size, or unset what is wrong.")
