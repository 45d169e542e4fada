"""Calls of a model in pipeline stages without gradients, as in generate and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn
from torch.utils._pytree import tree_map

from castor.distributed.device_copies import broadcast, exchange, from_host, moved
from castor.distributed.inputs import asked_of, by_name, check_inputs, find_cache
from castor.distributed.pipeline_parallel import PipelineParallel
from castor.distributed.pipeline_plan import SHIFT
from castor.distributed.stage_runs import OF_THE_LAST_STAGE, run_collectively
from castor.distributed.stage_transfer import SendHidden, tokens_of
from castor.distributed.tensor_plan import modules_enclosing_blocks
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook, WrappedForward

# --- Encoder-decoders in pipeline stages, which have encoder blocks, decoder blocks or both -------


class EncoderForward(WrappedForward):
    """The forward of an encoder, whose output is known on each stage with decoder blocks.

    generate calls the encoder by itself, on all ranks.
    """

    def __init__(
        self, encoder: nn.Module, parallel: PipelineParallel, send_hidden: SendHidden
    ) -> None:
        """Wraps the forward that the encoder has now.

        Args:
            encoder: The encoder of a boosted model.
            parallel: Stages of the model.
            send_hidden: Sends hidden states between ranks where all stages run in one call.
        """
        super().__init__(encoder)
        self._parallel = parallel
        self._send_hidden = send_hidden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; the last hidden states are real where this stage knows them.

        Outside of the model's forward the call is collective, and without gradients.

        Raises:
            UsageError: Ranks were given different arguments, or have disconnected from each other.
            Error: A rank with another stage is gone or could not go on, so this one cannot either.
            Exception: The encoder raised it on this rank.
        """
        parallel, encoder = self._parallel, self.module
        if parallel.running:
            return self._in_model(args, kwargs)
        parallel.check_connected()
        named = by_name(self.wrapped, args, kwargs)
        check_inputs(parallel.ranks, encoder, (), named)
        given: list[Any] = []

        def work() -> None:
            with parallel.modules.running_stages(self._send_hidden):
                given.append(self._in_model((), named))

        run_collectively(parallel, encoder, work)
        return given[0]

    def _in_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        transfer = self._parallel.modules.transfer
        outputs = self.wrapped(*args, **kwargs)
        states = outputs.last_hidden_state
        if transfer.send_hidden:
            outputs.last_hidden_state = self._of_last(states)
            return outputs
        if transfer.begin >= transfer.encoder_blocks:
            assert transfer.received is not None
            outputs.last_hidden_state = transfer.received[:, : states.shape[1]].contiguous()
        transfer.encoded = outputs.last_hidden_state
        if transfer.end == transfer.encoder_blocks:
            transfer.sent = transfer.encoded
        return outputs

    def _of_last(self, states: torch.Tensor) -> torch.Tensor:
        """Broadcasts the hidden states of the rank with the encoder's last block."""
        parallel = self._parallel
        group, sent_from = parallel.transport
        owner = parallel.rank_of_block[parallel.modules.transfer.encoder_blocks - 1]
        return broadcast(
            states if owner == parallel.ranks.rank else None,
            states.shape,
            states.dtype,
            group=group,
            source=owner,
            device=states.device,
            sent_from=sent_from,
        )


def complete(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an encoder-decoder's arguments, with decoder inputs made from labels if needed.

    All stages need decoder inputs, and only the last one gets labels.

    Args:
        model: A model of transformers.
        kwargs: Arguments of its forward, by name.

    Raises:
        UsageError: There are no inputs for the encoder or for the decoder.
    """
    if kwargs.get("encoder_outputs") is None:
        tokens_of(kwargs)
    labels, found = kwargs.get("labels"), dict(kwargs)
    named = ("decoder_input_ids", "decoder_inputs_embeds")
    if labels is not None and all(kwargs.get(name) is None for name in named):
        found["decoder_input_ids"] = getattr(model, SHIFT)(labels)
    tokens_of(found, of="decoder_")
    return found


def check_encodes(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Checks that a batch of a schedule has the encoder's inputs, not its outputs.

    Raises:
        UsageError: The batch has encoder_outputs.
    """
    if batch.get("encoder_outputs") is not None:
        raise UsageError(
            f"the batch has encoder_outputs, and the stages of this {type(model).__name__} compute "
            "them of input_ids; leave them out"
        )


# --- Calls of a model in pipeline stages without gradients, as in generate and evaluation ---------

_CACHES = frozenset(
    {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"}
)
"""Classes of layer caches that hold the keys and values of successive tokens."""
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Types of layers with such a cache."""


class StagedForward(WrappedForward):
    """The forward of a model in pipeline stages; all ranks call it with the same arguments.

    Hidden states go from rank to rank within the call, and every rank gets the last stage's
    outputs. Within a schedule it is the forward of one stage.
    """

    def __init__(self, model: nn.Module, parallel: PipelineParallel) -> None:
        """Wraps the forward that the model has now.

        Args:
            model: A boosted model of transformers.
            parallel: Its stages.
        """
        super().__init__(model)
        self._parallel = parallel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward.

        Outside of schedules the call is collective, and without gradients.

        Raises:
            UsageError: Ranks were given different arguments, or have disconnected from each other.
            NotImplementedError: The call asks for outputs that no rank of a pipeline has, for
                return_dict=False, or for a cache that castor does not know.
            Error: A rank with another stage is gone or could not go on, so this one cannot either.
            Exception: The model raised it on this rank.
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
            with parallel.modules.running_stages(self.send_hidden):
                own = forward(**kwargs)
            with parallel.awaiting():
                given.append(self._share(own))

        run_collectively(parallel, model, work)
        return given[0]

    def send_hidden(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Sends hidden states to another rank's block, or receives that block's output.

        Args:
            index: Number of the block, whose placeholder calls this.
            hidden: Hidden states before the block.

        Returns:
            The received hidden states, if this rank has the next block; else `hidden`.
        """
        parallel, rank = self._parallel, self._parallel.ranks.rank
        owners, transfer = parallel.rank_of_block, parallel.modules.transfer
        group, device = parallel.transport
        decoder = transfer.encoder_blocks  # its first block takes no output of the block before
        if index not in (0, decoder) and owners[index - 1] == rank:
            sent = transfer.join(hidden, index).contiguous()
            with parallel.awaiting():
                exchange(distributed.isend, moved(sent, device), group, owners[index])
        if index + 1 not in (decoder, len(owners)) and owners[index + 1] == rank:
            rows, tokens = hidden.shape[:2]
            received = transfer.empty(rows, tokens, index + 1, device=device)
            with parallel.awaiting():
                exchange(distributed.irecv, received, group, owners[index])
            hidden = transfer.split(from_host(received, hidden.device), index + 1)
        return hidden

    def _share(self, own: Any) -> Any:
        """Broadcasts the last stage's tensors; keeps the other outputs of this rank (a cache)."""
        group, last = self._parallel.group, self._parallel.rank_of_block[-1]
        tensors = {name: x for name, x in own.items() if _holds_tensors(x)}
        said = [tree_map(lambda x: torch.empty_like(x, device="meta"), tensors)]
        distributed.broadcast_object_list(said, group=group, group_src=last)

        tensor_group, sent_from = self._parallel.transport

        def share(like: torch.Tensor, mine: torch.Tensor | None) -> torch.Tensor:
            return broadcast(
                mine, like.shape, like.dtype,
                group=tensor_group, source=last, device=self._parallel.device, sent_from=sent_from,
            )  # fmt: skip

        fields = {name: x for name, x in own.items() if name not in tensors}
        for name, like in said[0].items():
            mine = tensors[name] if self._parallel.has_last else tree_map(lambda _: None, like)
            fields[name] = tree_map(share, like, mine)
        return type(own)(**fields)


def refuse_submodules(model: nn.Module, parallel: PipelineParallel) -> None:
    """Refuses calls of the modules around the blocks, unless they come from the model's forward.

    Args:
        model: The boosted model.
        parallel: Its stages. The encoder may be called by itself (EncoderForward).
    """
    for part in modules_enclosing_blocks(model):
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
    """Checks that a call asks for no outputs of all layers, which no rank of a pipeline has.

    Args:
        model: A model of transformers.
        kwargs: Arguments of its forward, by name.

    Raises:
        NotImplementedError: The call asks for output_hidden_states or output_attentions.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if asked_of(model, kwargs, name):
            raise NotImplementedError(
                f"{name}=True asks for what all layers of this {type(model).__name__} give, and "
                "with pp_size no rank has all: leave it out"
            )


def _check_cache(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Checks that the cache holds keys and values only: placeholders only count its tokens."""
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
    """Whether an output is a tensor, or a tuple of tensors (router logits)."""
    several = output if isinstance(output, tuple) else (output,)
    return all(isinstance(x, torch.Tensor) for x in several)
