"""Chunk-based heterogeneous memory (Colossal-AI's Gemini; PatrickStar, Fang et al. 2021)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from castor.activations import Blocks, fit_fused_heads, output_embedding
from castor.activations.tight import StepSimulator
from castor.config import (
    Activations,
    GeminiConfig,
    LossScalerConfig,
    NonFinite,
    Overlap,
    PlacementPolicy,
    Precision,
    StateFormat,
    TileLogits,
    ZeroStage,
    check_fraction,
    parse_bandwidth,
    parse_bytes,
    parse_paths,
)
from castor.distributed import data_rank_and_size
from castor.optim.boosted import boost_optimizer
from castor.optim.boosted_state import choose_state_format
from castor.optim.check_optimizers import check_optimizers
from castor.optim.optimizer_params import optimizer_params
from castor.optim.rules import rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.plugins.arguments import checked_names, policy_of, with_nvme_of
from castor.plugins.budgets import budgets_of
from castor.plugins.data_parallel import join_ranks, loader_of_rank
from castor.plugins.engine_settings import engine_settings
from castor.plugins.machine import choose_budgets, choose_device, warn_of_budgets
from castor.plugins.not_yet import check_not_yet
from castor.plugins.parallelize import ParallelConfig
from castor.plugins.zero_stage import group_of_reads
from castor.runtime.boosted_model import check_fit_for_chunks
from castor.runtime.engine import WORKING_DTYPES, Engine
from castor.runtime.hooks import ModuleHook
from castor.runtime.tensor_types import tensor_types, warn_of_default_precision


class GeminiPlugin:
    """Trains a model inside a device budget smaller than the model itself.

    All arguments are keyword-only. Names follow Colossal-AI's GeminiPlugin where it has them.

    Args:
        placement_policy: "auto" keeps on the device what fits by the trace of the first steps:
            chunks with their optimizer state, where memory is spare. "cpu" streams all chunks,
            "cuda" keeps all of them on the device, and "static" places them by the offload
            fractions. Default: "auto".
        tensor_placement_policy: Older name of placement_policy.
        device: Device that the model computes on: "cuda", "cuda:1" or "cpu". Default: "cuda" when
            there is a GPU, else "cpu". On several ranks "cuda" is the GPU that the launcher's
            LOCAL_RANK names, and torch's current device from then on. Build the model on the CPU:
            boost moves its parameters and buffers, and each forward moves its inputs.
        device_memory: Device budget of all models boosted with the plugin: bytes, or a size such as
            "24GiB". On a GPU all memory that torch allocates counts, and
            torch.cuda.set_per_process_memory_fraction applies too; the default is 95% of what is
            free or cached by torch. On the CPU device the default is a quarter of the usable
            memory, or what host_memory leaves of it, and at least an eighth. Usable is the memory
            available now to the machine and to each cgroup around this process, less a tenth (384
            MiB to 8 GiB) for the process itself.
        host_memory: Budget of the host tier, in bytes or as a size; on a GPU it is page-locked.
            Default: the usable memory. Beside the CPU device the default is three quarters of it,
            or what device_memory leaves, and at least an eighth. Budgets above the memory of the
            machine or cgroup are accepted with a RuntimeWarning at boost.
        precision: "fp32", "bf16" or "fp16" (with a dynamic loss scale). The 16-bit precisions keep
            exact fp32 master weights. Default: "fp32" on the CPU, "bf16" on CUDA, with a
            RuntimeWarning at boost for a model in another 16-bit type. Parameters and persistent
            floating-point buffers are converted, with three exceptions that stay float32: tensors
            that `from_pretrained(dtype=...)` of transformers keeps so (routers, correction biases,
            sinks), float32 tensors of a model that is 16-bit already, and keep_fp32.
        keep_fp32: Further tensors that stay float32, and train so, in a 16-bit precision. Entries
            are patterns of names of parameters, buffers or modules, such as ``"*.gate"``, or
            classes of modules. A module stands for all tensors in it. Its forward has to take
            inputs of the precision, as in plain PyTorch.
        max_norm: L2 norm to which step clips gradients; 0: no clipping.
        norm_type: Only 2.0.
        nonfinite: Reaction of step to NaN and infinite gradients: "skip" leaves the update out,
            counts it and warns once; "raise" raises; "ignore" updates as plain torch does. fp16
            always skips.
        chunk_bytes: Size of a chunk: bytes or a size. Default: found by search.
        max_prefetch: Number of chunks that may be fetched ahead of their use.
        enable_gradient_accumulation: False promises that step follows every backward, which
            overlap="backward" needs. It changes nothing else: with either value gradients
            accumulate until zero_grad, as in torch.
        shard_param_frac: Share of parameters sharded over ranks, in [0, 1]. This version checks the
            value and does not use it; see zero_stage.
        offload_optim_frac: With "static": share of the optimizer state, with gradients, on the
            host.
        offload_param_frac: With "static": share of parameters that stream; needs
            offload_optim_frac=1.0.
        warmup_non_model_data_ratio: Share of the device budget that chunks leave free before
            there is a trace.
        steady_cuda_cap_ratio: Share of the device budget that plans use. Default 1.0: accounting is
            exact.
        gpu_margin_mem_ratio: With "auto": share, in [0, 1], of the device memory that activations
            and temporaries leave free after the first steps. Resident chunks, with their gradients
            and optimizer states, may take this share. 0.0: all chunks stay on the host. Default: as
            much as makes nothing else wait.
        gather_embeddings: Whether weights of nn.Embedding modules stay in host memory, where
            forward reads the rows that it looks up; a GPU reads them over its link. The other rows
            then need no device memory and no copy. This pays where a batch has far fewer tokens
            than the vocabulary. A weight tied to another module comes to the device for that
            module. Same bits. For "auto" and "cpu".
        tile_logits: Whether losses of the output embedding's logits are computed in tiles of rows,
            forward and backward, so that the full logits are never in memory. Such losses are
            cross-entropy, and others of single rows (log-probabilities, entropies); other uses of
            the logits get their values. True, False, or the most rows of a tile. "auto": where
            tiles save at least 1 MiB and 1/16 of device_memory. One tile gives the bits of plain
            PyTorch. With more, the loss and the output embedding's gradient are sums in another
            order.
        activations: Treatment of the tensors that the model's blocks save for backward. "keep":
            they stay, except where the model's own gradient checkpointing drops them. "recompute":
            backward computes them again. "offload": they wait in host memory. "recompute:mlp" and
            "offload:mlp" do so for the MLP of each block only. "auto": as many blocks keep theirs
            as a profile of the first step says is fastest in device_memory; the others are
            recomputed, or offloaded as far as host_memory has room. A mapping from patterns of
            block names takes all but "auto", for instance {"model.layers.*": "recompute",
            "model.layers.0": "keep"}; the last pattern that matches counts. All of these give plain
            PyTorch's bits. "tile:4" runs the MLP of each block, forward and backward, on a quarter
            of the rows at a time, and "recompute+tile:4" recomputes the rest of the block as well:
            the same arithmetic, with gradients of weights that are sums in another order. Default:
            "auto" where device_memory is given, else "keep". The default leaves a block alone where
            an explicit "auto" raises: the block is compiled, writes a buffer, is passed a filled
            cache or has hooks of the user's within. It also does nothing while all fits with ease,
            and where the model's own gradient checkpointing is on.
        initial_scale: fp16: loss scale at the start.
        min_scale: fp16: lowest loss scale.
        growth_factor: fp16: growth of the loss scale.
        backoff_factor: fp16: reduction of the loss scale on overflow.
        growth_interval: fp16: good steps before growth.
        hysteresis: fp16: overflows before reduction.
        max_scale: fp16: highest loss scale.
        overlap: Time at which a fused optimizer updates the chunks. "none": inside step. "forward":
            beside the work that follows step; the modules of the next forward, and any other reader
            of a weight, wait for the chunks they need. "backward": as "forward", and chunks whose
            gradients are complete are updated while backward goes on. The update may then not
            depend on what step learns, so "backward" needs max_norm=0, nonfinite="ignore", no fp16
            and enable_gradient_accumulation=False. All give the same bits. Default: "forward" on a
            GPU where one fused optimizer holds all parameters, else "none": the CPU device needs
            its cores for the model.
        pin_memory: True requires page-locked host storage and needs a GPU. The value changes
            nothing else: host storage is always page-locked on a GPU, and never on the CPU device.
        link_bandwidth: CPU device: bandwidth of an emulated link, to try what a GPU's link would
            do: bytes per second, or "25GB/s". Parameters pass it on their way to the device and
            back, beside the compute. Default: memory's own speed.
        trace_file: Trace written by Booster.save_trace; with it the first step runs by plan.
        optim_state_format: Format of Adam's state: "fp32", or with precision="bf16" "split",
            "split_bf16" or "split_int8". They take 12, 10, 6 or 4 bytes a parameter beside weight
            and gradient. SGD and Lion have the first two, and keep less. "split" takes the same
            steps as "fp32" bit for bit. Default: HybridAdam's, or else "split" for bf16, else
            "fp32".
        seed: Seed of the stochastic rounding in "split_bf16" and "split_int8"; the same seed gives
            the same bits. Default: HybridAdam's, or else 0.
        nvme_path: Directory on an NVMe device, or several on different ones, for optimizer state
            that the host has no room for. Each gets a preallocated file, removed at the end.
            Default: HybridAdam's, or else no NVMe tier.
        nvme_memory: NVMe budget: bytes or a size. Default: what the disks have. A given budget is
            taken in full at boost with activations="auto" or "offload": it then also holds
            activations that host_memory has no room for.
        nvme_offload_fraction: Least share of the optimizer state on NVMe, in [0, 1]. Default:
            HybridAdam's, or else what does not fit host_memory.
        nvme_verify: Whether reads from NVMe are compared with checksums of what was written.
        zero_stage: Least ZeRO stage of several ranks, which shard with 1: masters and optimizer
            states; 2: gradients too; 3: weights too. "auto" takes the stage that costs no exchange:
            3 where ranks share memory, and so have one copy of weights and gradients, and 1
            elsewhere. Stage 2 between ranks that share no memory keeps a rank's shard of every
            chunk's gradients in host_memory. A chunk's full gradients are there until all ranks
            have theirs, and while p.grad is read. Stage 3 also shards the weights: a rank reads the
            other shards when it needs the chunk, through a window of four chunks, and weights
            change in step and in loads alone. report().zero_stage is the stage that runs.
        extra_dp_size: Number of replicas of the weights that n ranks keep with zero_stage=3 where
            they share no memory (HSDP). Each replica is sharded over n / extra_dp_size neighbouring
            ranks, and a rank reads from its neighbours alone. It keeps extra_dp_size / n of the
            weights in host_memory. Gradients and optimizer states stay sharded over all ranks. Same
            bits. Ranks that share memory keep one replica on each machine; the number of machines
            is accepted there.
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

    def __init__(
        self,
        *,
        placement_policy: str | None = None,
        tensor_placement_policy: str | None = None,
        device: str | torch.device | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        precision: str | None = None,
        keep_fp32: Sequence[str | type[nn.Module]] = (),
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        nonfinite: str = "skip",
        chunk_bytes: int | str | None = None,
        max_prefetch: int = 1,
        enable_gradient_accumulation: bool = True,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float | None = None,
        offload_param_frac: float | None = None,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 1.0,
        gpu_margin_mem_ratio: float | None = None,
        gather_embeddings: bool = False,
        tile_logits: TileLogits = "auto",
        activations: Activations | None = None,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        overlap: str | None = None,
        pin_memory: bool = False,
        link_bandwidth: int | str | None = None,
        trace_file: str | Path | None = None,
        optim_state_format: str | None = None,
        seed: int | None = None,
        nvme_path: str | Path | Sequence[str | Path] | None = None,
        nvme_memory: int | str | None = None,
        nvme_offload_fraction: float | None = None,
        nvme_verify: bool = True,
        zero_stage: ZeroStage = "auto",
        extra_dp_size: int = 1,
        **not_yet: Any,
    ) -> None:
        check_not_yet(type(self), not_yet)
        chosen, device_bytes, host_bytes = self._place(
            device,
            None if device_memory is None else parse_bytes(device_memory, "device_memory"),
            None if host_memory is None else parse_bytes(host_memory, "host_memory"),
        )
        on_gpu = chosen.type != "cpu"
        if not isinstance(pin_memory, bool):
            raise TypeError(f"pin_memory is {pin_memory!r}; give True or False")
        if pin_memory and not on_gpu:
            raise ValueError("pin_memory=True needs device='cuda'; the CPU device copies nothing")
        if link_bandwidth is not None and on_gpu:
            raise ValueError(
                "link_bandwidth emulates a link on the CPU device, and a GPU has its own; leave it "
                "out, or pass device='cpu'"
            )
        if norm_type != 2.0:
            raise NotImplementedError(f"norm_type={norm_type} is not supported; only 2.0 is")
        if not isinstance(enable_gradient_accumulation, bool):
            raise TypeError(
                f"enable_gradient_accumulation is {enable_gradient_accumulation!r}; give True or "
                "False"
            )
        check_fraction("shard_param_frac", shard_param_frac)
        if trace_file is not None and not isinstance(trace_file, str | Path):
            raise TypeError(f"trace_file is {trace_file!r}; give a path")
        policy = policy_of(placement_policy, tensor_placement_policy)
        if policy != "static" and (
            offload_optim_frac is not None or offload_param_frac is not None
        ):
            raise ValueError(
                "offload_optim_frac and offload_param_frac belong to placement_policy='static'; "
                f"{policy!r} decides by itself"
            )
        if overlap == "backward" and enable_gradient_accumulation:
            raise ValueError(
                "overlap='backward' updates chunks in the first backward of a step; pass "
                "enable_gradient_accumulation=False, or overlap='forward' to accumulate"
            )
        self._chooses_overlap = overlap is None
        self._chooses_precision = precision is None
        self.config = GeminiConfig(
            placement_policy=cast(PlacementPolicy, policy),
            device=str(chosen),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            precision=cast(Precision, precision or ("bf16" if on_gpu else "fp32")),
            keep_fp32=checked_names(keep_fp32),
            overlap=cast(Overlap, overlap or ("forward" if on_gpu else "none")),
            link_bytes_per_second=(
                0 if link_bandwidth is None else parse_bandwidth(link_bandwidth, "link_bandwidth")
            ),
            chunk_bytes=0 if chunk_bytes is None else parse_bytes(chunk_bytes, "chunk_bytes"),
            max_prefetch=max_prefetch,
            offload_optim_frac=offload_optim_frac or 0.0,
            offload_param_frac=offload_param_frac or 0.0,
            warmup_non_model_data_ratio=warmup_non_model_data_ratio,
            steady_cuda_cap_ratio=steady_cuda_cap_ratio,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            gather_embeddings=gather_embeddings,
            tile_logits=tile_logits,
            activations=_activations(activations, device_memory),
            activations_by_default=activations is None,
            max_norm=max_norm,
            nonfinite=cast(NonFinite, nonfinite),
            loss_scaler=LossScalerConfig(
                initial_scale=initial_scale,
                min_scale=min_scale,
                max_scale=max_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                hysteresis=hysteresis,
            ),
            trace_file=Path(trace_file) if trace_file is not None else None,
            optim_state_format=cast("StateFormat | None", optim_state_format),
            seed=seed,
            nvme_paths=parse_paths(nvme_path, "nvme_path"),
            nvme_bytes=None if nvme_memory is None else parse_bytes(nvme_memory, "nvme_memory"),
            nvme_offload_fraction=nvme_offload_fraction,
            nvme_verify=nvme_verify,
            zero_stage=zero_stage,
            extra_dp_size=extra_dp_size,
        )

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
        place = data_rank_and_size(self._parallel_config.ranks, self._parallel_config.experts_alone)
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
        rules = rules_of(optimizers, self.config.device)
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
            in_stages=self._parallel_config.num_ranks_of_stages > 1,
        )
        layout = self._parallel_config.layout()
        join_ranks(
            *(layout, model, optimizers, config),
            state_format=choice.state_format, seed=choice.seed, held=held,
        )  # fmt: skip
        layout = layout.connect_devices(torch.device(config.device))
        budgets = budgets_of(self, self.config)
        communicators = budgets.take_communicators(layout.communicator_bytes)
        reads = group_of_reads(config, rules, layout)
        parallelized = self._parallel_config.parallelize(
            model, optimizers, layout, state_format=choice.state_format
        )
        engine = Engine(
            model,
            engine_settings(
                config,
                rule=rule,
                state_format=choice.state_format,
                layout=layout,
                budgets=budgets,
                communicators=communicators,
                reads=reads,
            ),
            updated=held,
            types=types,
        )
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


def _activations(asked: Activations | None, device_memory: int | str | None) -> Activations:
    """Returns the treatment of activations: by default "auto" where a device budget is given."""
    if asked is not None:
        return asked
    return "keep" if device_memory is None else "auto"


def _simulated_steps(*arguments: Any, **options: Any) -> StepSimulator:
    """Makes simulated steps of a model; training that needs none imports no castor.estimate."""
    from castor.estimate.boosted import SimulatedSteps

    return SimulatedSteps(*arguments, **options)


def _arm(driver: StepDriver, held: weakref.ref[Optimizer], *_: Any) -> None:
    """Lets the coming backward update chunks; a forward pre-hook of the model."""
    if torch.is_grad_enabled() and (optimizer := held()) is not None:
        driver.arm(optimizer)
