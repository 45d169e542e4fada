"""Attention to some of the keys, and how several of these become attention to all.

Dao 2023, FlashAttention-2, section 3.1: with the log-sum-exp of the scores of each block their
results are added up, and with that of all scores backward makes the weights of any block again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some queries, and the keys of which they see some."""

    queries: slice
    """Tokens of the queries."""
    keys: slice
    """Tokens of the keys."""
    number: tuple[int, int]
    """No other block of the sequence has it."""
    causal: bool = False
    """Whether the n-th query sees n keys only."""
    mask: torch.Tensor | None = None
    """(batch, 1, queries, keys), true where one is seen; None: as `causal` says."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The computation of attention weights, and of the output by them."""

    scale: float
    softcap: float | None = None
    """Scores go through softcap * tanh(score / softcap)."""
    dropout: float = 0.0
    """The share of weights that become zero."""
    seed: int = 0
    """Seed of dropout."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of a block, and the log-sum-exp of its scores.

        Args:
            query: (batch, heads, tokens, channels) of all blocks; see ring_attention.
            key: Likewise.
            value: Likewise.
            block: Which.

        Returns:
            (batch, heads, queries, channels); fp32 (batch, heads, queries), -inf where nothing is
            seen.
        """
        query, key, value = _of_block(query, key, value, block)
        if self._fused(query, value):
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, block.causal, attn_mask=_added(block, query.dtype),
                scale=self.scale,
            )  # fmt: skip
            if block.mask is not None:  # the kernel's is 0 where nothing is seen
                lse = lse.masked_fill(~block.mask.any(-1), -torch.inf)
            return output, lse
        scores, _ = self._scores(query, key, block)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp()
        if (kept := self._kept(scores, block)) is not None:
            weights *= kept
        output = weights @ value.float()[:, :, None]
        return output.flatten(1, 2), lse.flatten(1, 2)

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        block: Block,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the queries, keys and values of a block, of its part of the weights.

        Args:
            grad: Of `output`.
            query: As forward takes it.
            key: Likewise.
            value: Likewise.
            output: Of all blocks together, (batch, heads, tokens, channels).
            lse: Likewise, (batch, heads, tokens); finite.
            block: Which.
        """
        grad, output, lse = (of[:, :, block.queries] for of in (grad, output, lse))
        query, key, value = _of_block(query, key, value, block)
        if self._fused(query, value):
            of_all: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
            of_all = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, output, lse, 0.0, block.causal,
                attn_mask=_added(block, query.dtype), scale=self.scale,
            )  # fmt: skip
            return of_all
        heads = (key.shape[1], -1)
        grad, output, lse = grad.float(), output.float(), lse.unflatten(1, heads)
        of_tokens = (grad * output).sum(-1, keepdim=True).unflatten(1, heads)
        grad = grad.unflatten(1, heads)
        scores, slope = self._scores(query, key, block)
        weights = (scores - lse[..., None]).exp()
        of_weights = grad @ value.float()[:, :, None].transpose(-1, -2)
        dropped = weights
        if (kept := self._kept(scores, block)) is not None:
            of_weights *= kept
            dropped = weights * kept
        of_value = (dropped.transpose(-1, -2) @ grad).sum(2)
        of_scores = weights * (of_weights - of_tokens) * self.scale
        if slope is not None:
            of_scores *= slope
        of_query = of_scores @ key.float()[:, :, None]
        of_key = (of_scores.transpose(-1, -2) @ query.float().unflatten(1, heads)).sum(2)
        return of_query.flatten(1, 2), of_key, of_value

    def _fused(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether torch's kernel computes these, which holds no scores of all of a block."""
        plain = self.softcap is None and self.dropout == 0
        of_cpus = query.device.type in ("cpu", "meta")
        return of_cpus and plain and query.shape[-1] == value.shape[-1]

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 (batch, key heads, heads of each, queries, keys), -inf where a key is not seen.

        And the slope of the cap there; None: there is none.
        """
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        scores = grouped @ key.float()[:, :, None].transpose(-1, -2) * self.scale
        slope = None
        if self.softcap is not None:
            capped = (scores / self.softcap).tanh()
            scores, slope = capped * self.softcap, 1 - capped * capped
        seen = None if block.mask is None else block.mask[:, :, None]
        if block.causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores if seen is None else scores.masked_fill(~seen, -torch.inf), slope

    def _kept(self, scores: torch.Tensor, block: Block) -> torch.Tensor | None:
        """Returns dropout's factors of a block's weights; None: there is no dropout."""
        if not self.dropout:
            return None
        if scores.is_meta:  # of no values, and no generator
            return torch.empty_like(scores)
        generator = torch.Generator(scores.device)
        query, key = block.number
        generator.manual_seed((self.seed + (query << 32) + (key << 16)) & ((1 << 63) - 1))
        drawn = torch.rand(scores.shape, generator=generator, device=scores.device)
        return (drawn >= self.dropout) / (1 - self.dropout)


def merge(
    total: torch.Tensor,
    lse: torch.Tensor,
    queries: slice,
    output: torch.Tensor,
    lse_of_block: torch.Tensor,
) -> None:
    """Adds attention to more keys to that of some queries, in place.

    Args:
        total: fp32 (batch, heads, tokens, channels).
        lse: fp32 (batch, heads, tokens), -inf where no key has been seen.
        queries: Of the tokens.
        output: Of these queries.
        lse_of_block: Likewise.
    """
    before = lse[:, :, queries]
    after = torch.logaddexp(before, lse_of_block)
    finite = _finite(after)
    rows = total[:, :, queries]
    rows *= (before - finite).exp()[..., None]
    rows += output * (lse_of_block - finite).exp()[..., None]
    before.copy_(after)


def _of_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query[:, :, block.queries], key[:, :, block.keys], value[:, :, block.keys]


def _added(block: Block, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask that is added to scores."""
    if block.mask is None:
        return None
    nothing = torch.zeros((), dtype=dtype, device=block.mask.device)
    return torch.where(block.mask, nothing, -torch.inf)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """With 0 for queries that see nothing, of which all weights are then 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
