"""Settings of a boosted model: parsed, checked, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from torch import nn

from castor.config.block_choice import check_activations
from castor.config.names import (
    Activations,
    NonFinite,
    Overlap,
    PlacementPolicy,
    Precision,
    StateFormat,
    TileLogits,
    ZeroStage,
)


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def _numbers(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is {value!r}; give a number")


def _whole_numbers(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} is {value!r}; give an int")


def _at_least(name: str, value: float, minimum: float) -> None:
    _numbers(**{name: value})
    if not value >= minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")


def check_fraction(name: str, value: float) -> None:
    """Raises TypeError or ValueError unless `value` is a number in [0, 1]."""
    _numbers(**{name: value})
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1]")


def check_format_of_precision(what: str, state_format: str, precision: str) -> None:
    """Raises ValueError, calling the setting `what`, if the precision lacks the state format."""
    if state_format != "fp32" and precision != "bf16":
        raise ValueError(
            f"{what} splits the float32 master of bfloat16 parameters, and precision is "
            f"{precision!r}; use precision='bf16', or optim_state_format='fp32'"
        )


def _check_keep_fp32(value: tuple[str | type[nn.Module], ...], precision: str) -> None:
    if value and precision == "fp32":
        raise ValueError(
            "keep_fp32 names what stays float32 in a 16-bit precision, and precision is 'fp32', in "
            "which everything does: leave it out, or give precision='bf16' or 'fp16'"
        )


def _check_tile_logits(value: object) -> None:
    if isinstance(value, bool) or value == "auto":
        return
    asked = "choose 'auto', True, False, or how many rows to compute at once"
    if not isinstance(value, int):
        raise TypeError(f"tile_logits is {value!r}; {asked}")
    if value < 1:
        raise ValueError(f"tile_logits is {value}; {asked}, at least 1")


def _check_zero_stage(value: object) -> None:
    asked = "choose 'auto', 1, 2 or 3"
    if value == "auto":
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"zero_stage is {value!r}; {asked}")
    if value not in (1, 2, 3):
        raise ValueError(f"zero_stage is {value}; {asked}")


@dataclass(frozen=True, kw_only=True)
class LossScalerConfig:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018, section 3.2)."""

    initial_scale: float = 2.0**16
    """Scale of the first step."""
    min_scale: float = 1.0
    """The scale never falls below this."""
    max_scale: float = 2.0**32
    """The scale never rises above this."""
    growth_factor: float = 2.0
    """Factor of the scale after growth_interval good steps; above 1."""
    backoff_factor: float = 0.5
    """Factor of the scale on overflow; in (0, 1)."""
    growth_interval: int = 1000
    """Good steps in a row before the scale grows."""
    hysteresis: int = 2
    """Overflows tolerated before the scale falls."""

    def __post_init__(self) -> None:
        _numbers(
            initial_scale=self.initial_scale,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
        )
        _whole_numbers(growth_interval=self.growth_interval, hysteresis=self.hysteresis)
        if not 0 < self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"loss scales must satisfy 0 < min_scale <= initial_scale <= max_scale; got "
                f"{self.min_scale}, {self.initial_scale}, {self.max_scale}"
            )
        if not self.growth_factor > 1.0:
            raise ValueError(f"growth_factor is {self.growth_factor}; it must be above 1")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor is {self.backoff_factor}; it must lie in (0, 1)")
        _at_least("growth_interval", self.growth_interval, 1)
        _at_least("hysteresis", self.hysteresis, 1)


@dataclass(frozen=True, kw_only=True)
class GeminiConfig:
    """The settings that GeminiPlugin's arguments come to; see there for their meaning."""

    placement_policy: PlacementPolicy
    device_bytes: int
    host_bytes: int
    precision: Precision
    overlap: Overlap
    link_bytes_per_second: int
    """0: memory's own speed."""
    chunk_bytes: int
    """0: search."""
    max_prefetch: int
    offload_optim_frac: float
    offload_param_frac: float
    warmup_non_model_data_ratio: float
    steady_cuda_cap_ratio: float
    gpu_margin_mem_ratio: float | None
    """None: placement_policy "auto" chooses."""
    max_norm: float
    """0: no clipping."""
    nonfinite: NonFinite
    loss_scaler: LossScalerConfig
    trace_file: Path | None
    optim_state_format: StateFormat | None
    """None: what the optimizer says, or else the precision's default."""
    seed: int | None
    """Seed of the stochastic rounding of moments; None: the optimizer's, or else 0."""
    nvme_paths: tuple[Path, ...] = ()
    """Directories of the NVMe tier; none: what the optimizer says, or else no such tier."""
    nvme_bytes: int | None = None
    """Bytes that the tier may hold; None: as much as the disks have."""
    nvme_offload_fraction: float | None = None
    """Share of the optimizer state that goes there at least; None: what the host cannot hold."""
    nvme_verify: bool = True
    keep_fp32: tuple[str | type[nn.Module], ...] = ()
    """Parameters that stay float32 in 16-bit precisions: patterns of names, or classes."""
    gather_embeddings: bool = False
    """Whether embeddings stay in host memory, where forward reads the rows that it looks up."""
    tile_logits: TileLogits = "auto"
    """Whether, or in how many rows at once, the loss computes the logits."""
    activations: Activations = "keep"
    """Treatment of what the model's blocks save for backward."""
    activations_by_default: bool = False
    """Whether castor chose "auto" where nobody asked: what that cannot do stays as it is."""
    zero_stage: ZeroStage = "auto"
    """ZeRO stage that several ranks run at least."""
    extra_dp_size: int = 1
    """Copies of the weights that they keep in shards."""
    device: str = "cpu"
    """Device that the model computes on: "cpu" or a GPU such as "cuda:0"."""

    def __post_init__(self) -> None:
        _choice("placement_policy", self.placement_policy, get_args(PlacementPolicy))
        _choice("precision", self.precision, get_args(Precision))
        _choice("overlap", self.overlap, get_args(Overlap))
        _choice("nonfinite", self.nonfinite, get_args(NonFinite))
        if self.overlap == "backward" and (
            self.max_norm > 0 or self.nonfinite != "ignore" or self.precision == "fp16"
        ):
            raise ValueError(
                "overlap='backward' updates chunks before the norm of all gradients is known; it "
                "needs max_norm=0, nonfinite='ignore' and a precision without loss scale, and got "
                f"max_norm={self.max_norm}, nonfinite={self.nonfinite!r}, "
                f"precision={self.precision!r}; overlap='forward' has no such limits"
            )
        _whole_numbers(max_prefetch=self.max_prefetch)
        _at_least("max_prefetch", self.max_prefetch, 0)
        _at_least("max_norm", self.max_norm, 0.0)
        check_fraction("offload_optim_frac", self.offload_optim_frac)
        check_fraction("offload_param_frac", self.offload_param_frac)
        check_fraction("warmup_non_model_data_ratio", self.warmup_non_model_data_ratio)
        if self.warmup_non_model_data_ratio == 1.0:
            raise ValueError("warmup_non_model_data_ratio is 1; chunks need some of the device")
        check_fraction("steady_cuda_cap_ratio", self.steady_cuda_cap_ratio)
        if self.steady_cuda_cap_ratio == 0.0:
            raise ValueError("steady_cuda_cap_ratio is 0; plans need some of the device")
        if self.gpu_margin_mem_ratio is not None:
            check_fraction("gpu_margin_mem_ratio", self.gpu_margin_mem_ratio)
            if self.gpu_margin_mem_ratio > 0 and self.placement_policy != "auto":
                raise ValueError(
                    f"gpu_margin_mem_ratio={self.gpu_margin_mem_ratio} bounds the chunks that "
                    "placement_policy='auto' keeps resident on the device, and "
                    f"{self.placement_policy!r} keeps none; leave it out"
                )
        if not isinstance(self.gather_embeddings, bool):
            raise TypeError(f"gather_embeddings is {self.gather_embeddings!r}; give a bool")
        if self.gather_embeddings and self.placement_policy in ("cuda", "static"):
            raise ValueError(
                "gather_embeddings=True leaves embeddings on the host, and placement_policy="
                f"{self.placement_policy!r} says itself what is there; use 'auto' or 'cpu'"
            )
        _check_keep_fp32(self.keep_fp32, self.precision)
        _check_tile_logits(self.tile_logits)
        _check_zero_stage(self.zero_stage)
        _whole_numbers(extra_dp_size=self.extra_dp_size)
        _at_least("extra_dp_size", self.extra_dp_size, 1)
        check_activations(self.activations)
        if self.optim_state_format is not None:
            _choice("optim_state_format", self.optim_state_format, get_args(StateFormat))
            check_format_of_precision(
                f"optim_state_format={self.optim_state_format!r}",
                self.optim_state_format,
                self.precision,
            )
        if self.nvme_offload_fraction is not None:
            check_fraction("nvme_offload_fraction", self.nvme_offload_fraction)
        if not isinstance(self.nvme_verify, bool):
            raise TypeError(f"nvme_verify is {self.nvme_verify!r}; give a bool")
        if not self.nvme_paths and (
            self.nvme_bytes is not None or self.nvme_offload_fraction is not None
        ):
            raise ValueError(
                "nvme_memory and nvme_offload_fraction need nvme_path, a directory on the device"
            )
        if self.seed is not None:
            _whole_numbers(seed=self.seed)
            if not 0 <= self.seed < 2**64:
                raise ValueError(f"seed is {self.seed}; it must lie in [0, 2**64)")
