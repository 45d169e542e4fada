"""Ring attention for context parallelism: ranks pass keys and values on in a ring.

A rank attends from its own tokens to the keys and values that it has just received, and passes
these on meanwhile (Liu et al. 2023, Ring Attention). The log-sum-exp of the scores merges the
results into one. Backward recomputes attention weights from it (Dao 2023, FlashAttention-2, section
3.1). So no rank ever has the keys of all tokens.

A sequence is divided into 2n pieces for n ranks. Rank r has the r-th piece from the front and the
r-th from the back. So causal attention is the same work on each rank (Dubey et al. 2024, Llama 3,
section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, Protocol

import torch

from castor import _C
from castor.distributed.blockwise_attention import Block, Scores, merge
from castor.distributed.device_copies import from_host, on_host
from castor.distributed.parallel_groups import ModelParallelGroup

# --- Placeholders for attention masks under context parallelism, which attention alone may read ---


class PlaceholderMaskError(NotImplementedError, AttributeError):
    """A layer reads an attention mask whose tokens are not those of its hidden states."""


class PlaceholderMask:
    """An attention mask that transformers' layers pass on to attention without reading it.

    The mask covers the full sequence or pieces of it, while hidden states cover the tokens of one
    rank. A layer that derives a mask of its own would compute something else, or fail on sizes.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"'{name}'")

    def __getitem__(self, _: Any) -> NoReturn:
        _refuse("a part of it")

    @classmethod
    def __torch_function__(
        cls, function: Any, _: Any, __: Sequence[Any] = (), ___: Mapping[str, Any] | None = None
    ) -> NoReturn:
        _refuse(f"{getattr(function, '__name__', function)} of it")


class FullMask(PlaceholderMask):
    """The mask of all tokens, or the mask from a rank's tokens to all tokens."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        """Mask in the form that the attention function takes."""


def _refuse(what: str) -> NoReturn:
    raise PlaceholderMaskError(
        f"layers of this model look into the attention mask themselves ({what}), which is of other "
        "tokens than a rank's hidden states where sp_size shards sequences: train with sp_size=1"
    )


# --- Ring attention for context parallelism: ranks pass keys and values on in a ring --------------

_Gradients = tuple[torch.Tensor, torch.Tensor]
"""Gradients of keys and of values."""


class Coming(Protocol):
    """A tensor that is being received from the previous rank."""

    def result(self) -> torch.Tensor:
        """Returns the values, for later work of the current stream."""


@dataclass(frozen=True)
class ComingThroughHost:
    """A tensor that is being received in host memory."""

    host: Future[torch.Tensor]
    """Values in host memory."""
    device: torch.device
    """Device that wants them."""

    def result(self) -> torch.Tensor:
        """Waits for the values, and returns them on the device."""
        return from_host(self.host.result(), self.device)


@dataclass(frozen=True)
class ComingOnDevice:
    """A tensor that is being received on a stream of the process group's own."""

    work: _C.DeviceWork
    received: torch.Tensor

    def result(self) -> torch.Tensor:
        """Orders the current stream behind the message. The host does not wait."""
        self.work.wait()
        return self.received


class Ring:
    """Ranks in a ring, each of which sends tensors to the next; and the tokens of each rank."""

    def __init__(self, ranks: ModelParallelGroup) -> None:
        """Makes the ring and its thread; sends nothing.

        Args:
            ranks: Context-parallel ranks. No other code may use their collectives meanwhile.
        """
        self.ranks = ranks
        # One thread, so that all ranks send the same tensors in the same order.
        self._thread = ThreadPoolExecutor(1, "castor-ring")
        self._last: Future[torch.Tensor] | None = None
        self._on_device: list[_C.DeviceWork] = []

    @property
    def num_pieces(self) -> int:
        """Number of pieces that each sequence is divided into, all of one length."""
        return 2 * self.ranks.size

    def pieces_of(self, rank: int) -> tuple[int, int]:
        """Returns the numbers of a rank's two pieces, in the order of its tokens."""
        return rank, self.num_pieces - 1 - rank

    def tokens_of(self, rank: int, length: int, device: torch.device) -> torch.Tensor:
        """Returns the numbers of a rank's tokens, in its order: int64, (length / ranks,)."""
        piece = length // self.num_pieces
        one_piece = torch.arange(piece, device=device)
        return torch.cat([number * piece + one_piece for number in self.pieces_of(rank)])

    def in_order(self, x: torch.Tensor) -> torch.Tensor:
        """Sorts dimension 1 from rank order, as it was gathered, to the order of the sequence."""
        length = x.shape[1]
        given = [self.tokens_of(rank, length, x.device) for rank in range(self.ranks.size)]
        return x[:, torch.cat(given).argsort()]

    def ring_shift(self, sent: torch.Tensor) -> Coming:
        """Sends a tensor to the next rank, and receives the previous rank's. Collective.

        A stream of the process group for devices does it, or the ring's thread; the caller goes on
        meanwhile.

        Args:
            sent: Contiguous tensor, of the same shape on all ranks.
        """
        if self.ranks.links.sends_from_device(sent):
            on_device = torch.empty_like(sent)
            work = self.ranks.links.begin_ring_shift(sent, on_device)
            self._on_device.append(work)
            return ComingOnDevice(work, on_device)
        # The other thread sees host memory only, since each thread has its own streams.
        own = on_host(sent)
        received = torch.empty_like(own, pin_memory=own is not sent)

        def send() -> torch.Tensor:
            self.ranks.links.ring_shift(own, received)
            return received

        self._last = self._thread.submit(send)
        return ComingThroughHost(self._last, sent.device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Encloses the sends of one pass; on exit none is under way, whatever was raised."""
        try:
            yield
        finally:
            if self._last:
                wait([self._last])
            self._last = None
            for work in self._on_device:  # what is received may be freed from here on
                work.wait()
            self._on_device.clear()


class _Seen(Enum):
    NOTHING = 0
    SOME = 1
    ALL = 2


class PieceMasks(PlaceholderMask):
    """The mask of a sharded forward, made for pieces of the sequence as they are needed.

    Models pass it from transformers' mask functions to attention.
    """

    def __init__(
        self, make: Callable[..., torch.Tensor], options: dict[str, Any], *, length: int, ranks: int
    ) -> None:
        """Makes no mask yet.

        Args:
            make: transformers' function of boolean masks, for scaled_dot_product_attention.
            options: Arguments of `make` for full sequences.
            length: Number of tokens of each rank.
            ranks: Number of context-parallel ranks.
        """
        self._make = make
        self._options = options | {
            "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False
        }  # fmt: skip
        self._length = length // 2
        padding, window = options.get("attention_mask"), options.get("local_size")
        self.causal = bool(
            options.get("allow_is_causal_skip", True)
            and (padding is None or padding.all())
            and (window is None or window > length * ranks)
        )
        """Whether each token sees itself and all those before it, and no other."""
        # The same for each layer. To keep the masks themselves would take memory for all tokens.
        self._seen: dict[tuple[int, int], _Seen] = {}

    def blocks(self, queries: Sequence[int], keys: Sequence[int]) -> Iterator[Block]:
        """Yields a block for each pair of pieces in which a query sees a key.

        Args:
            queries: Numbers of the pieces of the queries, one behind the other.
            keys: Numbers of the pieces of the keys, one behind the other.
        """
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                mask = self._mask(query, key)
                if self._seen[query, key] is not _Seen.NOTHING:
                    yield Block(
                        queries=_piece(i, self._length),
                        keys=_piece(j, self._length),
                        number=(query, key),
                        mask=mask,
                    )

    def _mask(self, query: int, key: int) -> torch.Tensor | None:
        """Returns a mask of shape (batch, 1, tokens, tokens); None: all keys are seen, or none."""
        known = self._seen.get((query, key))
        if known in (_Seen.NOTHING, _Seen.ALL):
            return None
        length = self._length
        places = {"q_length": length, "kv_length": length}
        places |= {"q_offset": query * length, "kv_offset": key * length}
        mask = self._make(**(self._options | places))
        if known is None:
            seen = _Seen.SOME if mask.any() else _Seen.NOTHING
            self._seen[query, key] = _Seen.ALL if mask.all() else seen
        return mask if self._seen[query, key] is _Seen.SOME else None


def _piece(index: int, length: int) -> slice:
    return slice(index * length, (index + 1) * length)


def causal_blocks(
    queries: Sequence[int], keys: Sequence[int], length: int, *, causal: bool
) -> Iterator[Block]:
    """Yields the blocks in which queries see keys without a mask, for the pieces of two ranks.

    Args:
        queries: Numbers of the two pieces of the queries' rank.
        keys: Numbers of the two pieces of the keys' rank.
        length: Number of tokens of a piece.
        causal: Whether tokens see only themselves and those before them.
    """
    front, back, everything = _piece(0, length), _piece(1, length), slice(0, 2 * length)
    number = (queries[0], keys[0])
    if not causal or queries[0] == keys[0]:
        yield Block(queries=everything, keys=everything, number=number, causal=causal)
    elif keys[0] < queries[0]:  # all queries see the front keys, none sees the back
        yield Block(queries=everything, keys=front, number=number)
    else:  # the back queries see all keys, the front ones see none
        yield Block(queries=back, keys=everything, number=number)


@dataclass(frozen=True, kw_only=True)
class RingPass:
    """The attention of one layer in a ring."""

    ring: Ring
    scores: Scores
    masks: PieceMasks | None
    """Masks of the forward; None: there is no mask."""
    causal: bool
    """Whether attention without a mask is causal."""

    def blocks(self, owner: int, length: int) -> Iterator[Block]:
        """Yields the blocks of another rank's keys that this rank's tokens see.

        Args:
            owner: Number of the rank that has the keys.
            length: Number of tokens of each rank.
        """
        mine = self.ring.pieces_of(self.ring.ranks.rank)
        theirs = self.ring.pieces_of(owner)
        if self.masks is None:
            return causal_blocks(mine, theirs, length // 2, causal=self.causal)
        if self.masks.causal:
            return causal_blocks(mine, theirs, length // 2, causal=True)
        return self.masks.blocks(mine, theirs)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    how: RingPass,
) -> torch.Tensor:
    """Computes attention from this rank's tokens to those of all. Collective, as is its backward.

    Args:
        query: (batch, heads, tokens, channels).
        key: (batch, key heads, tokens, channels); a key head serves several query heads.
        value: (batch, key heads, tokens, channels); its number of channels may differ.
        sinks: Attention sinks (heads,), each a score that belongs to no token; None: there are
            none.
        how: Ring, scores and masks, equal on all ranks.

    Returns:
        (batch, tokens, heads, channels of values).
    """
    apply: Any = _RingAttention.apply
    output: torch.Tensor = apply(query, key, value, sinks, how)
    return output.transpose(1, 2).contiguous()  # as transformers' functions give it


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        how: RingPass,
    ) -> torch.Tensor:
        ring, scores = how.ring, how.scores
        length = query.shape[2]
        total = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float32)
        lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
        with ring.turn():
            for owner, keys, values in _travelling(ring, key, value):
                for block in how.blocks(owner, length):
                    part = scores.forward(query, keys, values, block)
                    merge(total, lse, block.queries, *part)
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
            total *= (lse - with_sinks).exp()[..., None]
            lse = with_sinks
        output = total.to(query.dtype)
        # The weights of a token that sees nothing are zeros, whatever this is.
        lse.masked_fill_(lse == -torch.inf, 0.0)
        ctx.how = how
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        how: RingPass = ctx.how
        grad_query = torch.zeros_like(query, dtype=torch.float32)

        def of_block(keys: torch.Tensor, values: torch.Tensor, block: Block) -> _Gradients:
            parts = how.scores.backward(grad, query, keys, values, output, lse, block)
            grad_query[:, :, block.queries] += parts[0]
            return parts[1:]

        grad_key, grad_value = _gradients_of_keys(how, key, value, query.shape[2], of_block)
        grad_sinks = None
        if sinks is not None:
            weights = (sinks.float()[:, None] - lse).exp()
            of_tokens = -weights * (grad.float() * output.float()).sum(-1)
            grad_sinks = of_tokens.sum((0, 2)).to(sinks.dtype)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            None,
        )


def _gradients_of_keys(
    how: RingPass,
    key: torch.Tensor,
    value: torch.Tensor,
    length: int,
    of_block: Callable[[torch.Tensor, torch.Tensor, Block], _Gradients],
) -> _Gradients:
    """Returns the fp32 gradients of this rank's keys and values.

    They are summed on the way from rank to rank, behind the keys and values that they belong to.

    Args:
        how: The layer's attention.
        key: This rank's keys; see ring_attention.
        value: This rank's values; see ring_attention.
        length: Number of tokens of each rank.
        of_block: Computes a block's gradients of the keys and values that it sees.
    """
    ring = how.ring
    # The previous ranks' gradients of the same keys come one shift later than the keys.
    sums: Coming | None = None
    with ring.turn():
        for owner, keys, values in _travelling(ring, key, value):
            own = keys.new_zeros(key.numel() + value.numel(), dtype=torch.float32)
            grad_keys, grad_values = _unpacked(own, key.shape, value.shape)
            for block in how.blocks(owner, length):
                of_keys, of_values = of_block(keys, values, block)
                grad_keys[:, :, block.keys] += of_keys
                grad_values[:, :, block.keys] += of_values
            if sums is not None:
                own += sums.result()
            sums = ring.ring_shift(own)
        assert sums is not None
        return _unpacked(sums.result(), key.shape, value.shape)


def _travelling(
    ring: Ring, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yields the number, keys and values of each rank, this rank's first."""
    rank, size = ring.ranks.rank, ring.ranks.size
    packed = torch.cat([key.detach().flatten(), value.detach().flatten()])
    for step in range(size):
        coming = ring.ring_shift(packed) if step + 1 < size else None
        yield (rank - step) % size, *_unpacked(packed, key.shape, value.shape)
        if coming is not None:
            packed = coming.result()


def _unpacked(
    packed: torch.Tensor, first: torch.Size, second: torch.Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits a flat tensor into two tensors of these shapes."""
    cut = first.numel()
    return packed[:cut].view(first), packed[cut:].view(second)
