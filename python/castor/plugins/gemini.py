"""Chunk-based heterogeneous memory (Colossal-AI's Gemini; PatrickStar, Fang et al. 2021)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from castor import _C
from castor.activations import Blocks, fit_fused_heads, output_embedding
from castor.activations.tight import StepSimulator
from castor.config import GeminiArguments, GeminiConfig, offloads
from castor.config.declared import documented
from castor.config.names import SCALAR_TYPES, GatherExperts, StateFormat
from castor.config.settings import SHARE_OF_REDUCTION, first_update_fraction
from castor.distributed import ParallelGroups, data_rank_and_size
from castor.errors import IoError, OutOfMemoryError
from castor.optim.boosted import boost_optimizer
from castor.optim.boosted_state import choose_state_format
from castor.optim.rules import check_optimizers, optimizer_params, rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.plugins.arguments import resolved, size_of, takes, with_nvme_of
from castor.plugins.budgets import (
    LockedPages,
    budgets_of,
    find_locked_pages,
    locked_pages_of,
    nvme_bytes,
)
from castor.plugins.data_parallel import group_of_reads, join_ranks, loader_of_rank
from castor.plugins.machine import choose_budgets, choose_device, warn_of_budgets
from castor.plugins.parallelize import ParallelConfig
from castor.runtime.boosted_model import check_fit_for_chunks
from castor.runtime.engine import WORKING_DTYPES, Engine, EngineSettings
from castor.runtime.hooks import ModuleHook
from castor.runtime.rules import FusedRule
from castor.runtime.tensor_types import tensor_types, warn_of_default_precision

# --- Translates GeminiPlugin's settings for the runtime -------------------------------------------


def _of_rank(directory: Path, groups: ParallelGroups) -> Path:
    """Returns the directory of this rank's scratch file, and makes it; each rank has its own."""
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
    """Returns the engine's gather_experts."""
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
        reduces_on_host=groups.reduces_on_host,
        device_link=groups.device_backend.name if groups.device_backend else "",
        communicator_bytes=groups.communicator_bytes,
        communicators=communicators,
        locked_limit_bytes=locked.limit if locked else 0,
    )


# --- Chunk-based heterogeneous memory (Colossal-AI's Gemini; PatrickStar, Fang et al. 2021) -------


@documented(GeminiArguments)
class GeminiPlugin:
    """Trains a model inside a device budget smaller than the model itself.

    All arguments are keyword-only. Names follow Colossal-AI's GeminiPlugin where it has them.

    Args:
        **arguments: The fields of castor.config.GeminiArguments, by name.
        **not_yet: Arguments of later versions and of Colossal-AI's plugin, accepted at the value
            that asks for nothing.

    Raises:
        ValueError: A value is out of range, or two contradict each other.
        TypeError: A value has the wrong type, or an argument does not exist.
        NotImplementedError: An argument asks for something this version lacks; the message names
            it.
        UsageError: There is no such GPU, or torch has no CUDA.
        ImportError: castor was built without its GPU parts.
    """

    _parallel_config = ParallelConfig()
    """Division of the model among ranks."""

    @takes(GeminiArguments)
    def __init__(self, arguments: GeminiArguments) -> None:
        self._resolve(arguments)

    def _resolve(self, arguments: GeminiArguments) -> None:
        """Makes the settings of arguments on this machine."""
        self.arguments = arguments
        placed = self._place(
            arguments.device,
            size_of(arguments, "device_memory"),
            size_of(arguments, "host_memory"),
        )
        self.config = resolved(arguments, *placed)
        self._chooses_overlap = arguments.overlap is None
        self._chooses_precision = arguments.precision is None

    def _place(
        self, device: str | torch.device | None, device_bytes: int | None, host_bytes: int | None
    ) -> tuple[torch.device, int, int]:
        """Chooses the device and the budgets of device and host on this machine."""
        chosen = choose_device(device)
        return chosen, *choose_budgets(chosen, device_bytes, host_bytes)

    @property
    def scales_loss(self) -> bool:
        """Whether the precision needs a loss scale."""
        return self.config.precision == "fp16"

    def prepare_dataloader(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """Returns a loader of this rank's shard of `dataset`; one process alone loads all of it.

        The loader is as long on every rank, and checkpoints keep its position. Call
        `loader.sampler.set_epoch(epoch)` for another order in each epoch.

        Args:
            dataset: Dataset with a length.
            batch_size: Number of samples of one rank's batch.
            shuffle: Whether samples come in random order.
            seed: Seed of that order.
            drop_last: Whether samples that fill no batch on every rank are left out.
            **options: Further arguments of DataLoader.

        Raises:
            TypeError: The dataset has no length, or a sampler was given.
        """
        options |= {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        place = data_rank_and_size(self._parallel_config.dims)
        return loader_of_rank(dataset, place, batch_size=batch_size, **options)

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Engine:
        """Takes model and optimizers over, in place. Booster.boost calls it.

        Raises:
            UsageError: The model or an optimizer cannot be boosted. tile_logits is not "auto" and
                the model has no logits that castor can compute in tiles. keep_fp32 has an entry
                that matches nothing in the model. Or the ranks were given different models or
                settings. Model and optimizers are unchanged.
            OutOfMemoryError: A budget is too small; model and optimizers are unchanged.
            NotImplementedError: An optimizer is not supported in this precision, or a setting is
                not supported with several optimizers or ranks.
            ValueError: HybridAdam's optim_state_format, seed or nvme_offload_dir contradicts the
                plugin's, the precision does not have the format, or extra_dp_size does not divide
                the ranks.
            IoError: The NVMe tier's files cannot be made; model and optimizer are unchanged.
        """
        check_fit_for_chunks(model)
        rules = rules_of(optimizers)
        rule = next((one for one in rules if one), None)
        choice = choose_state_format(optimizers, self.config, rule)
        head = output_embedding(model, self.config.tile_logits)
        blocks = Blocks(model, self.config)
        config = with_nvme_of(self.config, optimizers)
        if self._chooses_overlap and (None in rules or len(rules) > 1):
            config = replace(config, overlap="none")
        check_optimizers(optimizers, rules, config)
        held = optimizer_params(model, optimizers, rules) if optimizers else None
        warn_of_budgets(
            torch.device(config.device), config.device_bytes, config.host_bytes, stacklevel=3
        )
        if self._chooses_precision:
            working = WORKING_DTYPES[config.precision]
            warn_of_default_precision(model, config.precision, working, stacklevel=3)
        types = tensor_types(
            *(model, WORKING_DTYPES[config.precision], config.keep_fp32),
            in_stages=self._parallel_config.dims.pp > 1,
        )
        groups = ParallelGroups.make(self._parallel_config.dims)
        join_ranks(
            *(groups, model, optimizers, config),
            state_format=choice.state_format, seed=choice.seed, held=held,
        )  # fmt: skip
        groups = groups.connect_devices(
            torch.device(config.device),
            config.reduction,
            reduce_on=config.reduce_on,
            most_reduction_bytes=config.device_bytes // SHARE_OF_REDUCTION,
        )
        # Before the model is divided; throws where the device has no room for communicators.
        budgets_of(self, self.config).take_communicators(
            groups.communicator_bytes + (groups.sums.least_budget if groups.sums else 0)
        )
        reads = group_of_reads(config, rules, groups)
        parallelized = self._parallel_config.parallelize(
            model, optimizers, groups, state_format=choice.state_format
        )

        def take_over(locked: LockedPages | None) -> Engine:
            budgets = budgets_of(self, self.config)
            settings = engine_settings(
                config,
                rule=rule,
                state_format=choice.state_format,
                groups=groups,
                budgets=budgets,
                communicators=budgets.take_communicators(groups.communicator_bytes),
                reads=reads,
                locked=locked,
            )
            return Engine(model, settings, updated=held, types=types)

        try:
            engine = take_over(locked_pages_of(self))
        except OutOfMemoryError as error:
            locked = find_locked_pages(self, config, groups, error, stacklevel=3)
            if locked is None:
                raise
            engine = take_over(locked)
        parallelized.start(engine)
        blocks.apply(
            model,
            engine,
            _simulated_steps if parallelized.unsharded else None,
            parallelized.sharing,
        )
        if head is not None and head in engine.positions:  # else another stage has it
            parallelized.defer_logits(engine, head, config)
        if self.config.tile_logits is not False:
            fit_fused_heads()
        model_step = ModelStep(engine, config, optimizers, own=None in rules, seed=choice.seed)
        for i, (optimizer, its_rule) in enumerate(zip(optimizers, rules, strict=True)):
            position = i if len(optimizers) > 1 else None
            driver = StepDriver(optimizer, model_step, rule=its_rule, position=position)
            boost_optimizer(optimizer, driver)
            if self.config.overlap == "backward":
                model.register_forward_pre_hook(ModuleHook(_arm, driver, weakref.ref(optimizer)))
        return engine


def _simulated_steps(*arguments: Any, **options: Any) -> StepSimulator:
    """Makes simulated steps of a model; training that needs none imports no castor.estimate."""
    from castor.estimate.boosted import SimulatedSteps

    return SimulatedSteps(*arguments, **options)


def _arm(driver: StepDriver, held: weakref.ref[Optimizer], *_: Any) -> None:
    """Lets the coming backward update chunks; a forward pre-hook of the model."""
    if torch.is_grad_enabled() and (optimizer := held()) is not None:
        driver.arm(optimizer)
