"""The loss over vocab-parallel logits, of which each rank has a shard of the columns.

Source: Shoeybi et al. 2019 (Megatron-LM, section 3: the output embedding).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from castor.distributed.inputs import by_name, check_numbers
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_IGNORED = -100
_ALL = slice(None)

Deferred = Callable[[torch.Tensor], torch.Tensor | None]
"""Makes logits without values from hidden states; gives None if they are to be computed."""
InTiles = Callable[[torch.Tensor, torch.Tensor, "Columns"], torch.Tensor | None]
"""Computes the sum of losses from (logits, targets, columns); gives None if logits have values."""


class VocabularyLoss:
    """transformers' loss of a causal language model, over each rank's shard of the vocabulary."""

    def __init__(self, model: nn.Module, ranks: ModelParallelGroup) -> None:
        """Finds out whether the model computes that loss; changes nothing.

        Args:
            model: The model, whose output embedding is vocab-parallel.
            ranks: Tensor-parallel ranks.

        Raises:
            NotImplementedError: The model computes another loss.
        """
        loss = getattr(model, "loss_function", None)
        name = getattr(loss, "__name__", type(loss).__name__)
        if name != "ForCausalLMLoss":
            raise NotImplementedError(
                f"parallel_output=True shards transformers' ForCausalLMLoss, and this "
                f"{type(model).__name__} computes {name}; leave it out"
            )
        self._model = weakref.ref(model)
        self._ranks = ranks
        self.gives_logits = False
        """Whether forwards with labels give logits of the full vocabulary, for a criterion."""
        self._full: Any = loss
        """The model's own loss, for logits of the full vocabulary."""
        self.local = False
        """Whether the output embedding leaves its logits sharded in the forward under way."""
        self.width = 0
        """Full width of the vocabulary; TensorParallel sets it."""
        self.deferred: Deferred | None = None
        """Makes logits without values from the input of the output embedding; None: not used."""
        self._in_tiles: InTiles | None = None

    def start(self) -> None:
        """Replaces the model's loss: forwards with labels compute it from sharded logits."""
        model: Any = self._model()
        model.loss_function = self._of_parts
        model.register_forward_pre_hook(ModuleHook(self._begin), with_kwargs=True)
        model.register_forward_hook(ModuleHook(self._end), always_call=True)

    def leave_logits(self, deferred: Deferred, in_tiles: InTiles) -> None:
        """Defers the logits of this rank's columns: the loss computes them in tiles.

        Args:
            deferred: Makes logits without values; gives None if they are to be computed.
            in_tiles: Computes the loss in tiles; gives None if the logits have values.
        """
        self.deferred, self._in_tiles = deferred, in_tiles

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = by_name(model.forward, args, kwargs).get("labels")
        self.local = labels is not None and not self.gives_logits

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        local, self.local = self.local, False
        if local and hasattr(output, "logits"):
            output.logits = None  # of a shard of the vocabulary
        return output

    def _of_parts(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = _IGNORED,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """Computes the loss as transformers' ForCausalLMLoss does (transformers.loss.loss_utils).

        Raises:
            IndexError: A label is outside the vocabulary.
            UsageError: The loss was called outside of a forward that was given labels.
        """
        if self.gives_logits:
            full: torch.Tensor = self._full(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **others,
            )
            return full
        if not self.local:  # a call by the user, with other logits
            raise UsageError(
                "parallel_output=True computes the loss of forwards that are given labels; compute "
                "another one of the logits, which a forward without labels gives"
            )
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = shift_labels.reshape(-1)
        check_numbers(target, self.width, "labels", ignored=ignore_index)
        rows = logits.reshape(-1, logits.shape[-1])
        own = Columns(target, self._ranks, self.width, ignore_index)
        total = self._in_tiles(rows, target, own) if self._in_tiles else None
        if total is None:
            apply: Any = _SumOfLosses.apply
            total = apply(rows, own)
        count = num_items_in_batch
        if count is None:
            count = (target != ignore_index).sum()
        return cast("torch.Tensor", total).div(count)


class Columns:
    """Cross-entropy in float32 of rows of logits, of which this rank has a shard of the columns.

    The loss is summed over the rows that have a target. Each rank finds the largest logit and the
    sum of exponentials of its columns, and one all-gather combines them. Rows may come in tiles.
    """

    def __init__(
        self, target: torch.Tensor, ranks: ModelParallelGroup, vocabulary: int, ignored: int
    ) -> None:
        """Begins one loss.

        Args:
            target: Target columns in the full vocabulary, or `ignored`; (rows,).
            ranks: Tensor-parallel ranks, which have the columns.
            vocabulary: Size of the full vocabulary.
            ignored: Target of a row that does not count.
        """
        own = ranks.shard_range(vocabulary)
        self._ranks = ranks
        self._here = (target >= own.start) & (target < own.stop)
        self._column = (target - own.start).clamp(0, len(own) - 1)
        self._counts = target != ignored
        self._log_sum: torch.Tensor | None = None

    def seen(self, logits: torch.Tensor, rows: slice = _ALL) -> torch.Tensor:
        """Returns this rank's largest logit, sum of exponentials and target logit of each row.

        Args:
            logits: Logits (rows, own columns).
            rows: Indices of these rows among all.

        Returns:
            float32 (3, rows). The exponentials are relative to the largest logit. The target logit
            is 0 if another rank has it.
        """
        values = logits.detach().float()
        # Where all are -inf, the difference to the largest would be NaN.
        largest = values.max(dim=-1).values.clamp_(min=torch.finfo(torch.float32).min)
        chosen = values.gather(1, self._column[rows, None])[:, 0]
        chosen = chosen.masked_fill(~self._here[rows], 0.0)
        return torch.stack([largest, (values - largest[:, None]).exp_().sum(dim=-1), chosen])

    def total(self, seen: torch.Tensor) -> torch.Tensor:
        """Returns the sum of the losses, from the result of `seen` for all rows. Collective."""
        everyone = torch.stack(
            self._ranks.all_gather_shards(seen, [tuple(seen.shape)] * self._ranks.size)
        )
        largest = everyone[:, 0].max(dim=0).values
        total = (everyone[:, 1] * (everyone[:, 0] - largest).exp_()).sum(dim=0)
        self._log_sum = total.log_() + largest
        return ((self._log_sum - everyone[:, 2].sum(dim=0)) * self._counts).sum()

    def gradient(
        self,
        logits: torch.Tensor,
        rows: slice | torch.Tensor = _ALL,
        grad: torch.Tensor | float = 1.0,
    ) -> torch.Tensor:
        """Returns the gradient of logits, after `total`.

        Args:
            logits: Logits (rows, own columns).
            rows: Indices of these rows among all.
            grad: Gradient of the rows' losses.
        """
        assert self._log_sum is not None
        result = (logits.detach().float() - self._log_sum[rows, None]).exp_()
        result.scatter_add_(1, self._column[rows, None], -self._here[rows, None].float())
        return result.mul_((grad * self._counts[rows])[:, None]).to(logits.dtype)


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, own: Columns) -> torch.Tensor:
        ctx.save_for_backward(logits)
        ctx.own = own
        return own.total(own.seen(logits))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (logits,) = ctx.saved_tensors
        return ctx.own.gradient(logits, grad=grad), None
