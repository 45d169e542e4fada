"""Whatever a model's forward does with its modules, training goes as in plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import castor
from helpers import (
    assert_close,
    assert_trains_as_plain,
    boost,
    equal,
    losses_of_boosted,
    losses_of_plain,
    plugin,
)
from zoo import Tower, tower, tower_loss

WIDTH = 32


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return build()

    return make


def data(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randn((rows, WIDTH), generator=torch.Generator().manual_seed(seed))


def square_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(data(seed)).square().mean()


# --- the forward -------------------------------------------------------------------------------


class Checkpointed(Tower):
    use_reentrant: bool

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(
                lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=self.use_reentrant
            )
        return functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_segments_are_recomputed_right(use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model = Checkpointed()
        model.use_reentrant = use_reentrant
        return model

    report = assert_trains_as_plain(seeded(build), tower_loss)
    assert report.evictions > 0
    assert report.divergent_steps == 0


class Attention(nn.Module):
    """nn.MultiheadAttention reads out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)[None]
        return self.norm(self.attention(x, x, x)[0])[0]


class ForeignRead(nn.Module):
    """Uses one module's weight in another place, without calling the module there."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = self.emb((x[:, 0] > 0).long())
        return functional.linear(self.layers(codes + x), self.emb.weight)


class NeverCalled(nn.Module):
    """All parameters are read by the root; no child's forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(functional.linear(x, layer.weight, layer.bias))
        return x


class Unused(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(64, 64)


class Frozen(Tower):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[::2]:
            layer.requires_grad_(False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Repeated(nn.Module):
    """One layer three times, and the same object registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer
        self.others = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for other in self.others:
            x = torch.tanh(other(self.again(x)))
        return self.layer(x)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(
            *(
                # Without a bias, and with a nonlinearity: no gradient is zero but for rounding.
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Tanh())
                for _ in range(4)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stack(x)


@dataclass
class Result:
    hidden: torch.Tensor
    extras: dict[str, Any]


class Nested(nn.Module):
    """Layers that take and return dicts and dataclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = Result(x, {})
        for block in self.blocks:
            result = block(result)
        return result.hidden + result.extras["deep"][0][1]["scaled"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, result: Result) -> Result:
        hidden = torch.tanh(result.hidden @ self.weight)
        return Result(hidden, {"deep": [(None, {"scaled": hidden * self.scale})]})


class Opaque(nn.Module):
    """Hides its output where no search for tensors looks: a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Hiding() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)())
        return x


class Hiding(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return lambda: y


class Empty(Tower):
    """Parameters of zero and one element beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return super().forward(x * self.gain, labels) + self.nothing.sum()


class Strided(nn.Module):
    """Weights that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(8, WIDTH).t())
        self.rows = nn.Parameter(torch.randn(8, 2 * WIDTH)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(1, 1, -1, WIDTH)
        # Chunks hold rows densely, and how a product rounds may depend on how its factors lie.
        rows = self.rows.contiguous()
        return self.conv(image).mean((2, 3)) @ self.turned.t() @ rows.t()


ARCHITECTURES = [
    Attention, ForeignRead, NeverCalled, Tied, Repeated, Normalised, Nested, Opaque, Strided,
]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_architecture_trains_as_plain(architecture: type[nn.Module]) -> None:
    report = assert_trains_as_plain(seeded(architecture), square_loss)
    assert report.divergent_steps == 0


@pytest.mark.parametrize("architecture", [Unused, Frozen, Empty])
def test_tower_variant_trains_as_plain(architecture: type[nn.Module]) -> None:
    report = assert_trains_as_plain(seeded(architecture), tower_loss, max_norm=0.5)
    assert report.divergent_steps == 0


def test_batch_norm_statistics_are_those_of_plain() -> None:
    plain, model = seeded(Normalised)(), seeded(Normalised)()
    losses_of_plain(plain, square_loss)
    losses_of_boosted(boost(model), square_loss)
    for (name, expected), actual in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_unused_and_frozen_parameters_stay_bitwise() -> None:
    for architecture in (Unused, Frozen):
        boosted = boost(seeded(architecture)())
        before = {name: p.detach().clone() for name, p in boosted.model.named_parameters()}
        losses_of_boosted(boosted, tower_loss)
        for name, param in boosted.model.named_parameters():
            still = name.startswith("spare") or not param.requires_grad
            assert equal(param, before[name]) == still, name


def test_fully_frozen_model_computes_as_plain() -> None:
    plain = tower().requires_grad_(False)
    booster = castor.Booster(plugin=plugin())
    model, optimizer, *_ = booster.boost(tower().requires_grad_(False))
    assert optimizer is None
    for guard in (torch.no_grad, torch.enable_grad):
        with guard():
            assert equal(tower_loss(model, 0), tower_loss(plain, 0))
    # Its input may still want a gradient.
    inputs = [data(0).requires_grad_() for _ in range(2)]
    model(inputs[0]).sum().backward()
    plain(inputs[1]).sum().backward()
    assert equal(inputs[0].grad, inputs[1].grad)
