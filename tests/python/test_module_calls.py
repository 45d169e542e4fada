"""Modules are called past torch's loop over hooks, and nobody who looks or hooks in can tell."""

import copy
import gc
import os
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import castor
from castor import _C
from helpers import LR, Boosted, boost, plain_steps
from zoo import Tower, tower

STEPS = 3


@pytest.fixture
def boosted() -> Boosted:
    return boost(tower())


def direct(module: nn.Module) -> bool:
    return isinstance(module._compiled_call_impl, _C.ModuleCall)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return plain_steps(model, optimizer, steps=STEPS)


def plain_losses() -> list[float]:
    model = tower()
    return train(model, torch.optim.AdamW(model.parameters(), lr=LR))


def test_parts_are_called_directly_and_the_model_by_torch(boosted: Boosted) -> None:
    _, model, optimizer = boosted
    assert direct(model.head)
    assert not direct(model)
    assert train(model, optimizer) == pytest.approx(plain_losses(), rel=1e-5)


@pytest.mark.parametrize("kind", ["pre", "post", "post_kwargs", "backward", "pre_backward"])
def test_hooks_of_the_user_run_as_in_plain(boosted: Boosted, kind: str) -> None:
    _, model, optimizer = boosted
    calls: list[str] = []

    def note(*_: Any) -> None:
        calls.append(kind)

    register = {
        "pre": model.head.register_forward_pre_hook,
        "post": model.head.register_forward_hook,
        "post_kwargs": lambda hook: model.head.register_forward_hook(hook, with_kwargs=True),
        "backward": model.head.register_full_backward_hook,
        "pre_backward": model.head.register_full_backward_pre_hook,
    }[kind]
    handle = register(note)
    assert train(model, optimizer) == pytest.approx(plain_losses(), rel=1e-5)
    assert calls == [kind] * STEPS
    handle.remove()
    train(model, optimizer)
    assert len(calls) == STEPS


def test_what_a_users_hook_returns_is_the_output(boosted: Boosted) -> None:
    _, model, _ = boosted
    x = torch.ones(2, model.head.in_features)
    model.head.register_forward_hook(lambda _module, _args, output: output * 0)
    assert not model.head(x).any()


def test_hooks_of_all_modules_run(boosted: Boosted) -> None:
    _, model, optimizer = boosted
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        train(model, optimizer)
    finally:
        handle.remove()
    assert seen.count(model.head) == STEPS


def test_a_forward_that_fails_leaves_the_run_whole(boosted: Boosted) -> None:
    _, model, optimizer = boosted
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.head(torch.ones(3, model.head.in_features + 1))
    assert train(model, optimizer) == pytest.approx(plain_losses(), rel=1e-5)


def test_a_forward_that_is_replaced_is_called(boosted: Boosted) -> None:
    _, model, _ = boosted
    model.head.forward = lambda x: x.sum()
    assert model.head(torch.ones(4)).item() == 4.0


def test_what_the_events_raise_is_castors(boosted: Boosted) -> None:
    _, model, optimizer = boosted
    train(model, optimizer)
    child = os.fork()
    if child == 0:  # where castor's memory is not
        try:
            model.head(torch.ones(2, model.head.in_features))
        except castor.UsageError:
            os._exit(3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_copies_and_pickles_are_called_by_torch(boosted: Boosted) -> None:
    _, model, optimizer = boosted
    train(model, optimizer)
    x = torch.ones(2, model.head.in_features)
    for made in (copy.deepcopy(model), copy.copy(model.head), pickle.loads(pickle.dumps(model))):
        head = made.head if isinstance(made, Tower) else made
        assert not direct(head)
        assert torch.equal(head(x), model.head(x))


def test_a_released_model_is_called_by_torch(boosted: Boosted) -> None:
    booster, model, optimizer = boosted
    booster.release(model)
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())
    train(model, optimizer)


def test_a_call_keeps_no_module() -> None:
    boosted = boost(tower())
    call, head = boosted.model.head._compiled_call_impl, weakref.ref(boosted.model.head)
    del boosted
    gc.collect()
    assert head() is None
    with pytest.raises(ReferenceError, match="is gone"):
        call(torch.ones(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")  # torch 2.15
def test_a_module_can_be_traced(boosted: Boosted) -> None:
    _, model, _ = boosted
    x = torch.ones(2, model.head.in_features)
    traced = torch.jit.trace(model.head, x)
    assert torch.equal(traced(x), model.head(x))
