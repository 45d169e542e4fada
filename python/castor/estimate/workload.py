"""Training workloads: batch, precision and options of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from castor.config import Precision, StateFormat
from castor.config.names import UpdateFraction
from castor.config.settings import check_update_fraction
from castor.estimate.model import SHORTEST_SEQUENCE
from castor.runtime.rules import RULES

Overlap = Literal["none", "forward"]
Activations = Literal["keep", "recompute", "offload", "auto"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Training workload: batch, precision and options of a step."""

    batch: int = 1
    """Samples in a step."""
    sequence: int = 1024
    """Tokens in a sample."""
    precision: Precision = "bf16"
    """Precision of parameters, gradients and computing."""
    state_format: StateFormat = "split"
    """Format of the optimizer state; fp32 and fp16 have "fp32" only."""
    optimizer: str = "adam"
    """Optimizer's update rule: "adam", "lion", "sgd" (without momentum) or "sgd_momentum"."""
    activations: Activations = "keep"
    """Treatment of the blocks' activations, as in GeminiPlugin."""
    overlap: Overlap = "forward"
    """Time of the host's optimizer: "forward" beside the next forward, "none" between steps."""
    max_prefetch: int = 1
    """Number of chunks that may be fetched ahead of their use, as in GeminiPlugin."""
    gather_embeddings: bool = False
    """Whether embeddings stay in host memory, as in GeminiPlugin."""
    device_update_fraction: UpdateFraction = 0.0
    """Share of the host's updates that the device runs, as in GeminiPlugin; "auto": the share with
    the shortest step."""
    lora_rank: int | None = None
    """Rank of LoRA adapters, with all other parameters frozen; None: there are no adapters."""
    lora: Mapping[str, Any] = field(
        default_factory=lambda: {"target_modules": "all-linear"}, hash=False
    )
    """Further arguments of PEFT's LoraConfig, such as the layers that have adapters."""
    four_bit_base: bool = False
    """Whether the weights of the linear layers but the output embedding have 4 bits (QLoRA)."""
    masked: bool = False
    """Whether attention gets a mask, since samples are padded or packed."""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("sequence", SHORTEST_SEQUENCE), ("max_prefetch", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; give an int of at least {least}")
        check_update_fraction(self.device_update_fraction, "device_update_fraction")
        rank: Any = self.lora_rank
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 1):
            raise ValueError(f"lora_rank is {rank!r}; give an int of at least 1")
        if self.four_bit_base and rank is None:
            raise ValueError("weights of 4 bits are trained through adapters; give lora_rank too")
        for name, kind in (
            ("precision", Precision),
            ("state_format", StateFormat),
            ("overlap", Overlap),
            ("activations", Activations),
        ):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}"
                )
        rules = {rule.name: rule for rule in RULES}
        if self.optimizer not in rules:
            raise ValueError(f"optimizer is {self.optimizer!r}; choose one of {', '.join(rules)}")
        formats = rules[self.optimizer].formats
        if self.state_format not in formats:
            raise ValueError(
                f"the state format {self.state_format!r} rounds what Adam keeps; with optimizer "
                f"{self.optimizer!r} choose one of {', '.join(formats)}"
            )
        if self.precision != "bf16" and self.state_format != "fp32":
            raise ValueError(
                f"the state format {self.state_format!r} is for bf16 parameters; with precision "
                f"{self.precision!r} give 'fp32'"
            )
