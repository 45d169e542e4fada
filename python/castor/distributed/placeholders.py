"""Placeholders for modules of other pipeline stages, where the model's own forward runs."""

from __future__ import annotations

import inspect
import weakref
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import nn

from castor.distributed.inputs import find_cache
from castor.distributed.stage_transfer import StageTransfer
from castor.errors import UsageError

BIAS = "relative_attention_bias"
"""Name, in an attention of transformers' T5, of the embedding that makes the position bias."""


class _Placeholder(nn.Module):
    """Placeholder for a module of another rank; it refuses to be copied or pickled."""

    def __deepcopy__(self, _memo: Any) -> NoReturn:
        self._refuse("copy")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        self._refuse("pickle")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"other ranks have some stages of this model, and a {what} would lack them: "
            "booster.save_model on all ranks writes the full one"
        )


class PlaceholderBlock(_Placeholder):
    """Placeholder for a block of another stage."""

    def __init__(
        self, index: int, transfer: StageTransfer, *, in_tuples: bool = False, first: int = 0
    ) -> None:
        super().__init__()
        self._index = index
        self._first = first
        self._transfer = transfer
        self._in_tuples = in_tuples

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes hidden states of any shape; returns them, or the ones that the stage received."""
        hidden = args[0] if args else kwargs["hidden_states"]
        self._count_tokens(hidden, (*args, *kwargs.values()))
        hidden = self._passed_on(hidden)
        return (hidden, None) if self._in_tuples else hidden

    def _passed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        transfer = self._transfer
        if transfer.send_hidden:
            return transfer.send_hidden(self._index, hidden)
        at_encoders_end = transfer.encoder_blocks  # EncoderForward sends the encoder's output
        if self._index == transfer.end != at_encoders_end:
            transfer.leave(hidden)
        if self._index == transfer.begin - 1 != at_encoders_end - 1:
            assert transfer.received is not None
            return transfer.enter(transfer.received, hidden.shape[1])
        return hidden

    def _count_tokens(self, hidden: torch.Tensor, given: tuple[Any, ...]) -> tuple[Any, int]:
        """Counts the tokens of a call in the cache, if there is one.

        A cache may ask any layer for its number of tokens. So this layer stores one number for each
        token, as its key and as its value.

        Returns:
            The number of tokens in the cache before the call, and the number of keys that a query
            of this layer sees.
        """
        cache = find_cache(given)
        rows, tokens = hidden.shape[:2]
        if cache is None or not self._transfer.send_hidden:
            return 0, tokens
        cache = getattr(cache, "self_attention_cache", cache)
        layer = self._index - self._first
        seen = torch.as_tensor(cache.get_seq_length(layer)).clone()  # a static cache's own tensor
        numbers = hidden.new_zeros((rows, 1, tokens, 1))
        keys, _ = cache.update(numbers, numbers, layer)
        return seen, keys.shape[-2]


class PlaceholderBiasedBlock(PlaceholderBlock):
    """Placeholder for a block of a row whose first block computes the position bias of all."""

    def __init__(
        self,
        index: int,
        transfer: StageTransfer,
        row: range,
        *,
        block: nn.Module,
        first: nn.Module,
        path: str,
    ) -> None:
        """Makes the placeholder; computes nothing.

        Args:
            index: Number of the block.
            transfer: Stage inputs and outputs.
            row: Numbers of the row's blocks.
            block: The block that this placeholder replaces.
            first: The row's first block.
            path: Name, in the first block, of the attention that computes the bias.
        """
        super().__init__(index, transfer, first=row.start)
        self._row = row
        self._names = list(inspect.signature(type(block).forward).parameters)[1:]
        self._path = path
        self._attention = weakref.ref(first.get_submodule(path))
        self._kept = False

    def keep_bias(self) -> None:
        """Takes the embedding of the bias into this module, under the name that it has."""
        attention = self._attention()
        assert attention is not None
        bare = _with_bias_only(attention)
        parent: nn.Module = self
        *around, last = self._path.split(".")
        for name in around:
            inner = nn.Module()
            parent.add_module(name, inner)
            parent = inner
        parent.add_module(last, bare)
        self._attention, self._kept = weakref.ref(bare), True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes hidden states and biases; returns them, with the position bias if it is needed."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, bias = given["hidden_states"], given.get("position_bias")
        seen, keys = self._count_tokens(hidden, tuple(given.values()))
        if self._index == self._row.start and self._is_needed():
            attention: Any = self._attention()
            bias = attention.compute_bias(
                hidden.shape[1], keys, device=hidden.device, past_seen_tokens=seen
            )
        return self._passed_on(hidden), bias, given.get("encoder_decoder_position_bias")

    def _is_needed(self) -> bool:
        """Whether a later block of the row runs here."""
        transfer = self._transfer
        if transfer.send_hidden:
            return self._kept
        return transfer.begin in self._row[1:]


def _with_bias_only(attention: nn.Module) -> nn.Module:
    """Returns a copy of the attention whose only module is the same embedding of the bias."""
    kind = type(attention)
    bare: nn.Module = kind.__new__(kind)
    nn.Module.__init__(bare)
    for name in vars(attention).keys() - vars(bare).keys():
        setattr(bare, name, vars(attention)[name])
    bare.add_module(BIAS, attention.get_submodule(BIAS))
    return bare


class PlaceholderEnd(_Placeholder):
    """Placeholder for embeddings of the first stage, or for norms and heads of the last."""

    def __init__(
        self, transfer: StageTransfer, *, embeds: bool, tokens: bool, width: int | None = None
    ) -> None:
        """Makes the placeholder; computes nothing.

        Args:
            transfer: Stage inputs and outputs.
            embeds: Whether it replaces embeddings.
            tokens: Whether these are embeddings of tokens (or else of positions, for example).
            width: Number of columns of the replaced module's output; None: as in its input.
        """
        super().__init__()
        self._transfer = transfer
        self._embeds = embeds
        self._tokens = tokens
        self._width = width

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns zeros for embeddings, and otherwise the hidden states, cut to `width` columns.

        Zeros have the shape (rows, tokens, width) for embeddings of tokens, and (1, 1, width) for
        embeddings that are added to these. The latter cannot tell the number of tokens: OPT makes
        positions from a mask that is as long as the cache.
        """
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        if not self._embeds or given.ndim > 2:
            return given[..., : self._width]  # a view; the input may have fewer columns already
        zero = torch.zeros((), dtype=self._transfer.dtype, device=given.device)
        shape = tuple(given.shape) if self._tokens else (1, 1)
        return zero.expand(*shape, self._transfer.width)


class PlaceholderImages(_Placeholder):
    """Placeholder for the embeddings of images of the first stage."""

    def __init__(self, transfer: StageTransfer) -> None:
        super().__init__()
        self._transfer = transfer

    @property
    def patch_embeddings(self) -> Any:
        """Placeholder for the convolution, from whose weight the model reads its computing type."""
        weight = torch.empty(0, dtype=self._transfer.dtype)
        return SimpleNamespace(projection=SimpleNamespace(weight=weight))

    def forward(self, pixel_values: torch.Tensor, **_: Any) -> torch.Tensor:
        """Returns zeros of shape (rows, tokens, width)."""
        transfer = self._transfer
        zero = torch.zeros((), dtype=transfer.dtype, device=pixel_values.device)
        return zero.expand(*transfer.size_of_images(pixel_values), transfer.width)
