"""Checks and set-up of several ranks that train one model together."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from castor.checkpoint import make_resumable
from castor.checkpoint.dataloader import RankSampler
from castor.config import GeminiConfig
from castor.config.names import StateFormat
from castor.distributed import ParallelGroups
from castor.plugins.machine import check_gpus
from castor.runtime.process_groups import own_groups
from castor.runtime.ranks import describe_parameters, name_of_node, warn_of_neighbours
from castor.runtime.rules import FusedRule

# --- Checks the ZeRO stage that ranks run (Rajbhandari et al. 2020, section 5) --------------------


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


# --- Checks and set-up of several ranks that train one model together -----------------------------


def join_ranks(
    groups: ParallelGroups,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    config: GeminiConfig,
    *,
    state_format: StateFormat,
    seed: int,
    held: Collection[Any] | None,
) -> None:
    """Checks that all ranks have been given the same model and the same settings.

    Collective: every rank calls it.

    Args:
        groups: Process groups of the ranks.
        model: Full model to be boosted.
        optimizers: Optimizers to be boosted with it.
        config: Settings of the plugin.
        state_format: Chosen format of the optimizer state.
        seed: Chosen seed of the stochastic rounding.
        held: Parameters that the optimizers update; None: there is no optimizer.

    Raises:
        NotImplementedError: The settings ask for something castor does not do on several ranks.
        UsageError: Two ranks differ, or compute on one GPU that has no room for both.
    """
    if not groups.groups:
        return
    settings = {
        name: getattr(config, name)
        for name in ("precision", "max_norm", "nonfinite", "chunk_bytes", "overlap",
                     "zero_stage", "extra_dp_size", "reduction", "reduce_on",
                     "gather_embeddings", "gather_experts", "loss_scaler")
    }  # fmt: skip
    device = torch.device(config.device)
    facts = {
        **describe_parameters(model),
        **settings,
        "keep_fp32": [str(kept) for kept in config.keep_fp32],
        "device": device.type,
        "optim_state_format": state_format,
        "seed": seed,
        **describe_optimizers(model, optimizers),
    }
    size = here = 1
    for group in groups.groups:
        names = group.check_equal(facts, extra=name_of_node())
        size *= group.size
        here *= names.count(name_of_node())
    _check_supported(model, config, held, size)
    warn_of_neighbours(here, stacklevel=4)
    check_gpus(groups, device, config.device_bytes, stacklevel=4)


def loader_of_rank(
    dataset: Any,
    place: tuple[int, int],
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    drop_last: bool,
    **options: Any,
) -> DataLoader[Any]:
    """Returns a loader of one rank's shard of the data; see GeminiPlugin.prepare_dataloader.

    Args:
        dataset: Dataset with a length.
        place: (number of the shard, number of shards).
        batch_size: Number of samples of one rank's batch.
        shuffle: Whether samples come in random order.
        seed: Seed of that order.
        drop_last: Whether samples that fill no batch on every rank are left out.
        **options: Further arguments of DataLoader.

    Raises:
        TypeError: The dataset has no length, or the options have a sampler.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"prepare_dataloader shards datasets with a length, and a {type(dataset).__name__} "
            "has none: let it yield this rank's samples (torch.distributed.get_rank()), as many on "
            "every rank, and give it to a DataLoader of your own"
        )
    if given := sorted(options.keys() & {"sampler", "batch_sampler"}):
        raise TypeError(
            f"prepare_dataloader shards the samples itself, and was given {given[0]}=: leave it "
            "out (shuffle, seed and drop_last say the order), or use a DataLoader of your own"
        )
    rank, size = place
    sampler = RankSampler(
        dataset, num_replicas=size, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **options
    )
    make_resumable(loader)
    return loader


def describe_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Returns facts that must be equal on every rank, by their names in messages."""
    names = {param: name for name, param in model.named_parameters()}
    groups = [  # numbers and flags of each group, and its number of parameters
        {
            name: len(value) if name == "params" else value
            for name, value in group.items()
            if name == "params" or isinstance(value, int | float | tuple | None)
        }
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    held = [
        [sorted(names.get(param, "?") for param in group["params"]) for group in one.param_groups]
        for one in optimizers
    ]
    return {
        "the optimizer": ", ".join(type(one).__name__ for one in optimizers),
        "the optimizer's param_groups": groups,
        "which parameters the optimizer's param_groups hold": [
            [
                f"{len(group)} from {group[0]}, {_digest(group)}" if group else "none"
                for group in one
            ]
            for one in held
        ],
    }


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]


def _check_supported(
    model: nn.Module, config: GeminiConfig, held: Collection[Any] | None, size: int
) -> None:
    if config.overlap == "backward":
        raise NotImplementedError(
            f"overlap='backward' updates chunks before {size} ranks have reduced their "
            "gradients; pass overlap='forward'"
        )
    unheld = [
        name
        for name, param in model.named_parameters()
        if held is not None and param.requires_grad and param not in held
    ]
    if unheld:
        raise NotImplementedError(
            f"the optimizer does not hold parameter '{unheld[0]}' and {len(unheld) - 1} others, "
            f"whose gradients {size} ranks would not reduce: add them to it, or freeze "
            "them with requires_grad_(False)"
        )
