"""Divides sequences among ranks: each computes some tokens of all layers; in attention all meet.

There a rank has some heads of all tokens (Jacobs et al. 2023, DeepSpeed-Ulysses, section 3), or its
own tokens and the keys and values of all (Dubey et al. 2024, Llama 3, section 3.3.2). The model is
transformers', unchanged: attention and its mask go through the registries that transformers has for
both, the rest is hooks around the model.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from castor.distributed.inputs import by_name, check_inputs
from castor.distributed.tensor_ranks import TensorRanks
from castor.errors import UsageError
from castor.runtime.hooks import ModuleHook

_ALONG_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
_KNOWN = {*_ALONG_TOKENS, "attention_mask", "position_ids", "labels", "shift_labels",
          "num_items_in_batch", "use_cache", "return_dict"}  # fmt: skip
_IGNORED = -100
Mode = Literal["all_to_all", "all_gather"]
"""How ranks meet in attention: they exchange heads for tokens, or gather keys and values."""


class SequenceParallel:
    """A model whose ranks take parts of the same sequences.

    With gradients, that is; without, every rank computes all tokens: generate and evaluation.
    """

    def __init__(
        self, model: nn.Module, ranks: TensorRanks, *, tensor_size: int, mode: Mode
    ) -> None:
        """Finds out whether the model's sequences can be divided; nothing is changed.

        Args:
            model: Of transformers.
            ranks: Among which.
            tensor_size: Ranks among which its heads are divided already.
            mode: How.

        Raises:
            NotImplementedError: They cannot; the message says why.
        """
        config: Any = getattr(model, "config", None)
        name = type(model).__name__
        why = None
        if not getattr(model, "_supports_attention_backend", False):
            why = "its attention does not go through transformers' registry (AttentionInterface)"
        elif getattr(config, "is_encoder_decoder", False) or not _is_causal_model(model):
            why = "it is no decoder whose loss is that of the next token"
        elif "position_ids" not in inspect.signature(model.forward).parameters:
            why = "its forward takes no position_ids"
        elif getattr(config, "output_router_logits", False):
            why = "its router loss needs all tokens (output_router_logits)"
        elif config._attn_implementation not in ("eager", "sdpa"):
            given = config._attn_implementation
            why = f"its attn_implementation is {given!r}, and 'sdpa' and 'eager' can be divided"
        exchanges = mode == "all_to_all"
        if why is None and exchanges and config.num_attention_heads % (ranks.size * tensor_size):
            needed = f"tp_size={tensor_size} x sp_size={ranks.size}"
            why = f"its {config.num_attention_heads} attention heads are no multiple of {needed}"
        if why is not None:
            raise NotImplementedError(
                f"sp_size={ranks.size} cannot divide the sequences of this {name}: {why}"
            )
        self._model = weakref.ref(model)
        self._ranks = ranks
        self._mode = mode
        self._whole = False
        """Whether a forward is under way that every rank computes whole."""

    def start(self) -> None:
        """Divides what forward is given from now on."""
        model: Any = self._model()
        model.set_attn_implementation(_register(model.config._attn_implementation, self._mode))
        for module in model.modules():
            _divided[module] = self
        model.register_forward_pre_hook(ModuleHook(self._divide), with_kwargs=True)
        model.register_forward_hook(ModuleHook(self._join), always_call=True, with_kwargs=True)

    @property
    def ranks(self) -> TensorRanks | None:
        """Those to exchange heads with in the attention that runs now."""
        # Without a forward: a block is recomputed in backward, which whole forwards have not.
        return None if self._whole else self._ranks

    def _divide(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A pre-hook: this rank's tokens, their positions and labels."""
        ranks = self._ranks
        self._whole = not torch.is_grad_enabled()
        if self._whole:
            return args, kwargs
        _running.ranks = ranks
        check_inputs(ranks, model, args, kwargs)
        kwargs = by_name(model.forward, args, kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        if unknown := given.keys() - _KNOWN:
            raise NotImplementedError(
                f"sp_size={ranks.size} divides sequences, and knows nothing of the argument "
                f"'{min(unknown)}' of {type(model).__name__}; leave it out, or train with sp_size=1"
            )
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None:
            raise UsageError(f"{type(model).__name__} was called without input_ids")
        batch, length = tokens.shape[:2]
        if length % ranks.size:
            raise UsageError(
                f"sp_size={ranks.size} ranks cannot divide sequences of {length} tokens; pad them "
                f"to {-(-length // ranks.size) * ranks.size}"
            )
        positions = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
        if "position_ids" in given and not torch.equal(
            given["position_ids"].expand(batch, -1), positions
        ):
            raise NotImplementedError(
                "position_ids other than 0, 1, 2, ... (packed documents) do not go with "
                f"sp_size={ranks.size}; leave them out"
            )
        mask = given.get("attention_mask")
        if mask is None:
            mask = torch.ones((batch, length), dtype=torch.long, device=tokens.device)
        elif mask.dim() != 2:
            raise NotImplementedError(
                f"sp_size={ranks.size} takes an attention_mask of shape (batch, tokens), not "
                f"{tuple(mask.shape)}"
            )
        mine = ranks.own_range(length)
        part = slice(mine.start, mine.stop)
        own = given | {name: given[name][:, part] for name in _ALONG_TOKENS if name in given}
        own |= {"attention_mask": mask, "position_ids": positions[:, part], "use_cache": False}
        if "labels" in given:
            labels = given["labels"]
            following = given.get("shift_labels")
            if following is None:
                following = nn.functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]
            count = given.get("num_items_in_batch")
            if count is None:
                count = (following != _IGNORED).sum()
            # Ranks' gradients become their mean: each loss is its tokens' share, times the ranks.
            own |= {
                "labels": labels[:, :0],  # a loss that shifts labels itself fails
                "shift_labels": following[:, part].contiguous(),
                "num_items_in_batch": torch.as_tensor(count) / ranks.size,
            }
        return (), own

    def _join(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """A hook: the loss of all tokens; without labels the logits of all."""
        whole, self._whole, _running.ranks = self._whole, False, None
        if whole or output is None:
            return output
        if not hasattr(output, "logits"):
            raise NotImplementedError(
                f"sp_size={self._ranks.size} knows outputs with logits, and this is a "
                f"{type(output).__name__}; call the model with return_dict=True"
            )
        if getattr(output, "loss", None) is not None:
            output.loss = self._ranks.mean(output.loss)
            output.logits = None  # of some tokens
        else:
            output.logits = self._ranks.gather_tokens(output.logits)
        return output


_divided: weakref.WeakKeyDictionary[nn.Module, SequenceParallel] = weakref.WeakKeyDictionary()
"""By each module of their models."""
_running = threading.local()


def _register(implementation: str, mode: Mode) -> str:
    """The name under which transformers finds attention in which ranks meet."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    name = f"castor_{mode}_{implementation}"
    meet = _exchanged if mode == "all_to_all" else _gathered
    mask_of_whole: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[implementation]

    def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **options: Any) -> Any:
        compute = _attention_of(module, implementation)
        model = _divided.get(module)
        ranks = model.ranks if model else None
        if ranks is None:
            return compute(module, q, k, v, mask, **options)
        return meet(compute, ranks, module, (q, k, v), mask, options)

    def mask(*, q_length: int, kv_length: int, q_offset: Any = 0, **options: Any) -> Any:
        ranks: TensorRanks | None = getattr(_running, "ranks", None)
        if ranks and mode == "all_to_all":
            q_length = kv_length = q_length * ranks.size
        elif ranks:
            kv_length, q_offset = q_length * ranks.size, q_length * ranks.rank
        return mask_of_whole(q_length=q_length, kv_length=kv_length, q_offset=q_offset, **options)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def _attention_of(module: nn.Module, implementation: str) -> Callable[..., Any]:
    if implementation == "eager":
        theirs = sys.modules[type(module).__module__]
        eager: Callable[..., Any] = theirs.eager_attention_forward
        return eager
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    compute: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[implementation]
    return compute


def _exchanged(
    compute: Callable[..., Any],
    ranks: TensorRanks,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention of some heads over all tokens; `states` are of all heads and some tokens.

    Queries, keys and values have the shape (batch, heads, tokens, channels), what is given back
    (batch, tokens, heads, channels).
    """
    _refuse_values_by_head(module, ranks, options, ("s_aux", "position_bias"))
    query, key, value = states
    # Of grouped heads each rank needs one at least.
    repeats = ranks.size // math.gcd(key.shape[1], ranks.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (ranks.swap(x, 1, 2) for x in (query, key, value))
    groups = getattr(module, "num_key_value_groups", None)
    try:
        if groups is not None:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        output, _ = compute(module, query, key, value, mask, **options)
    finally:
        if groups is not None:
            module.num_key_value_groups = groups
    return ranks.swap(output, 1, 2), None


def _gathered(
    compute: Callable[..., Any],
    ranks: TensorRanks,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Attention of all heads, from some tokens to all; shapes as for _exchanged."""
    _refuse_values_by_head(module, ranks, options, ("position_bias",))  # is of tokens as well
    query, key, value = states
    key, value = ranks.all_parts(key, 2), ranks.all_parts(value, 2)
    # Without a mask a token sees those before it, counted from the first of all: rank 0's own.
    if mask is None and ranks.rank:
        own = ranks.own_range(key.shape[2])
        tokens = torch.arange(key.shape[2], device=key.device)
        mask = tokens <= tokens[own.start : own.stop, None]
    output, _ = compute(module, query, key, value, mask, **options)
    return output, None


def _refuse_values_by_head(
    module: Any, ranks: TensorRanks, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    for name in names:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} gives its attention a value for each head ({name}), "
                f"which sp_size={ranks.size} does not divide; train with sp_size=1"
            )


def _is_causal_model(model: nn.Module) -> bool:
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
