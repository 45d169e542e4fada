"""Attention under context parallelism.

Castor registers its own attention and mask functions with transformers. They wrap transformers'
functions, and add the communication of ranks.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from castor.distributed.blockwise_attention import Scores
from castor.distributed.collectives import all_gather, all_to_all
from castor.distributed.parallel_groups import ModelParallelGroup
from castor.distributed.ring_attention import FullMask, PieceMasks, Ring, RingPass, ring_attention
from castor.errors import UsageError

Mode = Literal["all_to_all", "all_gather", "ring_attn"]
"""Mode of context parallelism: all-to-all of heads and tokens, all-gather of keys and values, or
ring attention."""
_KNOWN_TO_RINGS = frozenset({"scaling", "softcap", "dropout", "is_causal", "s_aux"})
_OF_MASKS_AND_LOSSES = frozenset(
    {"sliding_window", "position_ids", "num_items_in_batch", "shift_labels"}
)
"""Arguments that models give attention, which does not use them."""


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents that are packed behind each other in rows; int64 tensors (batch, tokens)."""

    positions: torch.Tensor
    """Position of each token within its document."""
    numbers: torch.Tensor
    """Number of each token's document."""

    @classmethod
    def of(cls, positions: torch.Tensor) -> Documents | None:
        """Finds the documents: one begins where positions do not go on; None: each row is one."""
        begins = positions.diff(prepend=positions[:, :1] - 1) != 1
        return cls(positions=positions, numbers=begins.cumsum(-1)) if begins.any() else None

    def apart(self, sees: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Restricts a mask function of transformers to tokens of the same document."""

        def within(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            positions, numbers = self.positions, self.numbers
            same = numbers[batch, query] == numbers[batch, key]
            return same & sees(batch, head, positions[batch, query], positions[batch, key])

        return within


@dataclass(frozen=True)
class Unsharded:
    """Replacement of ContextParallelState in copies and pickles of a model, which no ranks shard.

    The configs of such models name castor's attention, also in a process that reads another's
    pickle.
    """

    implementation: str
    mode: Mode

    def __post_init__(self) -> None:
        """Registers castor's attention with transformers."""
        _register(self.implementation, self.mode)

    def __reduce__(self) -> tuple[type[Unsharded], tuple[str, Mode]]:
        return Unsharded, (self.implementation, self.mode)


class ContextParallelState:
    """State of attention that the ranks of a context-parallel group compute together."""

    def __init__(self, ranks: ModelParallelGroup, mode: Mode) -> None:
        """Changes nothing yet.

        Args:
            ranks: Context-parallel ranks.
            mode: Mode of context parallelism.
        """
        self.ranks = ranks
        self.mode = mode
        self.ring = Ring(ranks) if mode == "ring_attn" else None
        """Ring that keys and values are passed on in; None: the mode is another one."""
        self.unsharded = False
        """Whether a forward is under way that every rank computes in full."""
        self.entered = False
        """Whether a sharded forward is under way."""
        self.documents: Documents | None = None
        """Documents of the forward under way; None: each row is one."""
        self.padded = True
        """Whether the forward under way was given an attention mask."""

    def start(self, model: Any) -> None:
        """Puts castor's attention into a model of transformers."""
        self._implementation = model.config._attn_implementation
        self._name = _register(self._implementation, self.mode)
        model.set_attn_implementation(self._name)
        for module in model.modules():
            module._castor_cp_state = self

    def __reduce__(self) -> tuple[type[Unsharded], tuple[str, Mode]]:
        return Unsharded, (self._implementation, self.mode)

    def check(self, model: Any) -> None:
        """Checks, before a sharded forward, that the model still has castor's attention.

        Raises:
            UsageError: The model has another attention since boost.
        """
        given = model.config._attn_implementation
        if given != self._name:
            raise UsageError(
                f"the attention of this {type(model).__name__} was set to {given!r} after "
                f"booster.boost, which has put {self._name!r} there, where sp_size="
                f"{self.ranks.size} ranks exchange tokens: call set_attn_implementation before "
                "boost"
            )

    def enter(self) -> None:
        """Begins a sharded forward: masks are made for its tokens from now on."""
        _running.state = self
        self.entered = True

    def leave(self) -> None:
        """Ends a forward, sharded or not."""
        _running.state = self.documents = None
        self.padded = True
        self.unsharded = self.entered = False

    @property
    def num_pieces(self) -> int:
        """Number of pieces that each sequence is divided into, all of one length."""
        return self.ring.num_pieces if self.ring else self.ranks.size

    def own_tokens(self, length: int, device: torch.device) -> slice | torch.Tensor:
        """Returns the numbers of this rank's tokens, for sequences of `length` tokens."""
        if self.ring:
            return self.ring.tokens_of(self.ranks.rank, length, device)
        mine = self.ranks.shard_range(length)
        return slice(mine.start, mine.stop)


_running = threading.local()


def _register(implementation: str, mode: Mode) -> str:
    """Registers castor's attention and masks with transformers; returns their name.

    Args:
        implementation: Name of transformers' attention that castor's wraps.
        mode: Mode of context parallelism.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import (
        ALL_MASK_ATTENTION_FUNCTIONS,
        AttentionMaskInterface,
        causal_mask_function,
    )

    name = f"castor_{mode}_{implementation}"
    modes = {
        "all_to_all": _all_to_all_attention,
        "all_gather": _all_gather_attention,
        "ring_attn": _ring_attention,
    }
    compute_sharded = modes[mode]
    mask_of_whole: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    mask_of_pieces: Callable[..., Any] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def attention(  # names of arguments are transformers'
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        compute = _attention_of(module, implementation)
        # An attribute, not a table's entry: compiled attention reads it, and guards what it reads.
        state: ContextParallelState | Unsharded | None = getattr(module, "_castor_cp_state", None)
        # Outside of forwards, backward recomputes a block, and only sharded forwards have one.
        if not isinstance(state, ContextParallelState) or state.unsharded:
            return compute(module, query, key, value, attention_mask, **options)
        return compute_sharded(compute, state, module, (query, key, value), attention_mask, options)

    def mask(*, q_length: int, kv_length: int, q_offset: Any = 0, **options: Any) -> Any:
        state: ContextParallelState | None = getattr(_running, "state", None)
        if state:
            ranks = state.ranks
            if not state.padded:  # the mask is castor's own, which nobody needs to look at
                options["attention_mask"] = None
            if state.documents:
                sees = state.documents.apart(options.get("mask_function", causal_mask_function))
                options |= {"mask_function": sees, "allow_is_causal_skip": False}
            if mode == "ring_attn":
                return PieceMasks(mask_of_pieces, options, length=q_length, ranks=ranks.size)
            if mode == "all_to_all":
                q_length = kv_length = q_length * ranks.size
            else:
                kv_length, q_offset = q_length * ranks.size, q_length * ranks.rank
        made = mask_of_whole(q_length=q_length, kv_length=kv_length, q_offset=q_offset, **options)
        return FullMask(made) if state and made is not None else made

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


def _all_to_all_attention(
    compute: Callable[..., Any],
    state: ContextParallelState,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Computes attention in mode "all_to_all": some heads over all tokens.

    `states` are queries, keys and values of all heads for this rank's tokens, each of shape (batch,
    heads, tokens, channels). The result has the shape (batch, tokens, heads, channels).
    """
    ranks = state.ranks
    _refuse_values_by_head(module, ranks, options, ("s_aux", "position_bias"))
    mask = _tensor_of(mask, module, state)
    query, key, value = states
    # Each rank needs at least one key-value head.
    repeats = ranks.size // math.gcd(key.shape[1], ranks.size)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (all_to_all(x, ranks, 1, 2) for x in (query, key, value))
    groups = getattr(module, "num_key_value_groups", None)
    try:
        if groups is not None:
            module.num_key_value_groups = query.shape[1] // key.shape[1]
        output, _ = compute(module, query, key, value, mask, **options)
    finally:
        if groups is not None:
            module.num_key_value_groups = groups
    return all_to_all(output, ranks, 1, 2), None


def _all_gather_attention(
    compute: Callable[..., Any],
    state: ContextParallelState,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Computes attention in mode "all_gather": all heads, from this rank's tokens to all.

    Shapes are those of _all_to_all_attention.
    """
    ranks = state.ranks
    _refuse_values_by_head(module, ranks, options, ("position_bias",))  # depends on tokens too
    mask = _tensor_of(mask, module, state)
    query, key, value = states
    key, value = all_gather(key, ranks, 2), all_gather(value, ranks, 2)
    # Without a mask, attention takes the first query for the first token: right on rank 0 only.
    if mask is None and ranks.rank:
        own = ranks.shard_range(key.shape[2])
        tokens = torch.arange(key.shape[2], device=key.device)
        mask = tokens <= tokens[own.start : own.stop, None]
    output, _ = compute(module, query, key, value, mask, **options)
    return output, None


@torch._disable_dynamo  # type: ignore[attr-defined]  # imports torch._dynamo at its first call
def _ring_attention(
    _compute: Callable[..., Any],
    state: ContextParallelState,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: Any,
    options: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Computes attention in mode "ring_attn", with castor's own function.

    All heads attend from this rank's tokens to those of one rank after the other. Shapes are those
    of _all_to_all_attention.
    """
    _refuse_values_by_head(module, state.ranks, options, ("position_bias",))
    # Booleans are switches that a model gives to all its modules.
    asked = {name for name, of in options.items() if of is not None and not isinstance(of, bool)}
    unknown = asked - _KNOWN_TO_RINGS - _OF_MASKS_AND_LOSSES
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} gives its attention '{min(unknown)}', which "
            "sequence_parallelism_mode='ring_attn' does not know; give 'all_gather' or 'all_to_all'"
        )
    if not (mask is None or isinstance(mask, PieceMasks)):
        _refuse_own_mask(module, state)
    query, key, value = states
    assert state.ring
    dropout = options.get("dropout") or 0.0
    scores = Scores(
        scale=query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"],
        softcap=options.get("softcap"),
        dropout=dropout,
        seed=int(torch.randint(1 << 62, ()).item()) if dropout else 0,
    )
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    how = RingPass(ring=state.ring, scores=scores, masks=mask, causal=causal)
    return ring_attention(query, key, value, options.get("s_aux"), how), None


def _tensor_of(mask: Any, module: nn.Module, state: ContextParallelState) -> torch.Tensor | None:
    """Returns the mask tensor for attention; None: there is no mask."""
    if not (mask is None or isinstance(mask, FullMask)):
        _refuse_own_mask(module, state)
    return None if mask is None else mask.tensor


def _refuse_own_mask(module: nn.Module, state: ContextParallelState) -> NoReturn:
    raise NotImplementedError(
        f"{type(module).__name__} gives its attention a mask that transformers has not made, and "
        f"castor knows no other where sp_size={state.ranks.size} ranks shard sequences; train "
        "with sp_size=1"
    )


def _refuse_values_by_head(
    module: Any, ranks: ModelParallelGroup, options: dict[str, Any], names: tuple[str, ...]
) -> None:
    for name in names:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} gives its attention a value for each head ({name}), "
                f"which sp_size={ranks.size} does not shard; train with sp_size=1"
            )
