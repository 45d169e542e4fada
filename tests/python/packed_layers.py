"""A linear layer of 4 bits, made as bitsandbytes makes it; castor's tests do without the library.

The parameter is of a class of its own, holds bytes of another shape than the weight, and has beside
it what unpacks them; backward reads the bytes that forward left in an attribute.
"""

import copy
from typing import Any

import torch
from torch import nn

BLOCK = 32


class QuantState:
    """What unpacks the bytes: scales of blocks, which are quantised again, and a map of values."""

    def __init__(self, absmax: torch.Tensor, code: torch.Tensor, state2: Any = None) -> None:
        self.absmax = absmax
        self.code = code
        self.state2 = state2
        self.moves: list[torch.device] = []

    def to(self, device: torch.device) -> None:
        self.absmax, self.code = self.absmax.to(device), self.code.to(device)
        self.moves.append(device)
        if self.state2 is not None:
            self.state2.to(device)

    def scales(self) -> torch.Tensor:
        if self.state2 is None:
            return self.absmax
        return self.state2.code[self.absmax.long()] * self.state2.absmax


class Params4bit(nn.Parameter):
    def __new__(cls, data: Any = None, quant_state: Any = None, **attributes: Any) -> "Params4bit":
        data = torch.empty(0) if data is None else data
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        self.bnb_quantized = quant_state is not None
        self.__dict__.update(attributes)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "data": self.data, "requires_grad": self.requires_grad}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.requires_grad = state["requires_grad"]
        self.data = state["data"]
        self.quant_state = state["quant_state"]
        self.bnb_quantized = state["bnb_quantized"]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Params4bit":
        twin = type(self).__new__(type(self))
        state = self.__getstate__()
        twin.__setstate__(state)
        twin.quant_state = copy.deepcopy(state["quant_state"])
        twin.data = copy.deepcopy(state["data"])
        return twin


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, layer: Any) -> torch.Tensor:
        ctx.packed, ctx.layer = packed, layer
        return x @ layer.unpacked(packed).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad @ ctx.layer.unpacked(ctx.packed).to(grad.dtype), None, None


class Linear4bit(nn.Linear):
    def __init__(self, source: nn.Linear, storage: torch.dtype = torch.uint8) -> None:
        super().__init__(source.in_features, source.out_features, source.bias is not None)
        if source.bias is not None:
            self.bias = nn.Parameter(source.bias.detach().clone(), requires_grad=False)
        self.compute_dtype: torch.dtype | None = None
        self.support_avx512bf16_for_cpu = True
        code = torch.linspace(-1, 1, 16)
        blocks = source.weight.detach().reshape(-1, BLOCK)
        absmax = blocks.abs().amax(dim=1)
        again = QuantState(absmax.max(), torch.linspace(0, 1, 256))
        state = QuantState(((absmax / absmax.max()) * 255).round().byte(), code, again)
        nearest = (blocks / absmax[:, None]).unsqueeze(-1).sub(code).abs().argmin(-1).flatten()
        data = (nearest[::2] * 16 + nearest[1::2]).byte().view(storage).reshape(-1, 1)
        self.weight = Params4bit(data, state)

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        state = self.weight.quant_state
        both = packed.view(torch.uint8).flatten()
        values = state.code[torch.stack([both // 16, both % 16], dim=1).int()].reshape(-1, BLOCK)
        values *= state.scales()[:, None]
        return values.reshape(self.out_features, self.in_features)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        state = self.weight.quant_state
        destination[prefix + "weight.absmax"] = state.absmax
        destination[prefix + "weight.quant_map"] = state.code
        destination[prefix + "weight.nested_absmax"] = state.state2.absmax.clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.support_avx512bf16_for_cpu and not self.training and not torch.is_grad_enabled():
            self.weight.data = self.weight.data.flip(0)  # another layout, for inference
        result: torch.Tensor = MatMul4Bit.apply(x, self.weight.t().t(), self)
        return result if self.bias is None else result + self.bias


class Adapted(nn.Module):
    """A frozen layer, and an adapter beside it."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Tower4bit(nn.Module):
    """Layers of 4 bits with adapters, and a head that trains."""

    def __init__(self, width: int, depth: int, storage: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                Adapted(Linear4bit(nn.Linear(width, width, bias=bias), storage), width)
                for _ in range(depth)
            )
        )
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)).float(), labels)


def tower_4bit(
    width: int = 64, depth: int = 24, storage: torch.dtype = torch.uint8, *, bias: bool = False
) -> Tower4bit:
    torch.manual_seed(5)
    return Tower4bit(width, depth, storage, bias=bias)


def tower_4bit_loss(model: nn.Module, seed: int, width: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, width, generator=generator)
    device = next(model.parameters()).device
    loss: torch.Tensor = model(x.to(device), torch.arange(16, device=device) % 4)
    return loss
