"""Checks the ZeRO stage that ranks run (Rajbhandari et al. 2020, section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from castor.config import GeminiConfig
from castor.distributed import ParallelGroups
from castor.runtime.process_groups import own_groups
from castor.runtime.rules import FusedRule


def group_of_reads(
    config: GeminiConfig, rules: Sequence[FusedRule | None], groups: ParallelGroups
) -> str:
    """Returns the process group in which ranks read each other's shards of weights and gradients.

    Collective: every rank calls it.

    Args:
        config: Settings of the plugin, with the zero_stage that was asked for.
        rules: Update rules of the optimizers; None for one that updates the parameters itself.
        groups: Process groups of the ranks.

    Returns:
        Name of the group; "" where ranks need none: zero_stage is "auto" or 1, this process is
        alone, or the model is sharded and all its ranks share memory.

    Raises:
        ValueError: extra_dp_size does not divide the number of ranks.
        NotImplementedError: The ranks cannot run the stage; the message says what to do.
    """
    stage, size, replicas = config.zero_stage, groups.dims.same_shard, config.extra_dp_size
    if size % replicas:
        raise ValueError(
            f"extra_dp_size={replicas} replicas of the model's weights are sharded over as many "
            f"ranks each, of {size} ranks with the same shard of it: start a multiple of "
            f"{replicas} ranks, or give a number that divides {size}"
        )
    if size == 1 or stage in ("auto", 1):
        return ""
    kept = "gradients" if stage == 2 else "weights and gradients"
    if None in rules:
        raise NotImplementedError(
            f"zero_stage={stage} leaves each of {size} ranks its shard of the {kept}, and an "
            "optimizer that castor does not run takes all of them on every rank; use HybridAdam, "
            "torch.optim.AdamW, SGD or Lion, or zero_stage=1"
        )
    (name,) = own_groups(groups.dims.groups("dp"), 1)
    return name
