"""Gradients that come in parts: what looks like a chunk's last gradient need not be it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castor
from helpers import LR, assert_close_weights, assert_same_weights, boost, copies

WIDTH, ROWS, STEPS = 32, 8, 3
CHUNK = 4352
"""Bytes of one layer's chunk: no two layers share one."""

BACKWARD: dict[str, Any] = {
    "overlap": "backward",
    "nonfinite": "ignore",
    "enable_gradient_accumulation": False,
}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "forward": {"overlap": "forward"},
    "backward": BACKWARD,
}


class Parts(nn.Module):
    """A layer whose gradient several reentrant segments make, each in a pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.shared(x))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.segment, x, use_reentrant=True)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.run(self.first(x))).square().mean()
        return loss


class Beside(Parts):
    """The pass around the segments gives the layer a gradient too."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(super().run(self.shared(x)))


class After(Parts):
    """... before the segments give theirs: the layer is used behind them only."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(super().run(x))


class Apart(Parts):
    """Another layer runs between the segments: the pass has moved on when the next part comes."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.shared, self.last, self.shared):
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=True)
        return x


class Nested(Parts):
    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().segment, super().segment(x), use_reentrant=True)


class Foreign(Parts):
    """The segments read the weights without calling their module."""

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.linear(x, self.shared.weight, self.shared.bias))


class Whole(Parts):
    """All of the model is in segments."""

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return Parts.forward(self, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        loss: torch.Tensor = sum(
            checkpoint(self.body, part, use_reentrant=True) for part in (x, 2 * x)
        )
        return loss


def data(seed: int) -> torch.Tensor:
    return torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(seed))


def once(model: nn.Module, seed: int) -> torch.Tensor:
    return model(data(seed))


def from_outside(model: nn.Module, seed: int) -> torch.Tensor:
    """The model as a segment, twice."""
    inputs = data(seed).requires_grad_(), data(-seed).requires_grad_()
    loss: torch.Tensor = sum(checkpoint(model, x, use_reentrant=True) for x in inputs)
    return loss


pytestmark = pytest.mark.filterwarnings(  # segments within segments, without gradients in forward
    "ignore:None of the inputs have requires_grad=True:UserWarning"
)

Loss = Callable[[nn.Module, int], torch.Tensor]
CASES: dict[str, tuple[type[Parts], Loss]] = {
    **{cls.__name__: (cls, once) for cls in (Parts, Beside, After, Apart, Nested, Foreign, Whole)},
    "from_outside": (Parts, from_outside),
}


def build(cls: type[Parts]) -> Parts:
    torch.manual_seed(3)
    return cls()


@pytest.mark.parametrize("name", CASES)
def test_every_mode_waits_for_all_parts(name: str) -> None:
    cls, loss = CASES[name]
    plain = build(cls)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    for seed in range(STEPS):
        loss(plain, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected: list[torch.Tensor] = []
    for mode, link in itertools.product(MODES, (None, "200MB/s")):
        boosted = boost(build(cls), chunk_bytes=CHUNK, link_bandwidth=link, **MODES[mode])
        assert boosted.report().num_chunks == 3
        for seed in range(STEPS):
            boosted.step(loss(boosted.model, seed))
        expected = expected or copies(boosted.model.parameters())
        assert_same_weights(boosted.model, expected)
        assert_close_weights(boosted.model, plain)


def test_a_segment_that_nothing_announced_is_refused_after_the_update() -> None:
    """Read in segments without its module, and by its module behind them: nothing told of more when
    backward moved on to another module."""

    class Unannounced(Foreign):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return self.shared(self.last(super().run(x)))

    boosted = boost(build(Unannounced), chunk_bytes=CHUNK, **BACKWARD)
    with pytest.raises(castor.UsageError, match="a weight or moment was read after a backward"):
        boosted.step(once(boosted.model, 0))
    for mode in ("none", "forward"):
        boosted = boost(build(Unannounced), chunk_bytes=CHUNK, **MODES[mode])
        boosted.step(once(boosted.model, 0))


def two_losses(model: nn.Module) -> list[torch.Tensor]:
    return [once(model, seed) for seed in range(2)]


@pytest.mark.parametrize("mode", MODES)
def test_two_backwards_in_a_step(mode: str) -> None:
    """Of forwards made before, after one another; each delivers every gradient."""
    plain = build(Beside)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR)
    boosted = boost(build(Beside), chunk_bytes=CHUNK, **MODES[mode])
    losses = two_losses(boosted.model)
    boosted.booster.backward(losses[0], boosted.optimizer)
    if mode == "backward":
        with pytest.raises(castor.UsageError, match=r"ran after a backward that updated \d of 3"):
            boosted.booster.backward(losses[1], boosted.optimizer)
        return
    boosted.booster.backward(losses[1], boosted.optimizer)
    boosted.optimizer.step()
    for loss in two_losses(plain):
        loss.backward()
    optimizer.step()
    assert_close_weights(boosted.model, plain)
