"""Settings of GeminiPlugin: as a user asks for them, and as they come out on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from castor.config.block_choice import check_activations
from castor.config.declared import Declared, at_least, check_fraction, names_of, values_of
from castor.config.names import (
    Activations,
    GatherExperts,
    NonFinite,
    Overlap,
    PlacementPolicy,
    Precision,
    ReduceOn,
    Reduction,
    StateFormat,
    TileLogits,
    UpdateFraction,
    ZeroStage,
)
from castor.config.units import parse_bandwidth, parse_bytes, parse_paths

if TYPE_CHECKING:  # `castor --help` imports this file, and not torch
    import torch
    from torch import nn

Size = Annotated[int | str, parse_bytes]
Bandwidth = Annotated[int | str, parse_bandwidth]
Fraction = Annotated[float, check_fraction]


def check_format_of_precision(what: str, state_format: str, precision: str) -> None:
    """Raises ValueError, calling the setting `what`, if the precision lacks the state format."""
    if state_format != "fp32" and precision != "bf16":
        raise ValueError(
            f"{what} splits the float32 master of bfloat16 parameters, and precision is "
            f"{precision!r}; use precision='bf16', or optim_state_format='fp32'"
        )


def _check_keep_fp32(value: object, name: str) -> None:
    from torch import nn

    asked = "give a list of patterns of names and of classes of modules, ['*.gate']"
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} is {value!r}; {asked}")
    for entry in value:
        if not isinstance(entry, str) and not (
            isinstance(entry, type) and issubclass(entry, nn.Module)
        ):
            raise TypeError(f"{name} has {entry!r}; {asked}")


def _check_norm_type(value: float, name: str) -> None:
    if value != 2.0:
        raise NotImplementedError(f"{name}={value} is not supported; only 2.0 is")


SHARE_OF_REDUCTION = 8
"""With reduce_on="auto" reductions on the device may take one part in so many of device_memory."""


def _check_sharded(value: float, name: str) -> None:
    check_fraction(value, name)
    if value != 1.0:
        raise NotImplementedError(
            f"{name}={value} is not supported; zero_stage says which of parameters, gradients and "
            "optimizer states ranks shard"
        )


def _check_path(value: object, name: str) -> None:
    if not isinstance(value, str | Path):
        raise TypeError(f"{name} is {value!r}; give a path")


def _check_room_for_chunks(value: float, name: str) -> None:
    if value == 1.0:
        raise ValueError(f"{name} is 1; chunks need some of the device")


def _check_room_for_plans(value: float, name: str) -> None:
    if value == 0.0:
        raise ValueError(f"{name} is 0; plans need some of the device")


def _check_seed(value: int, name: str) -> None:
    if not 0 <= value < 2**64:
        raise ValueError(f"{name} is {value}; it must lie in [0, 2**64)")


def check_update_fraction(value: object, name: str) -> None:
    """Raises TypeError or ValueError unless the value is a device_update_fraction."""
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; choose 'auto' or a fraction in [0, 1]")
    check_fraction(value, name)


def first_update_fraction(asked: UpdateFraction) -> float:
    """Returns the share with which a device_update_fraction begins.

    With "auto" it is what a link of 25 GB/s and host memory of 85 GB/s come to.
    """
    return 0.4 if asked == "auto" else float(asked)


def _check_tile_logits(value: object, name: str) -> None:
    if isinstance(value, bool) or value == "auto":
        return
    asked = "choose 'auto', True, False, or how many rows to compute at once"
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; {asked}")
    if value < 1:
        raise ValueError(f"{name} is {value}; {asked}, at least 1")


def _check_gather_experts(value: object, name: str) -> None:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"{name} is {value!r}; choose 'auto', True or False")


@dataclass(frozen=True, kw_only=True)
class StepSettings(Declared):
    """Arguments of all plugins about the optimizer's step."""

    max_norm: Annotated[float, at_least(0)] = 0.0
    """L2 norm to which step clips gradients; 0: no clipping."""
    norm_type: Annotated[float, _check_norm_type] = 2.0
    """Only 2.0."""
    nonfinite: NonFinite = "skip"
    """Reaction of step to NaN and infinite gradients: "skip" leaves the update out, counts it and
    warns once; "raise" raises; "ignore" updates as plain torch does. fp16 always skips."""


@dataclass(frozen=True, kw_only=True)
class LossScalerConfig(Declared):
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial_scale: float = 2.0**16
    """fp16: loss scale at the start."""
    min_scale: float = 1.0
    """fp16: lowest loss scale."""
    max_scale: float = 2.0**32
    """fp16: highest loss scale."""
    growth_factor: float = 2.0
    """fp16: growth of the loss scale."""
    backoff_factor: float = 0.5
    """fp16: reduction of the loss scale on overflow."""
    growth_interval: Annotated[int, at_least(1)] = 1000
    """fp16: good steps before growth."""
    hysteresis: Annotated[int, at_least(1)] = 2
    """fp16: overflows before reduction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"loss scales must satisfy 0 < min_scale <= initial_scale <= max_scale; got "
                f"{self.min_scale}, {self.initial_scale}, {self.max_scale}"
            )
        if not self.growth_factor > 1.0:
            raise ValueError(f"growth_factor is {self.growth_factor}; it must be above 1")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor is {self.backoff_factor}; it must lie in (0, 1)")


@dataclass(frozen=True, kw_only=True)
class ChunkSettings(StepSettings, LossScalerConfig):
    """Arguments of all plugins that train in chunks, which mean the same on every machine."""

    nvme_offload_fraction: Fraction | None = None
    """Least share of the optimizer state on NVMe, in [0, 1]. Default: HybridAdam's, or else what
    does not fit host_memory."""
    nvme_verify: bool = True
    """Whether reads from NVMe are compared with checksums of what was written."""
    optim_state_format: StateFormat | None = None
    """Format of Adam's state: "fp32", or with precision="bf16" "split", "split_bf16" or
    "split_int8". They take 12, 10, 6 or 4 bytes a parameter beside weight and gradient. SGD and
    Lion have the first two, and keep less. "split" takes the same steps as "fp32" bit for bit.
    Default: HybridAdam's, or else "split" for bf16, else "fp32"."""
    seed: Annotated[int, _check_seed] | None = None
    """Seed of the stochastic rounding in "split_bf16" and "split_int8"; the same seed gives the
    same bits. Default: HybridAdam's, or else 0."""
    tile_logits: Annotated[TileLogits, _check_tile_logits] = "auto"
    """Whether losses of the output embedding's logits are computed in tiles of rows, forward and
    backward, so that the full logits are never in memory. Such losses are cross-entropy, and others
    of single rows (log-probabilities, entropies); other uses of the logits get their values. True,
    False, or the most rows of a tile. "auto": where tiles save at least 1 MiB and 1/16 of
    device_memory. One tile gives the bits of plain PyTorch. With more, the loss and the output
    embedding's gradient are sums in another order."""
    gather_embeddings: bool = False
    """Whether weights of nn.Embedding modules stay in host memory, where forward reads the rows
    that it looks up; a GPU reads them over its link. The other rows then need no device memory and
    no copy. This pays where a batch has far fewer tokens than the vocabulary. A weight tied to
    another module comes to the device for that module. Same bits. For "auto" and "cpu"."""
    device_update_fraction: Annotated[UpdateFraction, check_update_fraction] = 0.0
    """Share, in [0, 1], of the updates of chunks on the host that the GPU runs beside the host's:
    weights, gradients and states cross the link in pieces, and come back. This pays where the
    host's memory is slower than the link, in steps of few tokens. Same bits for every share. Takes
    up to 48 MiB of device_memory. "auto" follows the times that host and GPU take. For fused
    optimizers; Twin-Flow of ZeRO-Offload++ (DeepSpeed 2023) has the host's share as `ratio`."""
    gather_experts: Annotated[GatherExperts, _check_gather_experts] = "auto"
    """Whether passes fetch the experts that they need, and not the full layer, in mixtures of
    transformers with one tensor for all experts of a layer. Without gradients a cache of experts
    that no optimizer steps takes the device memory that is left, and a pass that needs more than
    half of a layer's experts takes the layer. Training steps over frozen experts do so where "auto"
    has measured that it is fewer bytes, with True in any case; with True also those that train
    experts, whose gradients leave the device by the expert. Same bits. True raises where the model
    has no such layer; "auto" is for one process and the policies "auto" and "cpu"."""
    reduction: Reduction = "ordered"
    """Addition of what several ranks on GPUs give. "ordered": in rank order, in fp32 and rounded
    once, with the bits of ranks on the CPU device. "backend": by the process group's backend
    (NCCL's all-reduce and reduce-scatter), in its order and rounding. That takes less memory, and
    losses differ by rounding. It is for gradients of data-parallel ranks, and for activations of
    tensor and sequence parallelism. Each rank needs a GPU of its own; ranks on the CPU device are
    refused. One process alone adds nothing."""
    reduce_on: ReduceOn = "auto"
    """Place where data-parallel ranks on GPUs reduce gradients in rank order; same bits.
    "device": on the GPUs, which exchange shards (all-to-all), so that 1/n of a chunk's
    gradients goes to host storage from each of n ranks. That takes device_memory: two
    communicators, a window of 16 MiB, and three buffers of the largest chunk's gradients.
    "host": all go to host storage, and are added up there. "auto": on the GPUs where each rank
    has its own, and all of that takes no more than 1/8 of device_memory on any rank.
    report().reduced_on says where, and why. reduction="backend" reduces on the GPUs in any
    case."""
    max_prefetch: Annotated[int, at_least(0)] = 1
    """Number of chunks that may be fetched ahead of their use."""
    warmup_non_model_data_ratio: Annotated[Fraction, _check_room_for_chunks] = 0.8
    """Share of the device budget that chunks leave free before there is a trace."""
    steady_cuda_cap_ratio: Annotated[Fraction, _check_room_for_plans] = 1.0
    """Share of the device budget that plans use. Default 1.0: accounting is exact."""
    trace_file: Annotated[str | Path, _check_path] | None = None
    """Trace written by Booster.save_trace; with it the first step runs by plan."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction == "backend" and self.reduce_on == "host":
            raise ValueError(
                "reduction='backend' has the backend between GPUs reduce gradients, and "
                "reduce_on='host' the host: give one of them"
            )


@dataclass(frozen=True, kw_only=True)
class GeminiSettings(ChunkSettings):
    """Arguments of GeminiPlugin that mean the same on every machine."""

    gpu_margin_mem_ratio: Fraction | None = None
    """With "auto": share, in [0, 1], of the device memory that activations and temporaries leave
    free after the first steps. Resident chunks, with their gradients and optimizer states, may take
    this share. 0.0: all chunks stay on the host. Default: as much as makes nothing else wait."""
    zero_stage: ZeroStage = "auto"
    """Least ZeRO stage of several ranks, which shard with 1: masters and optimizer states; 2:
    gradients too; 3: weights too. "auto" takes the stage that costs no exchange: 3 where ranks
    share memory, and so have one copy of weights and gradients, and 1 elsewhere. Stage 2 between
    ranks that share no memory keeps a rank's shard of every chunk's gradients in host_memory. A
    chunk's full gradients are there until all ranks have theirs, and while p.grad is read. Stage 3
    also shards the weights: a rank reads the other shards when it needs the chunk, through a window
    of four chunks, and weights change in step and in loads alone. report().zero_stage is the stage
    that runs."""
    extra_dp_size: Annotated[int, at_least(1)] = 1
    """Number of replicas of the weights that n ranks keep with zero_stage=3 where they share no
    memory (HSDP); it divides the number of data-parallel ranks. Each replica is sharded over n /
    extra_dp_size neighbouring ranks, and a rank reads from its neighbours alone. It keeps
    extra_dp_size / n of the weights in host_memory. Gradients and optimizer states stay sharded
    over all ranks. Same bits. Ranks that share memory keep one replica on each machine; the number
    of machines is accepted there."""


@dataclass(frozen=True, kw_only=True)
class ChunkArguments(ChunkSettings):
    """Arguments of all plugins that train in chunks, as a user gives them."""

    device: str | torch.device | None = None
    """Device that the model computes on: "cuda", "cuda:1" or "cpu". Default: "cuda" when there is a
    GPU, else "cpu". On several ranks "cuda" is the GPU that the launcher's LOCAL_RANK names, and
    torch's current device from then on. Build the model on the CPU: boost moves its parameters and
    buffers, and each forward moves its inputs."""
    device_memory: Size | None = None
    """Device budget of all models boosted with the plugin: bytes, or a size such as "24GiB". On a
    GPU all memory that torch allocates counts, and torch.cuda.set_per_process_memory_fraction
    applies too; the default is 95% of what is free or cached by torch. On the CPU device the
    default is a quarter of the usable memory, or what host_memory leaves of it, and at least an
    eighth. Usable is the memory available now to the machine and to each cgroup around this
    process, less a tenth (384 MiB to 8 GiB) for the process itself."""
    host_memory: Size | None = None
    """Budget of the host tier, in bytes or as a size; on a GPU it is page-locked. Default: the
    usable memory. Beside the CPU device the default is three quarters of it, or what device_memory
    leaves, and at least an eighth. Budgets above the memory of the machine or cgroup are accepted
    with a RuntimeWarning at boost."""
    precision: Precision | None = None
    """"fp32", "bf16" or "fp16" (with a dynamic loss scale). The 16-bit precisions keep exact fp32
    master weights. Default: "fp32" on the CPU, "bf16" on CUDA, with a RuntimeWarning at boost for a
    model in another 16-bit type. Parameters and persistent floating-point buffers are converted,
    with three exceptions that stay float32: tensors that `from_pretrained(dtype=...)` of
    transformers keeps so (routers, correction biases, sinks), float32 tensors of a model that is
    16-bit already, and keep_fp32."""
    keep_fp32: Annotated[Sequence[str | type[nn.Module]], _check_keep_fp32] = ()
    """Further tensors that stay float32, and train so, in a 16-bit precision. Entries are patterns
    of names of parameters, buffers or modules, such as ``"*.gate"``, or classes of modules. A
    module stands for all tensors in it. Its forward has to take inputs of the precision, as in
    plain PyTorch."""
    shard_param_frac: Annotated[float, _check_sharded] = 1.0
    """Only 1.0; zero_stage says what ranks shard."""
    activations: Annotated[Activations, check_activations] | None = None
    """Treatment of the tensors that the model's blocks save for backward: "keep", "recompute",
    "offload", "auto" or a mapping. "keep": they stay, except where the model's own gradient
    checkpointing drops them. "recompute": backward computes them again. "offload": they wait in
    host memory. "recompute:mlp" and "offload:mlp" do so for the MLP of each block only. "auto": as
    many blocks keep theirs as a profile of the first step says is fastest in device_memory; the
    others are recomputed, or offloaded as far as host_memory has room. A mapping from patterns of
    block names takes all but "auto", for instance {"model.layers.*": "recompute", "model.layers.0":
    "keep"}; the last pattern that matches counts. All of these give plain PyTorch's bits. "tile:4"
    runs the MLP of each block, forward and backward, on a quarter of the rows at a time, and
    "recompute+tile:4" recomputes the rest of the block as well: the same arithmetic, with gradients
    of weights that are sums in another order. Default: "auto" where device_memory is given, else
    "keep". The default leaves a block alone where an explicit "auto" raises: the block is compiled,
    writes a buffer, is passed a filled cache or has hooks of the user's within. It also does
    nothing while all fits with ease, and where the model's own gradient checkpointing is on."""
    overlap: Overlap | None = None
    """Time at which a fused optimizer updates the chunks. "none": inside step. "forward": beside
    the work that follows step; the modules of the next forward, and any other reader of a weight,
    wait for the chunks they need. "backward": as "forward", and chunks whose gradients are complete
    are updated while backward goes on. The update may then not depend on what step learns, so
    "backward" needs max_norm=0, nonfinite="ignore", no fp16 and enable_gradient_accumulation=False.
    All give the same bits. Default: "forward" on a GPU where one fused optimizer holds all
    parameters, else "none": the CPU device needs its cores for the model."""
    enable_gradient_accumulation: bool = True
    """False promises that step follows every backward, which overlap="backward" needs. It changes
    nothing else: with either value gradients accumulate until zero_grad, as in torch."""
    chunk_bytes: Size | None = None
    """Size of a chunk: bytes or a size. Default: found by search."""
    pin_memory: bool = False
    """True requires page-locked host storage and needs a GPU. The value changes nothing else: host
    storage is always page-locked on a GPU, and never on the CPU device."""
    link_bandwidth: Bandwidth | None = None
    """CPU device: bandwidth of an emulated link, to try what a GPU's link would do: bytes per
    second, or "25GB/s". Parameters pass it on their way to the device and back, beside the compute.
    Default: memory's own speed."""
    nvme_path: Annotated[str | Path | Sequence[str | Path], parse_paths] | None = None
    """Directory on an NVMe device, or several on different ones, for optimizer state that the host
    has no room for. Each gets a preallocated file, removed at the end. Default: HybridAdam's, or
    else no NVMe tier."""
    nvme_memory: Size | None = None
    """NVMe budget: bytes or a size. Default: what the disks have. A given budget is taken in full
    at boost with activations="auto" or "offload": it then also holds activations that host_memory
    has no room for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap == "backward" and self.enable_gradient_accumulation:
            raise ValueError(
                "overlap='backward' updates chunks in the first backward of a step; pass "
                "enable_gradient_accumulation=False, or overlap='forward' to accumulate"
            )


@dataclass(frozen=True, kw_only=True)
class GeminiArguments(ChunkArguments, GeminiSettings):
    """Arguments of GeminiPlugin, as a user gives them; `GeminiConfig` is what they come to."""

    placement_policy: PlacementPolicy | None = None
    """"auto" keeps on the device what fits by the trace of the first steps: chunks with their
    optimizer state, where memory is spare. "cpu" streams all chunks, "cuda" keeps all of them on
    the device, and "static" places them by the offload fractions. Default: "auto"."""
    tensor_placement_policy: PlacementPolicy | None = None
    """Older name of placement_policy."""
    offload_optim_frac: Fraction | None = None
    """With "static": share of the optimizer state, with gradients, on the host."""
    offload_param_frac: Fraction | None = None
    """With "static": share of parameters that stream; needs offload_optim_frac=1.0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = (self.placement_policy, self.tensor_placement_policy)
        if None not in given and given[0] != given[1]:
            raise ValueError(
                f"placement_policy={given[0]!r} and tensor_placement_policy={given[1]!r} "
                "contradict each other; give one"
            )
        if self.policy != "static" and (
            self.offload_optim_frac is not None or self.offload_param_frac is not None
        ):
            raise ValueError(
                "offload_optim_frac and offload_param_frac belong to placement_policy='static'; "
                f"{self.policy!r} decides by itself"
            )

    @property
    def policy(self) -> PlacementPolicy:
        """The placement policy, given under its name or its older one."""
        return self.placement_policy or self.tensor_placement_policy or "auto"


SIZES = [
    name
    for name, kind in names_of(GeminiArguments).items()
    if kind in ("Size | None", "Bandwidth | None")
]
"""Arguments of GeminiPlugin that are sizes, which people give with a unit."""


@dataclass(frozen=True, kw_only=True)
class GeminiConfig(GeminiSettings):
    """Settings of a boosted model: GeminiPlugin's arguments with what the machine decides."""

    device: str
    """Device that the model computes on: "cpu" or a GPU such as "cuda:0"."""
    device_bytes: int
    host_bytes: int
    placement_policy: PlacementPolicy
    offload_optim_frac: float
    offload_param_frac: float
    precision: Precision
    keep_fp32: tuple[str | type[nn.Module], ...]
    activations: Activations
    activations_by_default: bool
    """Whether castor chose "auto" where nobody asked: what that cannot do stays as it is."""
    overlap: Overlap
    chunk_bytes: int
    """0: search."""
    link_bytes_per_second: int
    """0: memory's own speed."""
    nvme_paths: tuple[Path, ...]
    """Directories of the NVMe tier; none: what the optimizer says, or else no such tier."""
    nvme_bytes: int | None
    """Bytes that the tier may hold; None: as much as the disks have."""

    @property
    def loss_scaler(self) -> LossScalerConfig:
        """The settings of the loss scale alone."""
        return LossScalerConfig(**values_of(self, LossScalerConfig))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap == "backward" and (
            self.max_norm > 0 or self.nonfinite != "ignore" or self.precision == "fp16"
        ):
            raise ValueError(
                "overlap='backward' updates chunks before the norm of all gradients is known; it "
                "needs max_norm=0, nonfinite='ignore' and a precision without loss scale, and got "
                f"max_norm={self.max_norm}, nonfinite={self.nonfinite!r}, "
                f"precision={self.precision!r}; overlap='forward' has no such limits"
            )
        if self.gpu_margin_mem_ratio and self.placement_policy != "auto":
            raise ValueError(
                f"gpu_margin_mem_ratio={self.gpu_margin_mem_ratio} bounds the chunks that "
                "placement_policy='auto' keeps resident on the device, and "
                f"{self.placement_policy!r} keeps none; leave it out"
            )
        if self.gather_embeddings and self.placement_policy in ("cuda", "static"):
            raise ValueError(
                "gather_embeddings=True leaves embeddings on the host, and placement_policy="
                f"{self.placement_policy!r} says itself what is there; use 'auto' or 'cpu'"
            )
        if self.gather_experts is True and self.placement_policy in ("cuda", "static"):
            raise ValueError(
                "gather_experts=True leaves experts on the host, and placement_policy="
                f"{self.placement_policy!r} says itself what is there; use 'auto' or 'cpu'"
            )
        if self.keep_fp32 and self.precision == "fp32":
            raise ValueError(
                "keep_fp32 names what stays float32 in a 16-bit precision, and precision is "
                "'fp32', in which everything does: leave it out, or give precision='bf16' or 'fp16'"
            )
        if self.optim_state_format is not None:
            check_format_of_precision(
                f"optim_state_format={self.optim_state_format!r}",
                self.optim_state_format,
                self.precision,
            )
        if not self.nvme_paths and (
            self.nvme_bytes is not None or self.nvme_offload_fraction is not None
        ):
            raise ValueError(
                "nvme_memory and nvme_offload_fraction need nvme_path, a directory on the device"
            )
