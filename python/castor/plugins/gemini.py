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
from castor.estimate.boosted import SimulatedSteps
from castor.optim.boosted import boost_optimizer
from castor.optim.boosted_state import choose_state_format
from castor.optim.check_optimizers import check_optimizers
from castor.optim.held_params import held_params
from castor.optim.rules import rules_of
from castor.optim.step_driver import ModelStep, StepDriver
from castor.plugins.arguments import checked_names, policy_of, with_nvme_of
from castor.plugins.budgets import budgets_of
from castor.plugins.data_parallel import join_ranks, loader_of_rank
from castor.plugins.divide import Division
from castor.plugins.engine_settings import engine_settings
from castor.plugins.machine import choose_budgets, choose_device, warn_of_budgets
from castor.plugins.not_yet import check_not_yet
from castor.plugins.zero_stage import group_of_reads
from castor.runtime.boosted_model import check_fit_for_chunks
from castor.runtime.engine import WORKING_DTYPES, Engine
from castor.runtime.hooks import ModuleHook
from castor.runtime.tensor_types import tensor_types, warn_of_default_precision


class GeminiPlugin:
    """Trains a model inside a device budget smaller than itself.

    All arguments are keyword-only; names follow Colossal-AI's GeminiPlugin where it has them.

    Args:
        placement_policy: "auto" (keep on the device what the trace of the first steps says fits:
            whole chunks, optimizer state included, where memory is spare), "cpu" (stream
            everything), "cuda" (all on the device) or "static" (by the fractions).
        tensor_placement_policy: Older name of the same.
        device: Where the model computes: "cuda", "cuda:1" or "cpu". Default: "cuda" when there is
            one, else "cpu". On several ranks "cuda" is the GPU that the launcher's LOCAL_RANK
            names, and torch's current one from then on. Build the model on the CPU: its parameters
            and buffers are moved, and so are the inputs of each forward.
        device_memory: Budget of the device, of all models boosted with the plugin: bytes or a size
            such as "24GiB". Default on a GPU: 95% of what is free or cached by torch; there all
            that torch allocates counts, and torch.cuda.set_per_process_memory_fraction too. Default
            of the CPU device: a quarter of the memory that castor may use, or what host_memory
            leaves of it and an eighth at least. That is what is available now, to the machine and
            each cgroup around this process, less a tenth (384 MiB to 8 GiB) for itself.
        host_memory: As that, of the host tier; on a GPU it is page-locked. Default: the memory that
            castor may use; beside the CPU device three quarters of it, or what device_memory leaves
            and an eighth at least. Budgets above what machine or cgroup have are taken with a
            RuntimeWarning at boost.
        precision: "fp32", "bf16" or "fp16" (with a dynamic loss scale); the 16-bit ones keep exact
            fp32 master weights. Default: "fp32" on the CPU, "bf16" on CUDA, with a RuntimeWarning
            at boost for a model in another 16-bit type. Parameters are
            converted, and persistent floating-point buffers with them, but for what stays float32:
            what `from_pretrained(dtype=...)` of transformers keeps so (routers, correction biases,
            sinks), what a model that is 16-bit already has in float32, and keep_fp32.
        keep_fp32: What else stays float32 in a 16-bit precision, and trains so: patterns of names
            of parameters, buffers or modules, such as ``"*.gate"`` (a module stands for all in it),
            or classes of modules. Their forward has to take inputs of the precision, as in plain
            PyTorch.
        max_norm: Gradients are clipped to this L2 norm inside step; 0: not at all.
        norm_type: Only 2.0.
        nonfinite: What step does about NaN and infinite gradients: "skip" the update, count it and
            warn once; "raise"; or "ignore" them as plain torch does. fp16 always skips.
        chunk_bytes: Size of a chunk: bytes or a size. Default: found by search.
        max_prefetch: Chunks that may be fetched ahead of their use.
        enable_gradient_accumulation: False: every backward is followed by step, which
            overlap="backward" needs; nothing else follows from it: gradients accumulate until
            zero_grad, as in torch, with either value.
        shard_param_frac: Share of parameters sharded over ranks, in [0, 1]. Every rank keeps all of
            them in this version, whatever is given.
        offload_optim_frac: "static": share of the optimizer state, with gradients, on the host.
        offload_param_frac: "static": share of parameters that stream; needs
            offload_optim_frac=1.0.
        warmup_non_model_data_ratio: Share of the device budget that chunks leave free before
            there is a trace.
        steady_cuda_cap_ratio: Share of the device budget that plans use. Default 1.0: accounting is
            exact.
        gpu_margin_mem_ratio: "auto": share, in [0, 1], of the memory that activations and
            temporaries leave on the device (after the first steps) which chunks with gradients and
            optimizer states may take for good. 0.0: none, they stay on the host. Default: as much
            as makes nothing else wait.
        gather_embeddings: Weights of nn.Embedding modules stay on the host, and forward reads the
            rows that it looks up there, a GPU over its link: no device memory and no copy for the
            other rows. Pays where a batch has far fewer tokens than the vocabulary. A weight tied
            to another module comes to the device for that one. Same bits. For "auto" and "cpu".
        tile_logits: Whether cross-entropy over the output embedding's logits, and other losses of
            their rows (log-probabilities, entropies), compute them in tiles of rows, forward and
            backward, and never hold them all; other uses of the logits get their values. True,
            False, or how many rows a tile has at most. "auto": where that leaves 1 MiB and 1/16 of
            device_memory free. One tile is plain PyTorch's bits; with more, the loss and the output
            embedding's gradient are sums in another order.
        activations: What becomes of what the model's blocks save for backward: "keep" (it stays,
            but for what the model's own gradient checkpointing says), "recompute" (backward
            computes it again), "offload" (it waits in host memory), "auto" (as many blocks keep
            it as a profile of the first step says is fastest in device_memory, and the others
            are recomputed, or offloaded as far as host_memory has room),
            "recompute:mlp" or "offload:mlp" (that part of each block), or a mapping from patterns
            of block names to all but "auto", {"model.layers.*": "recompute", "model.layers.0":
            "keep"}, of which the last that matches counts. Bits are plain PyTorch's. "tile:4" runs
            the MLP of each block, forward and backward, on a quarter of the rows at a time, and
            "recompute+tile:4" recomputes the rest of the block: the same arithmetic, with gradients
            of weights that are sums in another order. Default: "auto" where device_memory is given,
            "keep" elsewhere. That default leaves a block as it is where "auto" is an error: one
            that is compiled, writes a buffer, is passed a filled cache or has hooks of the user's
            within; where all fits with ease, for as long as it does; and where the model's own
            gradient checkpointing is on.
        initial_scale: fp16: loss scale at the start.
        min_scale: fp16: lowest loss scale.
        growth_factor: fp16: growth of the loss scale.
        backoff_factor: fp16: reduction of the loss scale on overflow.
        growth_interval: fp16: good steps before growth.
        hysteresis: fp16: overflows before reduction.
        max_scale: fp16: highest loss scale.
        overlap: When a fused optimizer updates the chunks. "none": inside step. "forward": beside
            what follows step; the modules of the next forward, and whatever else reads a weight,
            wait for what they need. "backward": as "forward", and chunks whose gradients are
            complete are updated while backward goes on; exact only where nothing that step learns
            decides over the update, so it asks for max_norm=0, nonfinite="ignore", no fp16 and
            enable_gradient_accumulation=False. All give the same bits. Default: "forward" on a GPU
            where one fused optimizer has all, else "none": the CPU device needs its cores for the
            model.
        pin_memory: Homes are page-locked on a GPU, and not on the CPU device, whatever is given;
            True asks for it and needs a GPU.
        link_bandwidth: CPU device: bytes per second, or "25GB/s", of an emulated link that
            parameters pass on their way to the device and back, beside the compute, to try what a
            GPU's link would do. Default: memory's own speed.
        trace_file: A trace written by Booster.save_trace: the first step runs by plan.
        optim_state_format: How Adam's state is kept: "fp32", or with precision="bf16" "split",
            "split_bf16" or "split_int8": 12, 10, 6 or 4 bytes a parameter beside weight and
            gradient; SGD and Lion have the first two, and keep less. "split" takes the same steps
            as "fp32" bit for bit. Default: HybridAdam's, or else "split" for bf16, else "fp32".
        seed: Of the stochastic rounding in "split_bf16" and "split_int8"; the same seed gives the
            same bits. Default: what HybridAdam was given, or else 0.
        nvme_path: A directory on an NVMe device, or several on different ones, for optimizer state
            that the host has no room for. A preallocated file in each, removed at the end. Default:
            what HybridAdam was given, or else no such tier.
        nvme_memory: What may be taken there: bytes or a size. Default: what the disks have. With
            activations="auto", and where they are offloaded by hand, all of it is taken: for those
            that host_memory has no room for.
        nvme_offload_fraction: Share of the optimizer state that goes there at least, in [0, 1].
            Default: what HybridAdam was given, or else what does not fit host_memory.
        nvme_verify: Whether what comes back is compared with checksums of what was written.
        zero_stage: What several ranks keep parts of at least (ZeRO): 1: masters and optimizer
            states; 2: gradients too; 3: weights too. "auto": what costs no exchange: 3 where ranks
            share memory, which have one copy of weights and gradients, and 1 elsewhere. With 2
            elsewhere each rank has its part of every chunk's gradients in host_memory, and all of a
            chunk's until all ranks have theirs, or while p.grad is read. With 3 also of its
            weights, and reads the others' when it needs the chunk, through a window of four chunks;
            weights change in step and in loads alone then. 2 and 3 are for the CPU device.
            report().zero_stage is what runs.
        extra_dp_size: Copies of the weights that n ranks keep with zero_stage=3 where they share no
            memory (HSDP): each is cut over n / extra_dp_size ranks that are neighbours. A rank
            reads of those alone, so that what it needs comes from near ones, and keeps
            extra_dp_size / n of the weights in host_memory. Gradients and optimizer states stay cut
            over all ranks. Same bits. Ranks that share memory keep a copy on each machine: their
            number is accepted there.
        **not_yet: Names of later versions and of Colossal-AI's plugin: accepted at the value that
            asks for nothing.

    Raises:
        ValueError: A value is out of range, or two contradict each other.
        TypeError: A value has the wrong type, or an argument does not exist.
        NotImplementedError: An argument asks for what this version lacks; the message names it.
        UsageError: There is no such GPU, or torch has no CUDA.
        ImportError: castor was built without its GPU parts.
    """

    _division = Division()
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
        """A loader of this rank's part of `dataset`, as long on every rank; alone, of all of it.

        Call `loader.sampler.set_epoch(epoch)` for another order in each epoch. `batch_size` counts
        one rank's samples; `options` are DataLoader's. Checkpoints keep its position. TypeError of
        datasets without a length, and of a sampler.
        """
        options |= {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        place = data_rank_and_size(self._division.ranks, self._division.experts_alone)
        return loader_of_rank(dataset, place, batch_size=batch_size, **options)

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Engine:
        """Takes model and optimizers over, in place. Called by Booster.boost.

        Raises:
            UsageError: The model or an optimizer cannot be boosted, tile_logits is not "auto" and
                the model has no logits that castor can compute in tiles, keep_fp32 has an entry
                that matches nothing in it, or the ranks were given different ones; neither is
                changed.
            OutOfMemoryError: A budget is too small; neither is changed.
            NotImplementedError: An optimizer is not supported in this precision, or a setting with
                several optimizers or ranks.
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
        held = held_params(model, optimizers, rules) if optimizers else None
        warn_of_budgets(
            torch.device(config.device), config.device_bytes, config.host_bytes, stacklevel=3
        )
        if self._chooses_precision:
            working = WORKING_DTYPES[config.precision]
            warn_of_default_precision(model, config.precision, working, stacklevel=3)
        types = tensor_types(
            *(model, WORKING_DTYPES[config.precision], config.keep_fp32),
            in_stages=self._division.num_ranks_of_stages > 1,
        )
        layout = self._division.layout()
        join_ranks(
            *(layout, model, optimizers, config),
            state_format=choice.state_format, seed=choice.seed, held=held,
        )  # fmt: skip
        reads = group_of_reads(config, rules, layout)
        divided = self._division.divide(model, optimizers, layout, state_format=choice.state_format)
        engine = Engine(
            model,
            engine_settings(
                config,
                rule=rule,
                state_format=choice.state_format,
                layout=layout,
                budgets=budgets_of(self, self.config),
                reads=reads,
            ),
            updated=held,
            types=types,
        )
        divided.start(engine)
        blocks.apply(model, engine, SimulatedSteps if divided.whole else None, divided.sharing)
        if head is not None and head in engine.positions:  # else another stage has it
            divided.defer_logits(engine, head, config)
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
    """Chooses what becomes of activations: a budget that somebody gives is kept to."""
    if asked is not None:
        return asked
    return "keep" if device_memory is None else "auto"


def _arm(driver: StepDriver, held: weakref.ref[Optimizer], *_: Any) -> None:
    """A pre-hook of a model whose backward may update chunks."""
    if torch.is_grad_enabled() and (optimizer := held()) is not None:
        driver.arm(optimizer)
