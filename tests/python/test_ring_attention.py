"""Attention whose keys travel among threads that stand for ranks, against attention to all keys."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from castor.distributed import ModelParallelGroup
from castor.distributed.blockwise_attention import Block, Scores
from castor.distributed.ring_attention import PieceMasks, Ring, RingPass, ring_attention

BATCH, HEADS, CHANNELS = 2, 4, 12


@dataclass(frozen=True, kw_only=True)
class Passing:
    """Stands for _C.RankTensors of one thread."""

    rank: int
    sent: list[torch.Tensor]
    """By rank."""
    meet: threading.Barrier
    sizes: list[int] = field(default_factory=list)
    """Bytes of all that has been passed on."""

    def sends_from_device(self, _: torch.Tensor) -> bool:
        return False

    def ring_shift(self, sent: torch.Tensor, into: torch.Tensor) -> None:
        self.sizes.append(sent.nbytes)
        self.sent[self.rank] = sent
        self.meet.wait()
        into.copy_(self.sent[self.rank - 1])
        self.meet.wait()


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention of one layer."""

    length: int
    key_heads: int = 2
    value_channels: int = CHANNELS
    window: int | None = None
    padded: bool = False
    softcap: float | None = None
    sinks: bool = False
    masks: bool = True
    """Whether there is a function of masks; otherwise attention is causal."""
    causal: bool = True
    dtype: torch.dtype = torch.float32

    def inputs(self) -> list[torch.Tensor]:
        """Queries, keys, values, and sinks if there are any."""
        generator = torch.Generator().manual_seed(1)
        shapes = [
            (BATCH, HEADS, self.length, CHANNELS),
            (BATCH, self.key_heads, self.length, CHANNELS),
            (BATCH, self.key_heads, self.length, self.value_channels),
        ]
        if self.sinks:
            shapes.append((HEADS,))
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def options(self) -> dict[str, Any]:
        """Of the mask of all tokens, as transformers gives them."""
        function = sliding_window_causal_mask_function if self.window else None
        seen = torch.ones(BATCH, self.length, dtype=torch.bool)
        if self.padded:
            seen[0, :3] = seen[1, -7:] = False  # the first tokens see nothing at all
        return {
            "batch_size": BATCH,
            "mask_function": function(self.window) if function else causal_mask_function,
            "attention_mask": seen,
            "local_size": self.window,
            "allow_is_causal_skip": True,
        }

    def seen(self) -> torch.Tensor:
        """(batch, 1, tokens, tokens)."""
        if not self.causal:
            return torch.ones(BATCH, 1, self.length, self.length, dtype=torch.bool)
        options = self.options() | {"allow_is_causal_skip": False}
        return sdpa_mask(q_length=self.length, kv_length=self.length, **options)

    @property
    def scores(self) -> Scores:
        return Scores(scale=CHANNELS**-0.5, softcap=self.softcap)


def whole(layer: Layer) -> list[torch.Tensor]:
    """The output, and the gradients of what it is of."""
    given = [x.float().requires_grad_() for x in layer.inputs()]
    query, key, value = given[:3]
    groups = HEADS // layer.key_heads
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * layer.scores.scale
    if layer.softcap:
        scores = (scores / layer.softcap).tanh() * layer.softcap
    seen = layer.seen()
    scores = scores.masked_fill(~seen, -1e30)
    if layer.sinks:
        sinks = given[3][None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : layer.length].masked_fill(~seen, 0)
    output = (weights @ value).transpose(1, 2)
    return [output.detach(), *torch.autograd.grad(output, given, _gradient(output))]


def _gradient(output: torch.Tensor) -> torch.Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(2))


def among(size: int, work: Callable[[Ring], Any]) -> list[Any]:
    """What each of so many threads makes of its ring."""
    sent, meet = [torch.empty(0)] * size, threading.Barrier(size)
    rings = []
    for rank in range(size):
        passing: Any = Passing(rank=rank, sent=sent, meet=meet)
        group: Any = None
        rings.append(
            Ring(ModelParallelGroup(rank=rank, size=size, name="", group=group, tensors=passing))
        )
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, rings))


def travelling(layer: Layer, size: int) -> list[torch.Tensor]:
    """As whole(), put together of what each rank has."""
    given = layer.inputs()

    def own(ring: Ring) -> tuple[torch.Tensor, list[torch.Tensor]]:
        mine = ring.tokens_of(ring.ranks.rank, layer.length, torch.device("cpu"))
        parts = [x[:, :, mine] for x in given[:3]] + given[3:]
        parts = [x.clone().requires_grad_() for x in parts]
        masks = None
        if layer.masks:
            masks = PieceMasks(sdpa_mask, layer.options(), length=len(mine), ranks=size)
        how = RingPass(ring=ring, scores=layer.scores, masks=masks, causal=layer.causal)
        output = ring_attention(*parts[:3], parts[3] if layer.sinks else None, how)
        full = (BATCH, layer.length, HEADS, layer.value_channels)
        grad = _gradient(torch.empty(full))[:, mine].to(layer.dtype)
        return mine, [output.detach(), *torch.autograd.grad(output, parts, grad)]

    found = among(size, own)
    together = []
    for index, dim in ((0, 1), (1, 2), (2, 2), (3, 2)):
        order = torch.cat([mine for mine, _ in found]).argsort()
        parts = torch.cat([of_rank[index] for _, of_rank in found], dim)
        together.append(parts.index_select(dim, order))
    if layer.sinks:
        together.append(torch.stack([of_rank[4] for _, of_rank in found]).sum(0))
    return together


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"masks": False},
        {"masks": False, "causal": False},
        {},
        {"key_heads": 4},
        {"padded": True},
        {"window": 5},
        {"window": 5, "padded": True, "softcap": 3.0, "sinks": True},
        {"masks": False, "sinks": True, "value_channels": 8},
        {"padded": True, "value_channels": 8, "key_heads": 1},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()) or "plain",
)
def test_output_and_gradients_are_those_of_attention_to_all(
    settings: dict[str, Any], size: int
) -> None:
    layer = Layer(length=8 * size, **settings)
    for mine, theirs in zip(travelling(layer, size), whole(layer), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("settings", [{}, {"softcap": 3.0, "padded": True}])
def test_sixteen_bits_are_added_up_in_thirtytwo(settings: dict[str, Any]) -> None:
    layer = Layer(length=64, dtype=torch.bfloat16, **settings)
    for mine, theirs in zip(travelling(layer, 4), whole(layer), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.float(), theirs, rtol=0.02, atol=0.02)


def test_each_rank_computes_as_much_of_causal_attention() -> None:
    size, length = 4, 64
    pairs = []
    for rank in range(size):
        ring = Ring(cast("Any", _Rank(rank, size)))
        how = RingPass(ring=ring, scores=Scores(scale=1.0), masks=None, causal=True)
        seen = 0
        for owner in range(size):
            for block in how.blocks(owner, length // size):
                queries, keys = (s.stop - s.start for s in (block.queries, block.keys))
                seen += queries * (queries + 1) // 2 if block.causal else queries * keys
        pairs.append(seen)
    assert pairs == [length * (length + 1) // 2 // size] * size


@dataclass(frozen=True)
class _Rank:
    rank: int
    size: int


def test_masks_are_made_of_what_is_seen_only() -> None:
    made = []

    def make(**options: Any) -> torch.Tensor:
        made.append((options["q_offset"], options["kv_offset"]))
        return sdpa_mask(**options)

    layer = Layer(length=64, window=9)
    masks = PieceMasks(make, layer.options(), length=16, ranks=4)
    seen = [block.number for block in masks.blocks((1, 6), (1, 6))]
    assert seen == [(1, 1), (6, 6)]
    assert [block.number for block in masks.blocks((1, 6), (0, 7))] == [(1, 0)]
    made.clear()
    for _ in range(2):  # other layers
        list(masks.blocks((1, 6), (0, 7)))
    assert made == [(8, 0)] * 2
    without_padding = PieceMasks(make, Layer(length=64).options(), length=16, ranks=4)
    assert without_padding.causal


def test_what_is_passed_on_is_one_ranks_keys_and_values_and_their_gradients() -> None:
    size, layer = 4, Layer(length=64, masks=False)

    def own(ring: Ring) -> list[int]:
        _attend(ring, layer)
        passing: Any = ring.ranks.tensors
        return cast("list[int]", passing.sizes)

    one = 2 * BATCH * layer.key_heads * 16 * CHANNELS * 4
    # Forward and backward pass keys on to all others; gradients go on until they are back.
    assert among(size, own) == [[one] * ((size - 1) + (size - 1) + size)] * size


def _attend(ring: Ring, layer: Layer) -> None:
    tokens = layer.length // ring.ranks.size
    parts = [x[:, :, :tokens].clone().requires_grad_() for x in layer.inputs()]
    how = RingPass(ring=ring, scores=layer.scores, masks=None, causal=True)
    output = ring_attention(parts[0], parts[1], parts[2], None, how)
    torch.autograd.grad(output, parts, torch.ones_like(output))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nothing_is_on_its_way_when_a_block_fails(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, compute = Layer(length=32), getattr(Scores, phase)

    def fail(self: Scores, *given: Any) -> Any:
        if given[-1].number[0] != given[-1].number[1]:  # not of the rank's own keys
            raise ValueError("no more")
        return compute(self, *given)

    def own(ring: Ring) -> bool:
        with pytest.raises(ValueError, match="no more"):
            _attend(ring, layer)
        return ring._last is None

    with monkeypatch.context() as patch:
        patch.setattr(Scores, phase, fail)
        assert among(4, own) == [True] * 4


def test_dropped_weights_are_the_same_in_backward() -> None:
    layer = Layer(length=16)
    query, key, value = layer.inputs()
    scores = replace(layer.scores, dropout=0.3, seed=5)
    block = Block(queries=slice(0, 16), keys=slice(0, 16), number=(0, 0), causal=True)
    output, lse = scores.forward(query, key, value, block)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    gradients = scores.backward(grad, query, key, value, output, lse, block)
    for index, of in enumerate(gradients):
        moved = [query, key, value]
        step = torch.randn(of.shape, generator=torch.Generator().manual_seed(3))
        sides = []
        for sign in (1, -1):
            moved[index] = (query, key, value)[index] + sign * 1e-2 * step
            sides.append((scores.forward(*moved, block)[0] * grad).sum().double())  # type: ignore[arg-type, call-arg]
        assert (of * step).sum().item() == pytest.approx(
            ((sides[0] - sides[1]) / 2e-2).item(), rel=5e-3
        )
    many = [replace(scores, seed=seed).forward(query, key, value, block)[0] for seed in range(2000)]
    expected, _ = layer.scores.forward(query, key, value, block)
    torch.testing.assert_close(torch.stack(many).mean(0), expected, rtol=0, atol=0.1)
