"""Attention to blocks of keys, and its merge into attention to all keys.

Source: Dao 2023 (FlashAttention-2, section 3.1). The results of blocks are added up by the
log-sum-exp of each block's scores. Backward recomputes the weights of any block from the
log-sum-exp of all scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of attention: some queries, and keys of which they see some."""

    queries: slice
    """Tokens of the queries."""
    keys: slice
    """Tokens of the keys."""
    number: tuple[int, int]
    """Numbers that no other block of the sequence has; they select its dropout."""
    causal: bool = False
    """Whether the n-th query sees the first n keys only."""
    mask: torch.Tensor | None = None
    """Mask (batch, 1, queries, keys), true where a key is seen; None: as `causal` says."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The computation of attention scores, weights and outputs for a block."""

    scale: float
    """Factor of the products of queries and keys."""
    softcap: float | None = None
    """Cap of scores, which become softcap * tanh(score / softcap); None: there is none."""
    dropout: float = 0.0
    """Probability that a weight becomes zero."""
    seed: int = 0
    """Seed of dropout."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output of a block, and the log-sum-exp of its scores.

        Args:
            query: Queries of all blocks, (batch, heads, tokens, channels); see ring_attention.
            key: Keys of all blocks; see ring_attention.
            value: Values of all blocks; see ring_attention.
            block: The block to compute.

        Returns:
            Output (batch, heads, queries, channels), and log-sum-exp in fp32 (batch, heads,
            queries), -inf where a query sees no key.
        """
        query, key, value = _of_block(query, key, value, block)
        if self._fused(query, value):
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, block.causal, attn_mask=_added(block, query.dtype),
                scale=self.scale,
            )  # fmt: skip
            if block.mask is not None:  # the kernel gives 0 where no key is seen
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
        """Returns the gradients of a block's queries, keys and values by its own weights.

        Args:
            grad: Gradient of `output`.
            query: Queries, as forward takes them.
            key: Keys, as forward takes them.
            value: Values, as forward takes them.
            output: Output of all blocks together, (batch, heads, tokens, channels).
            lse: Log-sum-exp of all blocks' scores together, (batch, heads, tokens); finite.
            block: The block to compute.
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
        """Whether torch's fused kernel computes a block; it never holds all of a block's scores."""
        plain = self.softcap is None and self.dropout == 0
        of_cpus = query.device.type in ("cpu", "meta")
        return of_cpus and plain and query.shape[-1] == value.shape[-1]

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, block: Block
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the scores of a block, and the slope of the softcap at each.

        Both are fp32 (batch, key heads, query heads of each, queries, keys). Scores are -inf where
        a key is not seen. The slope is None without a softcap.
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
        """Returns the factors of a block's weights by dropout; None: there is no dropout."""
        if not self.dropout:
            return None
        if scores.is_meta:  # has no values and no generator
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
    """Merges a block's attention into that of earlier blocks, in place.

    Args:
        total: Output so far, fp32 (batch, heads, tokens, channels).
        lse: Log-sum-exp so far, fp32 (batch, heads, tokens), -inf where no key has been seen.
        queries: Tokens of the block's queries.
        output: The block's output, (batch, heads, queries, channels).
        lse_of_block: The block's log-sum-exp, (batch, heads, queries).
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
    """Returns the block's mask in the form that is added to scores: 0 or -inf; None: no mask."""
    if block.mask is None:
        return None
    nothing = torch.zeros((), dtype=dtype, device=block.mask.device)
    return torch.where(block.mask, nothing, -torch.inf)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Replaces -inf by 0, for queries that see no key; their weights are 0 then."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
