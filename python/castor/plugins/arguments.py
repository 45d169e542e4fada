"""Arguments of GeminiPlugin that two names, or two objects, may give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.optim import Optimizer

from castor.config import GeminiConfig, parse_paths


def policy_of(placement: str | None, tensor_placement: str | None) -> str:
    """The placement policy, by its name or its older one.

    Raises:
        ValueError: They contradict each other.
    """
    if placement is not None and tensor_placement is not None and placement != tensor_placement:
        raise ValueError(
            f"placement_policy={placement!r} and tensor_placement_policy={tensor_placement!r} "
            "contradict each other; give one"
        )
    return placement or tensor_placement or "auto"


def with_nvme_of(config: GeminiConfig, optimizers: Sequence[Optimizer]) -> GeminiConfig:
    """The settings, with what a HybridAdam says about NVMe.

    Raises:
        ValueError: It contradicts them.
    """
    asked = [getattr(optimizer, "requested_nvme", (0.0, None)) for optimizer in optimizers]
    fraction, directory = next((one for one in asked if one[1] is not None), (0.0, None))
    if directory is None:
        return config
    if config.nvme_paths:
        raise ValueError(
            f"GeminiPlugin(nvme_path=...) and HybridAdam(nvme_offload_dir={directory!r}) both "
            "say where optimizer state goes; give one"
        )
    return replace(
        config,
        nvme_paths=parse_paths(directory, "nvme_offload_dir"),
        nvme_offload_fraction=fraction,
    )
