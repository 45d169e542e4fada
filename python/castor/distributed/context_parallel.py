"""Context parallelism: each rank computes some tokens of each sequence, in all layers.

Ranks communicate in attention, in one of three modes:

- all-to-all: a rank has some heads of all tokens (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3)
- all-gather: its own queries, and the keys and values of all tokens (Dubey et al. 2024, Llama 3,
  section 3.3.2)
- ring attention: its own queries, and the keys and values of one rank after the other
  (castor.distributed.ring_attention)

The model of transformers stays unchanged: castor.distributed.sequence_attention replaces attention
and masks, and hooks around the model do the rest.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.collectives import all_reduce_mean, gather_tokens
from castor.distributed.inputs import asked_of, by_name, check_inputs
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.sequence_attention import ContextParallelState, Documents, Mode
from castor.distributed.tensor_plan import modules_enclosing_blocks
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_ALONG_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
_KNOWN = {*_ALONG_TOKENS, "attention_mask", "position_ids", "labels", "shift_labels",
          "num_items_in_batch", "use_cache", "return_dict", "output_hidden_states",
          "output_attentions"}  # fmt: skip
_IGNORED = -100
_MIXES_IN_ATTENTION = frozenset(
    {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
)
"""Types of layers, as transformers calls them, that mix tokens in attention only or not at all."""


_ROUTER_LOSS = "its router loss needs all tokens (output_router_logits)"
_OF_PADDING = "create_position_ids_from_input_ids"
"""Function that makes positions from padding in RoBERTa and similar models."""


class ContextParallel:
    """A model whose ranks compute shards of the same sequences (context parallelism).

    This holds for forwards with gradients. Without gradients (generate, evaluation) every rank
    computes all tokens.
    """

    def __init__(
        self, model: nn.Module, ranks: ModelParallelGroup, *, tensor_size: int, mode: Mode
    ) -> None:
        """Finds out whether the model's sequences can be sharded; changes nothing.

        Args:
            model: A model of transformers.
            ranks: Context-parallel ranks.
            tensor_size: Number of tensor-parallel ranks that shard its heads already.
            mode: Mode of context parallelism.

        Raises:
            NotImplementedError: The sequences cannot be sharded; the message says why.
        """
        config: Any = getattr(model, "config", None)
        why = None
        if not getattr(model, "_supports_attention_backend", False):
            why = "its attention does not go through transformers' registry (AttentionInterface)"
        elif getattr(config, "is_encoder_decoder", False) or not _is_causal_model(model):
            why = "it is no decoder whose loss is that of the next token"
        elif "position_ids" not in inspect.signature(model.forward).parameters:
            why = "its forward takes no position_ids"
        elif getattr(config, "output_router_logits", False):
            why = _ROUTER_LOSS
        elif mixing := set(getattr(config, "layer_types", None) or ()) - _MIXES_IN_ATTENTION:
            why = f"its layers of type '{min(mixing)}' mix tokens outside of attention"
        elif any(hasattr(part, _OF_PADDING) for part in model.modules()):
            why = f"its positions come from where its input_ids are no padding ({_OF_PADDING})"
        elif config._attn_implementation not in ("eager", "sdpa"):
            given = config._attn_implementation
            why = (
                f"its attn_implementation is {given!r}; context parallelism takes 'sdpa' and "
                "'eager'"
            )
        exchanges = mode == "all_to_all"
        if why is None and exchanges and config.num_attention_heads % (ranks.size * tensor_size):
            needed = f"tp_size={tensor_size} x sp_size={ranks.size}"
            why = (
                f"its {config.num_attention_heads} attention heads are no multiple of {needed}; "
                "sequence_parallelism_mode='ring_attn' and 'all_gather' take any number of heads"
            )
        if why is not None:
            _refuse(model, ranks, why)
        self._model = weakref.ref(model)
        self._counts_by_mask = any(map(_takes_mask, model.modules()))
        # transformers' eager attention without sinks gives a token that sees none the mean of all.
        self._sees_some = mode == "ring_attn" and config._attn_implementation == "eager"
        self._sees_some &= not any(hasattr(part, "sinks") for part in model.modules())
        self._window: int | None = getattr(config, "sliding_window", None)
        self.ranks = ranks
        self.joins = True
        """Whether outputs are joined to all tokens; only those of the last stage need be."""
        self.gives_logits = False
        """Whether outputs with a loss have the logits of all tokens too."""
        self._state = ContextParallelState(ranks, mode)
        self._called: int | None = None
        """The id() of the module around the blocks that was called by itself; None: none was."""

    def start(self) -> None:
        """Installs the hooks that shard the inputs of forwards with gradients."""
        model: Any = self._model()
        self._state.start(model)
        model.register_forward_pre_hook(ModuleHook(self._divide), with_kwargs=True)
        model.register_forward_hook(ModuleHook(self._join), always_call=True, with_kwargs=True)
        for part in modules_enclosing_blocks(model):
            part.register_forward_pre_hook(ModuleHook(self._enter_submodule))
            part.register_forward_hook(ModuleHook(self._leave_submodule), always_call=True)

    def _divide(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pre-hook of the model: returns this rank's tokens, with their positions and labels."""
        ranks, state = self.ranks, self._state
        state.unsharded = not torch.is_grad_enabled()
        if state.unsharded:
            return args, kwargs
        state.check(model)
        if getattr(model.config, "output_router_logits", False):
            _refuse(model, ranks, _ROUTER_LOSS)
        state.enter()
        check_inputs(ranks, model, args, kwargs)
        kwargs = by_name(model.forward, args, kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        if unknown := given.keys() - _KNOWN:
            raise NotImplementedError(
                f"sp_size={ranks.size} shards sequences, and does not know the argument "
                f"'{min(unknown)}' of {type(model).__name__}; leave it out, or train with sp_size=1"
            )
        if asked_of(model, given, "output_attentions"):
            raise NotImplementedError(
                f"output_attentions=True asks for the attention of all tokens to all, and with "
                f"sp_size={ranks.size} no rank computes it: call the model under torch.no_grad(), "
                "where each computes full sequences, or leave it out"
            )
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None:
            raise UsageError(f"{type(model).__name__} was called without input_ids")
        batch, length = tokens.shape[:2]
        self.tokens_of_rank(length)
        positions = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
        mask = given.get("attention_mask")
        if "position_ids" in given:
            positions = self._positions(given["position_ids"], positions)
            if mask is None:
                cached = given.get("use_cache", getattr(model.config, "use_cache", False))
                state.documents = self._documents(positions, cached=bool(cached))
        if mask is None:
            state.padded = False
            mask = torch.ones((batch, length), dtype=torch.long, device=tokens.device)
        elif mask.dim() != 2:
            raise NotImplementedError(
                f"sp_size={ranks.size} takes an attention_mask of shape (batch, tokens), not "
                f"{tuple(mask.shape)}"
            )
        elif self._counts_by_mask and "position_ids" not in given:
            positions = (mask.cumsum(1) * mask - 1).long()  # as OPT does for all tokens
        if self._sees_some:
            self._check_tokens_see(mask, given)
        part = state.own_tokens(length, tokens.device)
        own = given | {name: given[name][:, part] for name in _ALONG_TOKENS if name in given}
        own |= {"attention_mask": mask, "position_ids": positions[:, part], "use_cache": False}
        if "labels" in given:
            labels, following = given["labels"], _following(given)
            count = given.get("num_items_in_batch")
            if count is None:
                count = (following != _IGNORED).sum()
            # Gradients are averaged over ranks, so a rank's loss is its share times their number.
            own |= {
                "labels": labels[:, :0],  # a loss that shifts labels itself fails
                "shift_labels": following[:, part].contiguous(),
                "num_items_in_batch": torch.as_tensor(count) / ranks.size,
            }
        return (), own

    def _enter_submodule(self, part: nn.Module, _args: tuple[Any, ...]) -> None:
        """Pre-hook of a module around the blocks: called by itself, it computes full sequences."""
        state = self._state
        if state.unsharded or state.entered:
            return
        if torch.is_grad_enabled():
            raise UsageError(
                f"sp_size={self.ranks.size} shards what a call of the full model is given, and "
                f"this {type(part).__name__} was called by itself: call the model, or this under "
                "torch.no_grad(), where every rank computes full sequences"
            )
        state.unsharded, self._called = True, id(part)

    def _leave_submodule(self, part: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        if self._called == id(part):
            self._state.unsharded, self._called = False, None

    def tokens_of_rank(self, length: int) -> int:
        """Returns the number of tokens of each rank, for sequences of `length` tokens.

        Raises:
            UsageError: The tokens cannot be divided evenly.
        """
        pieces = self._state.num_pieces
        if length % pieces:
            into = f" into {pieces} pieces" if self._state.ring else ""
            raise UsageError(
                f"sp_size={self.ranks.size} ranks cannot shard sequences of {length} tokens{into};"
                f" pad them to {-(-length // pieces) * pieces}"
            )
        return length // self.ranks.size

    def _check_tokens_see(self, mask: torch.Tensor, given: Mapping[str, Any]) -> None:
        """Raises UsageError for a token that sees none, not even itself, and is not ignored."""
        seen = mask.ne(0).cumsum(1)
        if self._window is not None:
            seen = seen - nn.functional.pad(seen, (self._window, 0))[:, : seen.shape[1]]
        blind = seen == 0
        if "labels" in given:
            blind &= _following(given) != _IGNORED
        if blind.any():
            row, token = blind.nonzero()[0].tolist()
            raise UsageError(
                f"token {token} of row {row} is padding that sees no token: "
                "attn_implementation='eager' gives it the mean of all tokens, and "
                "sequence_parallelism_mode='ring_attn' nothing; give attn_implementation='sdpa', "
                "its next token a label of -100, or padding behind a row's tokens"
            )

    def _positions(self, given: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        """Expands position_ids to (batch, tokens), like `counted` (0, 1, 2, ... in each row)."""
        if given.dim() != 2 or given.shape[1] != counted.shape[1]:
            raise NotImplementedError(
                f"sp_size={self.ranks.size} takes position_ids of shape (batch, tokens), not "
                f"{tuple(given.shape)}; leave them out, or train with sp_size=1"
            )
        return given.expand_as(counted)

    def _documents(self, positions: torch.Tensor, *, cached: bool) -> Documents | None:
        """Finds the documents that are packed in each row; None: each row is one document."""
        documents = Documents.of(positions)
        if documents and cached:
            raise UsageError(
                "position_ids that begin anew are documents packed behind each other, and with "
                "use_cache=True transformers lets these see each other: call the model with "
                "use_cache=False"
            )
        return documents

    def _join(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Hook of the model: gives the loss of all tokens, or without labels the logits of all."""
        whole = self._state.unsharded
        self._state.leave()
        if whole or output is None or not self.joins:
            return output
        if not hasattr(output, "logits"):
            raise NotImplementedError(
                f"sp_size={self.ranks.size} knows outputs with logits, and this is a "
                f"{type(output).__name__}; call the model with return_dict=True"
            )
        if getattr(output, "loss", None) is not None:
            output.loss = all_reduce_mean(output.loss, self.ranks)
            if not self.gives_logits:
                output.logits = None  # of some tokens
        if output.logits is not None:
            output.logits = self._of_all_tokens(output.logits)
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(map(self._of_all_tokens, output.hidden_states))
        return output

    def _of_all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """Gathers (batch, own tokens, width) to all tokens, in the order of the sequence."""
        gathered, ring = gather_tokens(own, self.ranks), self._state.ring
        return ring.in_order(gathered) if ring else gathered


def _following(given: Mapping[str, Any]) -> torch.Tensor:
    """Returns the label of the token after each token, (batch, tokens)."""
    following: torch.Tensor | None = given.get("shift_labels")
    if following is None:
        following = nn.functional.pad(given["labels"], (0, 1), value=_IGNORED)[:, 1:]
    return following


def _refuse(model: nn.Module, ranks: ModelParallelGroup, why: str) -> NoReturn:
    raise NotImplementedError(
        f"sp_size={ranks.size} cannot shard the sequences of this {type(model).__name__}: {why}"
    )


def _is_causal_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _takes_mask(module: nn.Module) -> bool:
    """Whether a module embeds positions that it counts by the mask if none are given, as OPT's."""
    return isinstance(module, nn.Embedding) and (
        "attention_mask" in inspect.signature(module.forward).parameters
    )
