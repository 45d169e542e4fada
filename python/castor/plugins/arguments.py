"""Resolves arguments of GeminiPlugin that have two names, or that an optimizer may give too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from castor.config import GeminiConfig, parse_paths


def policy_of(placement: str | None, tensor_placement: str | None) -> str:
    """Returns the placement policy, given under its name or its older one.

    Raises:
        ValueError: Both are given and contradict each other.
    """
    if placement is not None and tensor_placement is not None and placement != tensor_placement:
        raise ValueError(
            f"placement_policy={placement!r} and tensor_placement_policy={tensor_placement!r} "
            "contradict each other; give one"
        )
    return placement or tensor_placement or "auto"


def checked_names(keep_fp32: object) -> tuple[str | type[nn.Module], ...]:
    """Returns the entries of `keep_fp32`.

    Raises:
        TypeError: `keep_fp32` is no sequence of patterns and classes of modules.
    """
    asked = "give a list of patterns of names and of classes of modules, ['*.gate']"
    if isinstance(keep_fp32, str) or not isinstance(keep_fp32, Sequence):
        raise TypeError(f"keep_fp32 is {keep_fp32!r}; {asked}")
    for entry in keep_fp32:
        if not isinstance(entry, str) and not (
            isinstance(entry, type) and issubclass(entry, nn.Module)
        ):
            raise TypeError(f"keep_fp32 has {entry!r}; {asked}")
    return tuple(keep_fp32)


def with_nvme_of(config: GeminiConfig, optimizers: Sequence[Optimizer]) -> GeminiConfig:
    """Returns the settings with the NVMe directory and fraction of a HybridAdam.

    Raises:
        ValueError: The plugin and a HybridAdam both give a directory.
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
