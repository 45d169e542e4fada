"""DistributedDataParallel.join over castor: ranks whose data has ended go along with the others.

Before each forward and each step of a rank all ranks tell each other what they are about to do. One
that has left its loop then does what the others wait for: it gives zeros as its gradients, and
takes their steps, with the options and the gradients of the last rank that has data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.utils._pytree import tree_map_only

from castor.errors import UsageError
from castor.runtime.boosted_model import boosted_models_holding
from castor.runtime.engine import Engine, engine_of

if TYPE_CHECKING:
    from castor.integrations.data_parallel import DistributedDataParallel

_OVER, _FORWARD, _UNSYNCHRONISED, _STEP = range(4)
"""A rank's next action: nothing more, a forward whose backward is synchronised, one whose is
not, a step."""
_NAMES = ("has no more data", "calls the model", "calls the model in no_sync", "steps")


class UnevenData:
    """A context around a loop: what torch's Join is for torch's class.

    Args:
        wrapper: Around the model.
        enable: Whether ranks may have different numbers of batches.
        throw: Whether all ranks raise RuntimeError as soon as one has no more.
        divide_by_initial: Whether gradients are still divided by the number of all ranks then.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        *,
        enable: bool,
        throw: bool,
        divide_by_initial: bool,
    ) -> None:
        self._wrapper = wrapper
        self._enable, self._throw = enable, throw
        self._divide_by_initial = divide_by_initial
        self._late: list[int] = []
        """For each rank, whether no other one had data when it had no more."""
        self._follows = False
        """Whether this rank is taking a step of the others."""
        self._size = distributed.get_world_size()

    def __enter__(self) -> None:
        if self._enable and self._size > 1:
            self._wrapper.uneven = self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._wrapper.uneven is not self:
            return
        try:
            if kind is None:
                self._follow_others()
        finally:
            self._wrapper.uneven = None

    def forward_begins(
        self, *, synchronised: bool, shares: bool, answers: bool
    ) -> tuple[int, float]:
        """Before a training forward of this rank.

        Args:
            synchronised: Whether its backward is.
            shares: Whether ranks share buffers before it.
            answers: Whether they answer rank 0 before it.

        Returns:
            The rank whose buffers count, and what gradients are to be multiplied with.

        Raises:
            RuntimeError: A rank has no more data, and that is not expected.
        """
        doing = self._tell(
            _FORWARD if synchronised else _UNSYNCHRONISED, shares=shares, answers=answers
        )
        active = sum(one != _OVER for one in doing)
        factor = 1.0 if self._divide_by_initial else self._size / active
        return _last_active(doing), factor

    def step_begins(self, engine: Engine) -> None:
        """Before a step of this rank, or one that it takes with the others."""
        if not self._follows:
            self._share_step(engine, self._tell(_STEP))

    def _tell(
        self, mine: int, *, late: bool = False, shares: bool = False, answers: bool = False
    ) -> list[int]:
        """Returns the next actions of all ranks. Collective."""
        device = self._wrapper.device if distributed.get_backend() == "nccl" else "cpu"
        told = torch.tensor([mine, int(late), int(shares), int(answers)], device=device)
        everyone = [torch.empty_like(told) for _ in range(self._size)]
        distributed.all_gather(everyone, told)
        doing, self._late, sharing, answering = map(
            list, zip(*(one.tolist() for one in everyone), strict=True)
        )
        self._shares, self._answers = any(sharing), any(answering)
        active = {one for one in doing if one != _OVER}
        if self._throw and _OVER in doing and active:
            raise RuntimeError(
                f"Rank {distributed.get_rank()} exhausted all inputs."
                if mine == _OVER
                else "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
        if len(active) > 1:
            said = ", ".join(f"rank {i} {_NAMES[one]}" for i, one in enumerate(doing))
            raise UsageError(
                f"in DistributedDataParallel.join the ranks do different things: {said}. Those "
                "that have data make the same calls"
            )
        return doing

    def _follow_others(self) -> None:
        """Goes along until no rank has data."""
        if not boosted_models_holding(self._wrapper.module):
            raise UsageError(
                f"rank {distributed.get_rank()} has had no batch within "
                "DistributedDataParallel.join, and the others wait for it to call the model first: "
                "give each rank one batch at least"
            )
        late = True  # until another one is seen to go on
        while any(doing := self._tell(_OVER, late=late)):
            late = False
            if _STEP in doing:
                self._step_along(doing)
            else:
                self._pass_along(doing)
        if self._wrapper.broadcast_buffers:
            self._wrapper.share_buffers(max(i for i, last in enumerate(self._late) if last))

    def _pass_along(self, doing: Sequence[int]) -> None:
        """A forward and a backward of the others, to which this rank adds zeros."""
        wrapper = self._wrapper
        engine = engine_of(wrapper.module)
        if self._answers:
            engine.answer_first()
        if self._shares:
            wrapper.share_buffers(_last_active(doing))
        if _UNSYNCHRONISED in doing:
            return
        for param in engine.params:
            param.grad = None
        params = zip(engine.params, engine.trained, strict=True)
        first = next(param for param, trained in params if trained and param.requires_grad)
        engine.session.synchronise(True)
        torch.autograd.backward([first], [torch.zeros_like(first)])

    def _step_along(self, doing: Sequence[int]) -> None:
        engine = engine_of(self._wrapper.module)
        optimizer: Any = self._share_step(engine, doing)
        self._follows = True
        try:
            with optimizer._castor.turn_of_step((), {}):
                optimizer._castor.step(optimizer, (), {})
        finally:
            self._follows = False

    @torch.no_grad()
    def _share_step(self, engine: Engine, doing: Sequence[int]) -> Any:
        """Gives ranks without data what the last of the others steps with. Collective."""
        if len(engine.optimizers) > 1:
            raise NotImplementedError(
                f"the script's DistributedDataParallel.join is around a model with "
                f"{len(engine.optimizers)} optimizers, of which a rank without data cannot know "
                "which one steps: give it one, with param_groups"
            )
        (optimizer,) = list[Any](engine.optimizers)
        if _OVER not in doing:
            return optimizer
        source, mine = _last_active(doing), doing[distributed.get_rank()]
        scaled = optimizer._castor.scaled
        has_gradient = [param.grad is not None for param in engine.params]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        told: list[Any] = [(groups, scaled.scale, has_gradient)]
        distributed.broadcast_object_list(told, src=source)
        groups, scale, has_gradient = told[0]
        if mine == _OVER:
            scaled.scale = scale
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        for param, has in zip(engine.params, has_gradient, strict=True):
            if has:
                values = torch.zeros_like(param) if param.grad is None else param.grad.clone()
                distributed.broadcast(values, src=source)
                if mine == _OVER and param.grad is not None:
                    param.grad.copy_(values)
                elif mine == _OVER:
                    param.grad = values
            elif mine == _OVER:
                param.grad = None
        return optimizer


def _last_active(doing: Sequence[int]) -> int:
    """The last rank that has data, whose buffers count as in torch's class."""
    return max(rank for rank, one in enumerate(doing) if one != _OVER)


class _Multiplied(torch.autograd.Function):
    """A tensor as it is, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def multiply_gradients(output: Any, factor: float) -> Any:
    """The output of a forward, whose backward gives every parameter `factor` times its gradient."""
    if factor == 1.0:
        return output
    return tree_map_only(
        torch.Tensor,
        lambda one: _Multiplied.apply(one, factor) if one.requires_grad else one,
        output,
    )
