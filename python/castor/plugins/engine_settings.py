"""Translates GeminiPlugin's settings for the runtime."""

from __future__ import annotations

from pathlib import Path

import torch

from castor import _C
from castor.config import GeminiConfig, offloads
from castor.config.names import SCALAR_TYPES, GatherExperts, StateFormat
from castor.config.settings import first_update_fraction
from castor.distributed import ParallelGroups
from castor.errors import IoError
from castor.plugins.budgets import LockedPages, nvme_bytes
from castor.runtime.engine import EngineSettings
from castor.runtime.rules import FusedRule


def _of_rank(directory: Path, groups: ParallelGroups) -> Path:
    """Returns the directory of this rank's scratch file, and makes it; each rank has its own.

    Raises:
        IoError: The directory cannot be made.
    """
    if not groups.groups:
        return directory
    own = directory / f"rank{groups.rank}"
    try:
        own.mkdir(exist_ok=True)
    except OSError as error:
        what = f"the directory of rank {groups.rank} cannot be made: {error.strerror}"
        raise IoError(error.errno, what, str(own)) from error
    return own


def _gather_experts(config: GeminiConfig, groups: ParallelGroups) -> GatherExperts:
    """Returns the engine's gather_experts.

    Raises:
        NotImplementedError: It is True, and several ranks train the model.
    """
    if config.gather_experts is True and groups.groups:
        raise NotImplementedError(
            "gather_experts=True fetches experts from the host storage of one process, and several "
            "ranks train this model; leave it out"
        )
    alone = not groups.groups and config.placement_policy in ("auto", "cpu")
    return config.gather_experts if alone else False


def engine_settings(
    config: GeminiConfig,
    *,
    rule: FusedRule | None,
    state_format: StateFormat,
    groups: ParallelGroups,
    budgets: _C.SharedBudgets,
    communicators: _C.Reservation,
    reads: str,
    locked: LockedPages | None,
) -> EngineSettings:
    """Makes the settings of the engine.

    Args:
        config: Settings of the plugin; its optim_state_format is the user's, not the chosen one.
        rule: Update rule of the fused optimizer; None: the optimizer's own step updates.
        state_format: Chosen format of masters and of the rule's states.
        groups: Process groups of the ranks; those with the same shard share the model.
        budgets: Budgets of the model, shared with the plugin's other models (budgets_of).
        communicators: Reservation of groups.communicator_bytes, which the engine keeps.
        reads: Process group that group_of_reads returns.
        locked: Division of host memory where the system page-locks less than its budget.
    """
    if locked:
        config = locked.divide(config)
    pageable = locked.pageable if locked else 0
    margin = config.gpu_margin_mem_ratio
    nvme = _C.NvmeOptions(
        directories=[str(_of_rank(path, groups)) for path in config.nvme_paths],
        in_memory=pageable > 0,
        budget_bytes=pageable or nvme_bytes(config),
        verify=config.nvme_verify and not pageable,
        # boost reserves this space, so only a given budget counts, never all of the disks.
        holds_activations=(
            config.nvme_bytes is not None
            and offloads(config.activations)
            and not config.activations_by_default
        ),
    )
    session = _C.SessionOptions(
        precision=SCALAR_TYPES[config.precision],
        chunk_bytes=config.chunk_bytes,
        placement=_C.PlacementOptions(
            policy=config.placement_policy,
            offload_optim_frac=config.offload_optim_frac,
            offload_param_frac=config.offload_param_frac,
        ),
        runtime=_C.RuntimeOptions(
            max_prefetch=config.max_prefetch,
            warmup_nonmodel_ratio=config.warmup_non_model_data_ratio,
            steady_cap_ratio=config.steady_cuda_cap_ratio,
            margin_ratio=1.0 if margin is None else margin,
        ),
        budgets=budgets,
        state=_C.StateOptions(
            state_format=state_format,
            rule=rule.name if rule else None,
            nvme=nvme if config.nvme_paths or pageable else None,
            nvme_fraction=config.nvme_offload_fraction or 0.0,
            device_fraction=first_update_fraction(config.device_update_fraction) if rule else 0.0,
            device_fraction_adapts=config.device_update_fraction == "auto" and rule is not None,
        ),
        overlap=config.overlap if rule else "none",
        num_threads=groups.share_of_cores(),
    )
    return EngineSettings(
        session=session,
        precision=config.precision,
        rule=rule,
        device=torch.device(config.device),
        link_bytes_per_second=config.link_bytes_per_second,
        gather_embeddings=config.gather_embeddings,
        gather_experts=_gather_experts(config, groups),
        trace_file=None if config.trace_file is None else Path(config.trace_file),
        nvme_directory=config.nvme_paths[0] if config.nvme_paths else None,
        ranks=groups.dp,
        data_shards=groups.dims.dp,
        reads=reads,
        zero_stage=0 if config.zero_stage == "auto" else config.zero_stage,
        extra_dp_size=config.extra_dp_size if groups.dp else 1,
        reduction=config.reduction if groups.groups else "",
        sums=groups.sums,
        device_link=groups.device_backend.name if groups.device_backend else "",
        communicator_bytes=groups.communicator_bytes,
        communicators=communicators,
        locked_limit_bytes=locked.limit if locked else 0,
    )
