"""What has to hold before the layers of a model are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from castor.config.names import StateFormat
from castor.distributed import Plan, RankLayout, TensorParallel, find_plan
from castor.errors import UsageError
from castor.optim.rules import rule_of


def divide(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    layout: RankLayout,
    *,
    plan: Plan | None,
    state_format: StateFormat,
) -> TensorParallel:
    """Leaves this rank's parts in the model. Collective; call it last before the engine.

    Raises:
        UsageError: A size does not fit, or an optimizer has states of the whole; nothing changed.
        NotImplementedError: There is no plan, or the optimizer's update of a part is not a part of
            its update.
    """
    ranks = layout.tensor
    if ranks is None:
        raise UsageError("layers are divided among several ranks")
    if state_format == "split_int8":
        raise NotImplementedError(
            f"optim_state_format='split_int8' keeps moments in blocks that tp_size={ranks.size} "
            "ranks would cut; give 'split' or 'split_bf16'"
        )
    for optimizer in optimizers:
        if rule_of(optimizer) is None:
            raise NotImplementedError(
                f"with tp_size={ranks.size} a {type(optimizer).__name__} would step parts of "
                "matrices as if they were whole; use Adam, AdamW or HybridAdam, which step "
                "elements"
            )
        if optimizer.state:
            raise UsageError(
                f"the {type(optimizer).__name__} has states of whole parameters, which tp_size="
                f"{ranks.size} ranks are about to divide; boost it before its first step, and "
                "load a checkpoint afterwards"
            )
    parts = TensorParallel(model, find_plan(model, ranks.size, plan), ranks)
    parts.apply()
    return parts
