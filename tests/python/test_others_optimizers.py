"""Optimizers that are not torch's step under castor as in plain PyTorch."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import castor
from helpers import boost

WIDTH = 8
T = TypeVar("T")


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return nn.Sequential(*layers)


class Descent(Optimizer):
    """Plain gradient descent."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])
        return loss


class Abstract(ABC):
    @abstractmethod
    def name(self) -> str: ...


class WithAbstractBase(Abstract, Descent):
    def name(self) -> str:
        return "abstract"


class OfMetaclass(Descent, ABC):
    pass


class OfType(Descent, Generic[T]):
    pass


class Slotless:
    __slots__ = ()


class WithSlotlessMixin(Slotless, Descent):
    pass


class WithSlots(Descent):
    __slots__ = ("extra",)


class Counting(Descent):
    """Keeps a counter and a tensor in `state`, beside the entries of parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["total"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["total"] += 1
        self.state["sum"] = self.state.get("sum", torch.zeros(1)) + self.state["total"]
        for group in self.param_groups:
            group["lr"] = 0.1 / self.state["total"]
        return super().step(closure)


class Scaled(Descent):
    """Takes another argument than the closure."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] = 0.1 * scale
        return super().step(closure)


class Sam(Optimizer):
    """Sharpness-aware minimisation around an optimizer that it steps itself (Foret et al. 2021)."""

    def __init__(self, params: Any, base: Any, **options: Any) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        for param in params:
            self.state[param]["moved"] = param.grad * (0.05 / norm)
            param.add_(self.state[param]["moved"])
        self.zero_grad()
        evaluate()
        for param in params:
            param.sub_(self.state[param]["moved"])
        self.base.step()
        return loss


class LineSearch(Descent):
    """Halves the step until the loss falls."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        evaluate = torch.enable_grad()(closure)
        first = float(evaluate())
        params = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in params]
        gradients = [p.grad.clone() for p in params]
        size = 10.0
        while True:
            for param, old, grad in zip(params, before, gradients, strict=True):
                param.copy_(old - size * grad)
            loss = float(evaluate())
            if loss < first or size < 1e-3:
                return loss
            size /= 2


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "abstract base": WithAbstractBase,
    "metaclass": OfMetaclass,
    "generic": OfType,
    "mixin without slots": WithSlotlessMixin,
    "slots": WithSlots,
    "counter in state": Counting,
    "LBFGS": lambda params: LBFGS(params, lr=0.5, max_iter=5),
    "LBFGS, line search": lambda params: LBFGS(params, line_search_fn="strong_wolfe", max_iter=4),
    "SAM": lambda params: Sam(params, torch.optim.AdamW, lr=1e-2),
    "line search": LineSearch,
}


def losses(
    net: nn.Module, optimizer: Optimizer, dtype: torch.dtype = torch.float32, steps: int = 4
) -> list[float]:
    found = []
    for i in range(steps):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).to(dtype)

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(inputs).float().pow(2).mean()
            loss.backward()
            return loss.detach()

        found.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_it_trains_as_in_plain_pytorch(name: str) -> None:
    plain = model()
    expected = losses(plain, MAKERS[name](plain.parameters()))
    for memory in ("64MiB", 1500):
        net = model()
        optimizer = MAKERS[name](net.parameters())
        cls = type(optimizer)
        boost(net, memory, optimizer)
        assert isinstance(optimizer, cls)
        assert losses(net, optimizer) == pytest.approx(expected, rel=1e-6)
        for mine, its in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_in_bf16_it_steps_float32_masters(name: str) -> None:
    plain = model()
    expected = losses(plain, MAKERS[name](plain.parameters()))
    net = model()
    optimizer = MAKERS[name](net.parameters())
    boost(net, "64MiB", optimizer, precision="bf16")
    found = losses(net, optimizer, torch.bfloat16)
    if "LBFGS" in name:  # its steps follow differences of gradients, which bf16 rounds
        assert found[-1] < found[0]
    else:
        assert found == pytest.approx(expected, rel=0.1)
        assert all(
            optimizer.state[param]["master"].dtype == torch.float32 for param in net.parameters()
        )


def test_further_arguments_of_step_arrive() -> None:
    plain, net = model(), model()
    its, mine = Scaled(plain.parameters()), Scaled(net.parameters())
    boost(net, "64MiB", mine)
    for one, optimizer in ((plain, its), (net, mine)):
        one(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step(scale=0.25)
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    with pytest.raises(TypeError, match="unknown"):
        mine.step(unknown=1)  # type: ignore[call-arg]


def test_values_of_no_parameter_in_a_state_are_saved_and_loaded(tmp_path: Path) -> None:
    net = model()
    optimizer = Counting(net.parameters())
    boosted = boost(net, "64MiB", optimizer)
    losses(net, optimizer, steps=2)
    boosted.booster.save(tmp_path / "run", net, optimizer)
    went_on = losses(net, optimizer, steps=2)

    again = model()
    its = Counting(again.parameters())
    boost(again, "64MiB", its).booster.load(tmp_path / "run", again, its)
    assert its.state["total"] == 2
    assert losses(again, its, steps=2) == went_on
    assert its.state["sum"].item() == 10


def test_a_closure_with_gradients_that_are_not_finite_ends_the_step() -> None:
    net = model()
    optimizer = LineSearch(net.parameters())
    boost(net, "64MiB", optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.full((2, WIDTH), float("nan"))).sum()
        loss.backward()
        return loss

    with pytest.raises(castor.NonFiniteGradientError, match=r"0\.weight"):
        optimizer.step(closure)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_was_replaced_before_boost_is_the_one_that_runs(
    precision: str, scheduled: bool
) -> None:
    calls = []

    def patch(optimizer: Optimizer) -> None:
        own = optimizer.step

        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls.append("patched")
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.mul_(-1)
            return own(*args, **kwargs)

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
        if scheduled:
            StepLR(optimizer, 1)

    results = []
    for boosted in (False, True):
        net = model()
        optimizer = Adam(net.parameters(), lr=1e-2)
        patch(optimizer)
        if boosted:
            boost(net, "64MiB", optimizer, precision=precision)
        calls.clear()
        dtype = torch.bfloat16 if boosted and precision == "bf16" else torch.float32
        found = []
        for i in range(3):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i)).to(dtype)
            loss = net(inputs).float().pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        assert calls == ["patched", "hook"] * 3
        results.append(found)
    tolerance = 1e-5 if precision == "fp32" else 0.1
    assert results[1] == pytest.approx(results[0], rel=tolerance)
    assert results[1][-1] > results[1][0]  # uphill


class Refuses(type):
    def __new__(cls, name: str, bases: Any, body: Any) -> Any:
        if any(isinstance(base, Refuses) for base in bases):
            raise TypeError(f"{name} is final")
        return super().__new__(cls, name, bases, body)


class Final(Descent, metaclass=Refuses):
    pass


def test_a_class_that_refuses_subclasses_is_named_before_the_model_is_touched() -> None:
    net = model()
    before = [param.data_ptr() for param in net.parameters()]
    with pytest.raises(NotImplementedError, match=r"Final cannot be boosted.*is final"):
        boost(net, "64MiB", Final(net.parameters()))
    assert [param.data_ptr() for param in net.parameters()] == before
    boost(net, "64MiB", AdamW(net.parameters()))
