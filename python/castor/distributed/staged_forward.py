"""A model in stages that is called without gradients, as generate and evaluations do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.utils._pytree import tree_map

from castor.distributed.device_copies import broadcast, from_host, on_host
from castor.distributed.encoder_forward import complete
from castor.distributed.inputs import asked_of, by_name, check_inputs, find_cache
from castor.distributed.part_calls import parts_around_blocks
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.distributed.stage_runs import OF_THE_LAST_STAGE, run_together
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook
from castor.runtime.own_forward import WrappedForward

_CACHES = frozenset(
    {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"}
)
"""Attributes of a layer's cache: keys and values of tokens, one behind the other."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of layers that have such a cache."""


class StagedForward(WrappedForward):
    """The forward of a model whose stages several ranks have; all call it with the same arguments.

    Hidden states go from rank to rank in the middle of it, and what the last stage gives becomes
    every rank's. Within a schedule it is the forward of one stage.
    """

    def __init__(self, model: nn.Module, parallel: PipelineParallel) -> None:
        """Wraps the forward that the model has now.

        Args:
            model: Of transformers, boosted.
            parallel: Its stages.
        """
        super().__init__(model)
        self._parallel = parallel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward.

        Without gradients, outside of schedules: collective.

        Raises:
            UsageError: Ranks were given different arguments, or have let go of each other.
            NotImplementedError: Somebody asks for what no rank has of all layers.
            Error: A rank with another stage is gone, or could not go on; nor can this one then.
            Exception: What the model raised here.
        """
        model, parallel, forward = self.module, self._parallel, self.wrapped
        if parallel.running:
            return forward(*args, **kwargs)
        parallel.check_connected()
        kwargs = by_name(forward, args, kwargs)
        if parallel.encoder:
            kwargs = complete(model, kwargs)
        check_inputs(parallel.ranks, model, (), kwargs)
        check_outputs(model, kwargs)
        _check_cache(model, kwargs)
        parallel.ask_for_router_logits(model, kwargs)
        if not asked_of(model, kwargs, "return_dict", default=True):
            raise NotImplementedError(
                f"return_dict=False leaves the outputs of this {type(model).__name__} without the "
                "names by which the last stage tells the others of them; leave it out"
            )
        if not parallel.has_last:
            kwargs = {name: x for name, x in kwargs.items() if name not in OF_THE_LAST_STAGE}
        given: list[Any] = []

        def work() -> None:
            with parallel.modules.together(self.send_hidden):
                own = forward(**kwargs)
            with parallel.awaiting():
                given.append(self._share(own))

        run_together(parallel, model, work)
        return given[0]

    def send_hidden(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Sends hidden states to a block of another rank, or receives them from it."""
        parallel, rank = self._parallel, self._parallel.ranks.rank
        owners, transfer = parallel.rank_of_block, parallel.modules.transfer
        decoder = transfer.encoder_blocks  # its first block is given nothing of the block before
        if index not in (0, decoder) and owners[index - 1] == rank:
            sent = on_host(transfer.join(hidden, index).contiguous())
            with parallel.awaiting():
                distributed.send(sent, group=parallel.group, group_dst=owners[index])
        if index + 1 not in (decoder, len(owners)) and owners[index + 1] == rank:
            rows, tokens = hidden.shape[:2]
            received = transfer.empty(rows, tokens, index + 1)
            with parallel.awaiting():
                distributed.recv(received, group=parallel.group, group_src=owners[index])
            hidden = transfer.split(from_host(received, hidden.device), index + 1)
        return hidden

    def _share(self, own: Any) -> Any:
        """The last stage's outputs, with what else this rank's forward gave (a cache)."""
        group, last = self._parallel.group, self._parallel.rank_of_block[-1]
        tensors = {name: x for name, x in own.items() if _holds_tensors(x)}
        said = [tree_map(lambda x: torch.empty_like(x, device="meta"), tensors)]
        distributed.broadcast_object_list(said, group=group, group_src=last)

        def share(like: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
            device = self._parallel.device
            return broadcast(mine, like.shape, like.dtype, group=group, source=last, device=device)

        fields = {name: x for name, x in own.items() if name not in tensors}
        for name, like in said[0].items():
            mine = tensors[name] if self._parallel.has_last else tree_map(lambda _: None, like)
            fields[name] = tree_map(share, like, mine)
        return type(own)(**fields)


def refuse_parts(model: nn.Module, parallel: PipelineParallel) -> None:
    """From now on only the model calls the modules around its blocks, of which ranks have stages.

    Args:
        model: Boosted.
        parallel: Its stages; an encoder is a whole of its own.
    """
    for part in parts_around_blocks(model):
        if part is not parallel.encoder:
            part.register_forward_pre_hook(ModuleHook(_check_caller, parallel), prepend=True)


def _check_caller(parallel: PipelineParallel, part: nn.Module, _args: tuple[Any, ...]) -> None:
    if not parallel.running:
        raise UsageError(
            f"rank {parallel.ranks.rank} of {parallel.ranks.size} has some stages of the model that"
            f" this {type(part).__name__} is a part of, and it was called by itself: use "
            "booster.execute_pipeline(data_iter, model, criterion, optimizer), or call the model "
            "under torch.no_grad() on all ranks"
        )


def check_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Nobody asks for outputs that no rank of a model in stages has.

    Args:
        model: Of transformers.
        kwargs: Of its forward, by name.

    Raises:
        NotImplementedError: Somebody does.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if asked_of(model, kwargs, name):
            raise NotImplementedError(
                f"{name}=True asks for what all layers of this {type(model).__name__} give, and "
                "with pp_size no rank has all: leave it out"
            )


def _check_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Layers of other ranks only count the tokens in their cache."""
    cache = find_cache(kwargs.values())
    caches = [getattr(cache, f"{of}_attention_cache", cache) for of in ("self", "cross")]
    layers = [layer for one in caches for layer in getattr(one, "layers", ())]
    kinds = {type(layer).__name__ for layer in layers} - _CACHES
    if asked_of(model, kwargs, "use_cache"):
        kinds |= {*(getattr(model.config, "layer_types", None) or ())} - _ATTENTION
    if kinds:
        raise NotImplementedError(
            f"this {type(model).__name__} keeps other things than keys and values of tokens "
            f"({', '.join(sorted(kinds))}), which castor does not know with pp_size: call it with "
            "use_cache=False, or give a DynamicCache"
        )


def _holds_tensors(output: Any) -> bool:
    """Whether it is a tensor, or several (router logits)."""
    several = output if isinstance(output, tuple) else (output,)
    return all(isinstance(x, torch.Tensor) for x in several)
