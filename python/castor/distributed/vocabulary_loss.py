"""The loss over logits of which each rank has some columns.

Source: Shoeybi et al. 2019 (Megatron-LM, section 3: the output embedding).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from castor.distributed.inputs import by_name, check_numbers
from castor.distributed.tensor_ranks import TensorRanks
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_IGNORED = -100


class VocabularyLoss:
    """transformers' loss of a causal language model, over each rank's part of the vocabulary."""

    def __init__(self, model: nn.Module, ranks: TensorRanks) -> None:
        """Finds out whether the model computes that loss; nothing is changed.

        Args:
            model: Whose output embedding is divided.
            ranks: Among which.

        Raises:
            NotImplementedError: It computes another one.
        """
        loss = getattr(model, "loss_function", None)
        name = getattr(loss, "__name__", type(loss).__name__)
        if name != "ForCausalLMLoss":
            raise NotImplementedError(
                f"parallel_output=True divides transformers' ForCausalLMLoss, and this "
                f"{type(model).__name__} computes {name}; leave it out"
            )
        self._model = weakref.ref(model)
        self._ranks = ranks
        self.local = False
        """Whether the output embedding leaves its logits divided in the forward under way."""
        self.width = 0
        """Of all of them; TensorParallel knows it."""

    def start(self) -> None:
        """Divides the loss of the forwards that are given labels from now on."""
        model: Any = self._model()
        model.loss_function = self._of_parts
        model.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True)
        model.register_forward_hook(ModuleHook(self._end), always_call=True)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.local = by_name(model.forward, args, kwargs).get("labels") is not None

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        local, self.local = self.local, False
        if local and hasattr(output, "logits"):
            output.logits = None  # of a part of the vocabulary
        return output

    def _of_parts(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """As transformers' ForCausalLMLoss (transformers.loss.loss_utils).

        Raises:
            IndexError: A label is of another vocabulary.
        """
        if not self.local:  # somebody else's call, over logits of their own
            raise UsageError(
                "parallel_output=True computes the loss of forwards that are given labels; compute "
                "another one of the logits, which a forward without labels gives"
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1)
        check_numbers(target[target != ignore_index], self.width, "labels")
        rows = logits.reshape(-1, logits.shape[-1])
        apply: Any = _SumOfLosses.apply
        total: torch.Tensor = apply(rows, target, self._ranks, self.width, ignore_index)
        count = num_items_in_batch
        if count is None:
            count = (target != ignore_index).sum()
        return total.div(count)


class _SumOfLosses(torch.autograd.Function):
    """Cross-entropy in float32, summed over the rows that have a target."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ranks: TensorRanks,
        vocabulary: int,
        ignored: int,
    ) -> torch.Tensor:
        values = logits.detach().float()
        own = ranks.own_range(vocabulary)
        here = (target >= own.start) & (target < own.stop)
        column = (target - own.start).clamp(0, len(own) - 1)
        largest = values.max(dim=-1).values
        shapes = [tuple(largest.shape)] * ranks.size
        largest = torch.stack(ranks.gather_parts(largest, shapes)).max(dim=0).values
        values = (values - largest[:, None]).exp_()
        chosen = logits.detach().gather(1, column[:, None])[:, 0].float() * here
        total, chosen = ranks.sum(torch.stack([values.sum(dim=-1), chosen])).unbind()
        counts = target != ignored
        ctx.save_for_backward(values.div_(total[:, None]), column, here, counts)
        ctx.dtype = logits.dtype
        return ((total.log() + largest - chosen) * counts).sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        probabilities, column, here, counts = ctx.saved_tensors
        result = probabilities.clone()
        result.scatter_add_(1, column[:, None], -here.float()[:, None])
        return (result * (grad * counts)[:, None]).to(ctx.dtype), None, None, None, None
