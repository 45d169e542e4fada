"""A model with float32 islands for tests: a router whose forward casts by itself, as transformers'
do, and a norm of its own."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 24
EXPERTS = 8
KEPT = ("*.gate", "norm")
"""Patterns of what stays float32."""


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)
        self.register_buffer("bias", torch.rand(EXPERTS) / 100 + 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = functional.linear(x.float(), self.weight.float()) + self.bias.float()
        return scores.softmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, EXPERTS * 4)
        self.gate = Gate()
        self.out = nn.Linear(EXPERTS * 4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x).unflatten(-1, (EXPERTS, 4)).tanh()
        weighted = hidden * self.gate(x).to(hidden.dtype)[..., None]
        return x + self.out(weighted.flatten(-2))


class Routed(nn.Module):
    """Blocks with a router each, and a norm at the end."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        normed = functional.rms_norm(x.float(), (WIDTH,), self.norm.weight.float())
        return self.head(normed.to(self.head.weight.dtype))


def routed(depth: int = 3) -> Routed:
    """In float32."""
    torch.manual_seed(3)
    return Routed(depth)


def kept(model: nn.Module) -> list[nn.Parameter]:
    """What is float32 once the rest is 16-bit."""
    return [p for name, p in model.named_parameters() if ".gate." in name or name == "norm.weight"]


def loaded(dtype: torch.dtype = torch.bfloat16, depth: int = 3) -> Routed:
    """As from_pretrained gives such a model: 16-bit with islands."""
    model = routed(depth)
    islands = {id(param) for param in kept(model)}
    for param in model.parameters():
        if id(param) not in islands:
            param.data = param.data.to(dtype)
    return model


def routed_loss(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = model.get_parameter("head.weight").dtype
    x = torch.randn(6, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(5, (6,), generator=generator)
    return functional.cross_entropy(model(x).float(), labels)
