"""Backward passes whose weights' gradients are computed after those of the inputs."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import castor
from castor import _C
from castor.distributed.split_backward import SplitBackward

WIDTH = 8


class _Counted(torch.autograd.Function):
    """A product by a function of Python's, which counts its backwards."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Counted.backwards += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.flatten(0, -2).T @ grad.flatten(0, -2)


class _Stage(nn.Module):
    """Weights w0, w1, ... and a bias; `compute` uses them."""

    def __init__(self, compute: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self._compute = compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x, *self.weights, self.bias)


def _residual(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    inner = functional.layer_norm(x, (WIDTH,), bias, bias)
    return x + functional.gelu(functional.linear(inner, w0, bias)) @ w1 * (x @ w2)


def _in_a_row(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    return torch.tanh(torch.tanh(x @ w0 @ w1 + bias) @ w0) @ w2


def _beside(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    return (x @ w0 + torch.tanh(x).square() @ w0) @ w1 + bias


def _of_python(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    return torch.tanh(_Counted.apply(x @ w0, w1)) @ w2 + bias


def _before_it_is_used(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    return (x @ (w0 @ torch.tanh(w1))) @ (w0 * bias) + (w2 @ bias)


def _apart(x: Any, w0: Any, w1: Any, w2: Any, bias: Any) -> Any:
    return torch.cat([(x @ w0).reshape(-1), (w1 @ w2).reshape(-1), bias])


WAITING = {
    _residual: {"weights.1", "weights.2"},  # the bias is used in a row, and by weights.0's product
    _in_a_row: {"weights.1", "weights.2", "bias"},
    _beside: {"weights.0", "weights.1", "bias"},
    _of_python: {"weights.0", "weights.2", "bias"},
    _before_it_is_used: set[str](),
    _apart: {"weights.0", "weights.1", "weights.2", "bias"},
}
"""Which weights' gradients come later."""


def _split(stage: nn.Module, x: torch.Tensor, enter: Any = lambda _: None) -> SplitBackward:
    loss = stage(x).square().sum()
    return SplitBackward([loss], None, [x, torch.arange(3)])


def _input() -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("compute", WAITING)
def test_gradients_are_those_of_one_pass(compute: Any) -> None:
    stage, x = _Stage(compute), _input()
    for _ in range(2):  # accumulated
        stage(x).square().sum().backward()
    expected = {name: param.grad for name, param in stage.named_parameters()}
    expected_of_x = x.grad
    stage.zero_grad()
    first, second = _input(), _input()
    splits = [_split(stage, first), _split(stage, second)]
    of_inputs = [split.of_inputs() for split in splits]
    for split in splits:
        split.of_weights(lambda _: None)
    for of_input, of_number in of_inputs:
        assert of_number is None
        assert torch.allclose(of_input * 2, expected_of_x, rtol=1e-6)
    assert first.grad is second.grad is None
    for name, param in stage.named_parameters():
        if expected[name] is None:
            assert param.grad is None
        else:
            assert param.grad is not None
            assert torch.allclose(param.grad, expected[name], rtol=1e-5), name


@pytest.mark.parametrize("compute", WAITING)
def test_weights_wait_where_they_can(compute: Any) -> None:
    stage = _Stage(compute)
    split = _split(stage, _input())
    split.of_inputs()
    names = {param: name for name, param in stage.named_parameters()}
    early = {name for param, name in names.items() if param.grad is not None}
    entered: list[str] = []
    arrived: list[str] = []
    for param, name in names.items():
        param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    split.of_weights(lambda params: entered.extend(names[param] for param in params))
    assert set(entered) == set(arrived) == WAITING[compute]
    assert early.isdisjoint(arrived)
    for name, param in stage.named_parameters():
        assert (param.grad is not None) == (name in early or name in arrived)


def test_weights_come_in_the_order_of_backward() -> None:
    stage = _Stage(lambda x, w0, w1, w2, bias: torch.tanh(torch.tanh(x @ w0) @ w1) @ w2 + bias)
    split = _split(stage, _input())
    split.of_inputs()
    names = {param: name for name, param in stage.named_parameters()}
    order: list[str] = []
    split.of_weights(lambda params: order.extend(names[param] for param in params))
    assert order == ["bias", "weights.2", "weights.1", "weights.0"]


def test_a_function_of_pythons_runs_once() -> None:
    _Counted.backwards = 0
    split = _split(_Stage(_of_python), _input())
    split.of_inputs()
    split.of_weights(lambda _: None)
    assert _Counted.backwards == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of dynamo
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_was_compiled_for_whole_passes_is_used(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, bias: torch.sin(torch.exp(torch.tanh(x @ w)) * bias), backend=backend
    )
    stage = _Stage(lambda x, w0, w1, w2, bias: compiled(x @ w0, w1, bias) @ w2)
    x, again = _input(), _input()
    stage(x).square().sum().backward()
    expected = {name: param.grad for name, param in stage.named_parameters()}
    stage.zero_grad()
    split = _split(stage, again)
    torch.testing.assert_close(split.of_inputs()[0], x.grad)
    split.of_weights(lambda _: None)
    for name, param in stage.named_parameters():
        torch.testing.assert_close(param.grad, expected[name], msg=name)
    with pytest.raises(RuntimeError, match="donated buffers"):  # a graph of the user's, as before
        stage(_input()).sum().backward(retain_graph=True)
    torch._dynamo.reset()


def test_what_fails_when_a_module_is_entered_is_raised() -> None:
    split = _split(_Stage(_beside), _input())
    split.of_inputs()

    def fail(_: Any) -> None:
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        split.of_weights(fail)


def test_what_forward_saved_goes_with_the_half_that_needs_it() -> None:
    saved: list[weakref.ref[torch.Tensor]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.detach().clone()
        saved.append(weakref.ref(copy))
        return copy

    def left() -> int:
        return sum(one() is not None for one in saved)

    stage = _Stage(lambda x, w0, w1, w2, bias: torch.tanh(torch.sin(x @ w0)) @ w1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda copy: copy):
        split = _split(stage, _input())
    assert left() == 7  # of the square, of two products both factors, of two functions
    split.of_inputs()
    assert left() == 4  # of the products: which factor a weight needs autograd does not tell
    split.of_weights(lambda _: None)
    assert left() == 0


def test_only_nodes_let_go_of_what_was_saved() -> None:
    with pytest.raises(castor.UsageError, match="a Tensor is no node of autograd's"):
        _C.release_saved_variables(torch.zeros(1))
