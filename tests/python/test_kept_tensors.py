"""Tensors over memory of parameters and gradients that outlive a step, or were there before boost.

And memory that other processes share.
"""

import itertools
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn

import castor
from test_given_memory import AMPLE, TIGHT, WIDTH, adamw, batch, boosted, loss_of, network, sgd

# --- gradients of several tasks -------------------------------------------------------------------


def itself(grad: torch.Tensor) -> torch.Tensor:
    return grad


def detached(grad: torch.Tensor) -> torch.Tensor:
    return grad.detach()


def data_of(grad: torch.Tensor) -> torch.Tensor:
    return grad.data


def flat(grad: torch.Tensor) -> torch.Tensor:
    return grad.view(-1)


def first_row(grad: torch.Tensor) -> torch.Tensor:
    return grad[0]


def transposed(grad: torch.Tensor) -> torch.Tensor:
    return grad.t() if grad.dim() == 2 else grad


KEPT = (itself, detached, data_of, flat, first_row, transposed)


def tasks(
    model: Any, own: torch.optim.Optimizer, keep: Callable[[torch.Tensor], Any], *, clear: Any
) -> list[list[torch.Tensor]]:
    """Each task's gradients, kept; a step by what they project each other to (PCGrad)."""
    kept = []
    for seed in range(3):
        clear(model, own)
        loss_of(model, seed).backward()
        kept.append([keep(param.grad) for param in model.parameters()])
    merged = []
    for param in model.parameters():
        merged.append(torch.zeros_like(param))
    full = [param.grad for param in model.parameters()]
    for param, total, last in zip(model.parameters(), merged, full, strict=True):
        param.grad = total + last * 0.5
    own.step()
    own.zero_grad()
    loss_of(model, 9).backward()
    return kept


def none_by_optimizer(_: Any, own: torch.optim.Optimizer) -> None:
    own.zero_grad()


def none_by_model(model: Any, _: Any) -> None:
    model.zero_grad(set_to_none=True)


def none_by_hand(model: Any, _: Any) -> None:
    for param in model.parameters():
        param.grad = None


def deleted(model: Any, _: Any) -> None:
    for param in model.parameters():
        del param.grad


CLEARS = (none_by_optimizer, none_by_model, none_by_hand, deleted)


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_are_kept_stay_what_they_were(
    keep: Callable[[torch.Tensor], Any], precision: Any
) -> None:
    budgets = itertools.cycle((TIGHT, AMPLE))
    for clear in CLEARS:
        plain = network().to(torch.bfloat16 if precision == "bf16" else torch.float32)
        expected = tasks(plain, sgd(plain.parameters()), keep, clear=clear)
        overlap = "forward" if clear is none_by_model else "none"
        model, own, _ = boosted(precision=precision, device_memory=next(budgets), overlap=overlap)
        actual = tasks(model, own, keep, clear=clear)
        for one, other in zip(actual, expected, strict=True):
            for grad, of_plain in zip(one, other, strict=True):
                torch.testing.assert_close(grad, of_plain, rtol=1e-2, atol=1e-6)


def test_accumulation_goes_on_in_what_is_kept() -> None:
    model, _, _ = boosted()
    loss_of(model, 0).backward()
    kept, before = model[0].weight.grad, model[0].weight.grad.clone()
    loss_of(model, 0).backward()
    assert kept is model[0].weight.grad
    torch.testing.assert_close(kept, before * 2)


@pytest.mark.parametrize("content", ["states"])
def test_gradients_on_nvme_that_are_kept(content: str, tmp_path: Any) -> None:
    settings: dict[str, Any] = {
        "states": {"host_memory": "24KiB"},
    }[content]
    plain = network()
    expected = tasks(plain, adamw(plain.parameters()), itself, clear=none_by_optimizer)
    model, own, _ = boosted(adamw, nvme_path=tmp_path, **settings)
    actual = tasks(model, own, itself, clear=none_by_optimizer)
    for one, other in zip(actual, expected, strict=True):
        for grad, of_plain in zip(one, other, strict=True):
            torch.testing.assert_close(grad, of_plain, rtol=1e-4, atol=1e-6)


# --- what lies over a parameter's memory before boost ---------------------------------------------


class Aliased(nn.Module):
    """A layer whose weight is a buffer, attributes and parts of lists as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("w", self.lin.weight.data)
        self.register_buffer("rows", self.lin.weight.detach()[2:5], persistent=False)
        self.alias = self.lin.bias.detach()
        self.turned = self.lin.weight.data.t()
        self.several = [self.out.weight.data.view(-1)]
        self.named = {"bias": self.out.bias.data}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lin(x).tanh()) + x @ self.w

    def check(self) -> None:
        """They are the parameters still."""
        assert torch.equal(self.w, self.lin.weight)
        assert torch.equal(self.rows, self.lin.weight[2:5])
        assert torch.equal(self.alias, self.lin.bias)
        assert torch.equal(self.turned, self.lin.weight.t())
        assert torch.equal(self.several[0], self.out.weight.view(-1))
        assert torch.equal(self.named["bias"], self.out.bias)


def train_aliased(model: Any, own: torch.optim.Optimizer, dtype: torch.dtype) -> list[float]:
    losses = []
    for seed in range(4):
        loss = model(batch(seed, dtype)).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        own.step()
        own.zero_grad()
        model.check()
        if seed == 2:
            model.w.mul_(0.5)  # a write through the buffer
    return losses


@pytest.mark.parametrize("budget", [AMPLE, "3KiB"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_and_attributes_over_parameters_follow_them(budget: str, precision: Any) -> None:
    plain = Aliased()
    expected = train_aliased(plain, sgd(plain.parameters()), torch.float32)
    model = Aliased()
    own = sgd(model.parameters())
    settings: Any = {"device_memory": budget, "precision": precision}
    castor.Booster(castor.GeminiPlugin(device="cpu", host_memory="1MiB", **settings)).boost(
        model, own
    )
    losses = train_aliased(model, own, model.lin.weight.dtype)
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize("budget", [AMPLE, TIGHT])
def test_what_was_taken_before_boost_follows(budget: str) -> None:
    model = network()
    state, row = model.state_dict(), model[0].weight.data[0]
    listed = [param.detach() for param in model.parameters()]
    own = sgd(model.parameters())
    plugin = castor.GeminiPlugin(device="cpu", device_memory=budget, host_memory="1MiB")
    castor.Booster(plugin).boost(model, own)
    for seed in range(3):
        loss_of(model, seed).backward()
        own.step()
        own.zero_grad()
        with torch.no_grad():
            loss_of(model, 5)
            state["2.bias"].add_(1.0)  # while it may be on the device
            loss_of(model, 6)
    assert all(torch.equal(state[name], param) for name, param in model.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(listed, model.parameters(), strict=True))
    assert torch.equal(row, model[0].weight[0])


def test_a_buffer_over_more_than_a_parameter_is_named() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("everything", torch.zeros(2 * WIDTH))
            self.first = nn.Parameter(self.everything[:WIDTH])
            self.second = nn.Parameter(self.everything[WIDTH:])

    model = Flat()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(castor.UsageError, match=r"'everything'.*'first'"):
        castor.Booster(castor.GeminiPlugin(device="cpu", device_memory=AMPLE)).boost(model, own)


# --- other processes ------------------------------------------------------------------------------


def model_first(model: Any) -> Any:
    return model.share_memory()


def one_parameter(model: Any) -> Any:
    return model[2].bias.share_memory_()


def its_storage(model: Any) -> Any:
    return model[2].bias.untyped_storage().share_memory_()


def data_first(model: Any) -> Any:
    return model[2].bias.data.share_memory_()


def queued(model: Any) -> Any:
    return ForkingPickler.dumps(model.state_dict())


SHARES = (model_first, one_parameter, its_storage, data_first, queued)


@pytest.mark.parametrize("share", SHARES)
def test_sharing_a_boosted_model_is_refused_at_the_place(share: Callable[[Any], Any]) -> None:
    model, own, _ = boosted()
    with pytest.raises(castor.UsageError, match=r"parameter '\d\.(weight|bias)'.*processes"):
        share(model)
    loss_of(model, 0).backward()
    with pytest.raises(castor.UsageError, match="gradient of parameter"):
        model[0].weight.grad.share_memory_()
    own.step()
    with pytest.raises(castor.UsageError, match="state of parameter"):
        own.state[model[0].weight]["momentum_buffer"].share_memory_()


@pytest.mark.parametrize("share", SHARES)
def test_boosting_a_shared_model_is_refused(share: Callable[[Any], Any]) -> None:
    model = network()
    share(model)
    with pytest.raises(castor.UsageError, match=r"parameter '\d\.(weight|bias)'.*processes share"):
        castor.Booster(castor.GeminiPlugin(device="cpu", device_memory=AMPLE)).boost(
            model, sgd(model.parameters())
        )
    assert torch.equal(model[0].weight, network()[0].weight)


def test_others_are_shared_as_ever() -> None:
    boosted()
    assert torch.ones(3).share_memory_().is_shared()
    assert network().share_memory()[0].weight.is_shared()


def test_files_that_are_mapped_can_be_boosted(tmp_path: Any) -> None:
    (tmp_path / "weights").write_bytes(bytes(4 * WIDTH * WIDTH))
    model = network()
    mapped = torch.from_file(str(tmp_path / "weights"), False, WIDTH * WIDTH)
    model[0].weight.data = mapped.view(WIDTH, WIDTH)
    castor.Booster(castor.GeminiPlugin(device="cpu", device_memory=AMPLE)).boost(
        model, sgd(model.parameters())
    )
    assert not model[0].weight.any()
