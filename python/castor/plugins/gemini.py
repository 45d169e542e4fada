"""Chunk-based heterogeneous memory (Colossal-AI's Gemini; PatrickStar, Fang et al. 2021)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from castor.activations import Blocks, fit_fused_heads, output_embedding
from castor.activations.tight import StepSimulator
from castor.config import GeminiArguments
from castor.config.declared import documented
from castor.distributed import ParallelGroups, data_rank_and_size
from castor.errors import OutOfMemoryError
from castor.optim.boosted import boost_optimizer
from castor.optim.boosted_state import choose_state_format
from castor.optim.rules import check_optimizers, optimizer_params, rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.plugins.arguments import resolved, size_of, takes, with_nvme_of
from castor.plugins.budgets import LockedPages, budgets_of, find_locked_pages, locked_pages_of
from castor.plugins.data_parallel import group_of_reads, join_ranks, loader_of_rank
from castor.plugins.engine_settings import engine_settings
from castor.plugins.machine import choose_budgets, choose_device, warn_of_budgets
from castor.plugins.parallelize import ParallelConfig
from castor.runtime.boosted_model import check_fit_for_chunks
from castor.runtime.engine import WORKING_DTYPES, Engine
from castor.runtime.hooks import ModuleHook
from castor.runtime.tensor_types import tensor_types, warn_of_default_precision


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
        groups = groups.connect_devices(torch.device(config.device), config.reduction)
        # Before the model is divided; throws where the device has no room for communicators.
        budgets_of(self, self.config).take_communicators(groups.communicator_bytes)
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
