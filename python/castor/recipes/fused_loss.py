"""Predicts the memory of TRL's loss, which takes log-probabilities of tiles of rows, not logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.kernels import chunked_logprob
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

from castor.estimate.metatrace import Recorder
from castor.estimate.operators import Results

_TILES = ("_forward_tile", "_backward_tile")
"""TRL's functions that work on a tile of logits. On a GPU kernels take their place, in the tile."""


class FusedLoss:
    """TRL's ChunkedLogProbFunction over a model's output embedding, on the meta device."""

    def __init__(self, head: nn.Linear, on_host: bool) -> None:
        """Takes the head.

        Args:
            head: The output embedding.
            on_host: Whether the device is the CPU device, where TRL has no kernels.
        """
        self._trl: Any = chunked_logprob
        self._head, self._on_host = head, on_host
        self._known: dict[int, int] = {}

    def rows_at_once(self, rows: int) -> Iterator[int]:
        """Yields the numbers of rows that castor tries one after the other, as fit_fused_heads."""
        at_once = min(rows, int(self._trl.TOKEN_CHUNK_SIZE))
        while at_once > 1:
            yield at_once
            at_once = -(-at_once // 2)
        yield 1

    def num_bytes(self, rows: int, at_once: int) -> int:
        """Returns the peak bytes of forward and backward, gradients included.

        Args:
            rows: Number of rows of hidden states.
            at_once: Number of rows whose logits are in memory at once.
        """
        if at_once not in self._known:
            self._known[at_once] = self._measured(at_once)
        # Rows of further tiles have a gradient, summed in float32 and rounded at the end.
        further = (rows - at_once) * self._head.in_features
        return self._known[at_once] + further * (4 + self._head.weight.element_size())

    def _measured(self, rows: int) -> int:
        weight = self._head.weight
        hidden = weight.new_empty((rows, self._head.in_features)).requires_grad_()
        targets = torch.empty((rows,), dtype=torch.long, device="meta")
        held = [hidden, weight, targets]
        bias: torch.Tensor | None = self._head.bias
        recorder = Recorder(held if bias is None else [*held, bias], Results())
        with self._kernels(), recorder:
            recorder.event(0, 0)
            columns = min(_CHUNKED_LOGPROB_CHUNK_SIZE, weight.shape[0])
            found = self._trl.ChunkedLogProbFunction.apply(
                hidden, weight, bias, targets, 1.0, columns, None, 1.0,
                ("entropy", "is_top1"),
            )  # fmt: skip
            (-found[0].sum()).backward()
        weight.grad = None
        if bias is not None:
            bias.grad = None
        return recorder.trace[0].nonmodel_bytes

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        """Has tiles be worked on in place on a GPU, as by TRL's kernels.

        TRL asks for the device's autocast, which the meta device has not.
        """
        before = {name: getattr(self._trl, name) for name in _TILES}
        torch_module: Any = torch
        is_autocast_enabled = torch.is_autocast_enabled
        torch_module.is_autocast_enabled = lambda *_: False
        try:
            if not self._on_host:
                for name in _TILES:
                    setattr(self._trl, name, lambda *_, **__: None)
            yield
        finally:
            torch_module.is_autocast_enabled = is_autocast_enabled
            for name, function in before.items():
                setattr(self._trl, name, function)
