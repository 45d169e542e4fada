"""Sharded optimizer states and gradients (Colossal-AI's LowLevelZeroPlugin)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from castor.config import ChunkArguments, GeminiArguments
from castor.config.declared import documented, values_of
from castor.errors import UsageError
from castor.optim.rules import rules_of
from castor.plugins.arguments import check_not_yet, takes
from castor.plugins.gemini import GeminiPlugin
from castor.runtime.engine import Engine
from castor.runtime.ranks import may_share_memory, rank_and_size, ranks_of_node

_BY_OFFLOAD = {
    "placement_policy": "cpu_offload says where things are",
    "tensor_placement_policy": "cpu_offload says where things are",
    "offload_optim_frac": "give cpu_offload",
    "offload_param_frac": "parameters stay on the device; GeminiPlugin moves them",
    "zero_stage": "give stage",
    "gpu_margin_mem_ratio": "it is for placement_policy='auto' of GeminiPlugin",
}
"""Arguments of GeminiPlugin that this plugin sets itself, each with what to do instead."""

_NOT_OURS: dict[str, tuple[object, str]] = {
    "reduce_bucket_size_in_m": (12, "ranks exchange chunks: give chunk_bytes"),
    "extra_dp_size": (1, "every rank has full weights; use GeminiPlugin(zero_stage=3)"),
    "communication_dtype": (None, "gradients are sent in the working precision"),
    "overlap_communication": (True, "ranks that share memory reduce beside backward"),
    "overlap_allgather": (False, "ranks that share memory gather nothing"),
    "cast_inputs": (True, "inputs have the working precision"),
    "verbose": (False, "see booster.report()"),
}
"""Unsupported arguments of Colossal-AI's plugin: the accepted value, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class LowLevelZeroArguments(ChunkArguments):
    """Arguments of LowLevelZeroPlugin, as a user gives them."""

    stage: Literal[1, 2] = 1
    """ZeRO stage. Stage 2 needs cpu_offload=True and ranks that share memory. For such ranks stage
    1 with cpu_offload=True takes no more memory."""
    cpu_offload: bool = False
    """Whether gradients, master weights and optimizer states are in host memory, where the update
    runs too. False: everything is on the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage == 2 and not self.cpu_offload:
            raise NotImplementedError(
                "stage=2 keeps gradients once for all ranks of a machine in host memory, and "
                "cpu_offload=False on each rank's device; give stage=1 or cpu_offload=True"
            )


def _check_others(plugin: type, arguments: dict[str, Any]) -> None:
    """Checks arguments that are none of this plugin's; see check_not_yet."""
    for name, instead in _BY_OFFLOAD.items():
        if name in arguments:
            raise TypeError(f"LowLevelZeroPlugin has no argument {name!r}: {instead}")
    for name, (neutral, instead) in _NOT_OURS.items():
        if arguments.pop(name, neutral) != neutral:
            raise NotImplementedError(
                f"{name} may only be {neutral!r} in LowLevelZeroPlugin: {instead}"
            )
    check_not_yet(plugin, arguments)


@documented(LowLevelZeroArguments)
class LowLevelZeroPlugin(GeminiPlugin):
    """ZeRO stages 1 and 2 with parameters on the device (Rajbhandari et al. 2020).

    Stage 1 (section 5.1): each rank keeps and updates its shard of the optimizer state. Stage 2
    (section 5.2): the ranks of one machine also keep one common copy of the gradients.

    Args:
        **arguments: The fields of LowLevelZeroArguments, by name.
        **not_yet: Further arguments of Colossal-AI's plugin, accepted at the value that asks for
            nothing.

    Raises:
        NotImplementedError: stage=2 with cpu_offload=False, or an argument asks for something this
            version lacks; the message names it.
        TypeError: An argument of GeminiPlugin is one that this plugin sets itself; see
            GeminiPlugin.
        ValueError, UsageError, ImportError: See GeminiPlugin.
    """

    @takes(LowLevelZeroArguments, others=_check_others)
    def __init__(self, arguments: LowLevelZeroArguments) -> None:
        self._resolve(
            GeminiArguments(
                **values_of(arguments, ChunkArguments),
                placement_policy="static" if arguments.cpu_offload else "cuda",
                offload_optim_frac=1.0 if arguments.cpu_offload else None,
            )
        )
        self._stage = arguments.stage

    def configure(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Engine:
        """See GeminiPlugin.

        Raises:
            NotImplementedError: stage=2 runs with an optimizer that castor does not run; see
                GeminiPlugin.
            UsageError: stage=2 runs with ranks that do not share memory; see GeminiPlugin.
        """
        _, size = rank_and_size()
        if self._stage == 2 and size > 1 and (ranks_of_node() < size or not may_share_memory()):
            raise UsageError(
                f"stage=2 keeps gradients once for the ranks of a machine, and of these {size} "
                f"ranks {ranks_of_node()} are on this one, or CASTOR_RANK_LINK says that they "
                "share no memory; give stage=1"
            )
        rules = rules_of(optimizers)
        if self._stage == 2 and size > 1 and None in rules:
            name = type(optimizers[rules.index(None)]).__name__
            raise NotImplementedError(
                f"stage=2 keeps gradients once for {size} ranks, and {name} runs its own step, "
                "which takes all of them on every rank; give stage=1"
            )
        return super().configure(model, optimizers)
