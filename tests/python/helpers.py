"""Training loops to compare: plain PyTorch, and castor inside a tight budget."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import castor
import grids
from castor.runtime.engine import engine_of
from zoo import Batch, Case, tower, tower_batch, tower_loss

GIB = 2**30
LR = 1e-3
ON_THE_CPU_DEVICE = "CASTOR_TEST_DEVICE" not in os.environ
"""What computes, unless a test asks for another device itself (conftest.py)."""
STEPS = grids.steps(20)
FP32_TOLERANCE = 1e-5
HALF_TOLERANCE = 4e-3
FORMATS = [
    ("fp32", "fp32"),
    ("fp16", "fp32"),
    ("bf16", "fp32"),
    ("bf16", "split"),
    ("bf16", "split_bf16"),
    ("bf16", "split_int8"),
]
"""(precision, state format) that go together."""
FORMATS_AND_OVERLAPS = [
    (*both, overlap)
    for overlap in ("none", "forward", "backward")
    for both in FORMATS
    if (both[0], overlap) != ("fp16", "backward")
]
"""And what updates run beside: fp16's loss scale wants all gradients before the first of them."""
PARAM_ALIGNMENT = 64
"""Bytes at which a chunk aligns its parameters (kParamAlignment in csrc/core/ids.h)."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Has nothing but reference counts free objects, after one collection of garbage."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def param_bytes(model: nn.Module, element_size: int = 4) -> int:
    return sum(p.numel() for p in model.parameters()) * element_size


def largest_module_bytes(model: nn.Module, element_size: int = 4) -> int:
    return max(
        sum(p.numel() for p in m.parameters(recurse=False)) * element_size for m in model.modules()
    )


def margin(model: nn.Module, fraction: float, element_size: int = 4) -> int:
    """What tight(fraction) of the issue adds to the non-model peak."""
    return max(
        int(fraction * param_bytes(model, element_size)),
        int(2.2 * largest_module_bytes(model, element_size)),
    )


def plugin(memory: int | str = GIB, **settings: Any) -> castor.GeminiPlugin:
    device = "cuda" if os.environ.get("CASTOR_TEST_DEVICE") == "cuda" else "cpu"
    settings = {
        "device": device, "host_memory": GIB, "precision": "fp32", "activations": "keep",
    } | settings  # fmt: skip
    if not ON_THE_CPU_DEVICE:
        settings.pop("link_bandwidth", None)  # such a device has a link, and refuses another speed
    return castor.GeminiPlugin(device_memory=memory, **settings)


@dataclass
class Boosted:
    """A boosted model with its parts; unpacks as (booster, model, optimizer)."""

    booster: castor.Booster
    model: Any
    optimizer: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.booster, self.model, self.optimizer))

    def report(self) -> castor.MemoryReport:
        return self.booster.report(self.model)

    def step(self, loss: torch.Tensor) -> float:
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def boost(
    model: nn.Module,
    memory: int | str = GIB,
    optimizer: torch.optim.Optimizer | None = None,
    **settings: Any,
) -> Boosted:
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    booster = castor.Booster(plugin=plugin(memory, **settings))
    model, optimizer, *_ = booster.boost(model, optimizer)
    return Boosted(booster, model, optimizer)


def device_of(model: Any) -> torch.device:
    """Where a model computes, boosted or not."""
    try:
        return engine_of(model).device
    except castor.UsageError:
        return next(model.parameters()).device  # type: ignore[no-any-return]


def on_device_of(boosted: Boosted, batch: Batch) -> Batch:
    """The batch where the model computes."""
    device = engine_of(boosted.model).device
    return {key: value.to(device) for key, value in batch.items()}


def train_on(
    boosted: Boosted, case: Case, *, steps: int = 4, micro_batches: int = 1
) -> list[float]:
    """Losses of every micro-batch, over batches of their own."""
    losses = []
    for step in range(steps):
        for k in range(micro_batches):
            batch = on_device_of(boosted, case.batch(step * micro_batches + k))
            loss = case.loss(boosted.model(**batch), batch) / micro_batches
            boosted.booster.backward(loss, boosted.optimizer)
            losses.append(loss.item())
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return losses


Forward = Callable[[Any, int], torch.Tensor]
"""(model, seed of the batch) -> loss."""


def losses_of_plain(
    model: nn.Module, forward: Forward, steps: int = 6, max_norm: float = 0.0
) -> list[float]:
    """Trains `model` in place, without castor."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=LR)
    losses = []
    for i in range(steps):
        loss = forward(model, i)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0, steps: int = 4
) -> list[float]:
    """Losses of a tower in a loop of plain PyTorch, boosted or not."""
    losses = []
    for seed in range(first, first + steps):
        loss = tower_loss(model, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses_of_boosted(boosted: Boosted, forward: Forward, steps: int = 6) -> list[float]:
    return [boosted.step(forward(boosted.model, i)) for i in range(steps)]


def beside_gradients(memory: int, model: nn.Module) -> int:
    """`memory`, and what a device with a link of its own keeps for gradients on their way."""
    if ON_THE_CPU_DEVICE:
        return memory
    return memory + max(p.numel() * p.element_size() for p in model.parameters())


def tight_memory(build: Callable[[], nn.Module], forward: Forward, fraction: float = 0.35) -> int:
    """tight(fraction), measured by two steps of a run with ample budget."""
    boosted = boost(build())
    losses_of_boosted(boosted, forward, steps=2)
    gradients = 0  # the window of those on their way to the host
    if engine_of(boosted.model).device.type != "cpu":
        gradients = max(p.numel() * p.element_size() for p in boosted.model.parameters())
    return boosted.report().peak_nonmodel_bytes + margin(boosted.model, fraction) + gradients


def assert_trains_as_plain(
    build: Callable[[], nn.Module],
    forward: Forward,
    *,
    steps: int = 6,
    fraction: float = 0.35,
    max_norm: float = 0.0,
) -> castor.MemoryReport:
    """Same losses and weights as plain PyTorch, in tight(fraction)."""
    plain = build()
    expected = losses_of_plain(plain, forward, steps, max_norm)
    memory = tight_memory(build, forward, fraction)
    boosted = boost(build(), memory, max_norm=max_norm)
    assert_close_losses(losses_of_boosted(boosted, forward, steps), expected)
    assert_close_weights(boosted.model, plain)
    report = boosted.report()
    assert report.peak_device_bytes <= report.device_budget_bytes == memory
    return report


def assert_close_losses(
    actual: Sequence[float], expected: Sequence[float], tolerance: float = FP32_TOLERANCE
) -> None:
    """Relative differences within `tolerance`, the first loss (before any update) bitwise."""
    assert len(actual) == len(expected)
    if tolerance == FP32_TOLERANCE:
        assert actual[0] == expected[0]
    worst = max(abs(a - b) / abs(b) for a, b in zip(actual, expected, strict=True))
    assert worst <= tolerance, (worst, list(actual), list(expected))


def assert_close_weights(model: nn.Module, plain: nn.Module, atol: float | None = None) -> None:
    """Within a tenth of one Adam step (which moves a weight by about LR)."""
    atol = 0.1 * LR if atol is None else atol
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        if param.numel() == 0:
            continue
        difference = (param.cpu().float() - expected[name].cpu().float()).abs().max().item()
        assert difference <= atol, f"{name} is {difference} away"


def assert_same_weights(model: nn.Module, expected: Iterable[torch.Tensor]) -> None:
    """Bitwise, wherever they are."""
    assert_equal([p.detach() for p in model.parameters()], list(expected))


def copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """On the CPU: they take nothing of a device's memory."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def assert_boost_fails(
    error: type[Exception] | tuple[type[Exception], ...],
    match: str,
    memory: int | str = GIB,
    **settings: Any,
) -> Any:
    """Boosting fails, touches nothing, and the model still trains without castor."""
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    before, kind = copies(model.parameters()), type(optimizer)
    storages = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=match) as raised:
        castor.Booster(plugin=plugin(memory, **settings)).boost(model, optimizer)
    assert_same_weights(model, before)
    assert [p.data_ptr() for p in model.parameters()] == storages
    assert type(optimizer) is kind
    assert not model._forward_pre_hooks
    for seed in range(3):
        model(**tower_batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = tower()
    losses_of_plain(reference, lambda model, i: model(**tower_batch(i)), steps=3)
    assert_same_weights(model, reference.parameters())
    model.layers[0] = nn.Linear(32, 32)  # not guarded either
    return raised.value


def go_on(boosted: Boosted, first: int = 0, steps: int = 4, *, width: int = 32) -> list[float]:
    """Losses of steps on a tower of that width, whose batches are numbered."""
    return [
        boosted.step(boosted.model(**tower_batch(seed, width=width)))
        for seed in range(first, first + steps)
    ]


def exact_state(boosted: Boosted) -> list[torch.Tensor]:
    """Weights, masters and float32 states of the update rule."""
    engine = engine_of(boosted.model)
    assert engine.rule is not None
    engine.session.move_to_host()
    state = copies(boosted.model.parameters())
    for i in range(len(engine.params)):
        master = engine.session.master(i)
        state += [] if master is None else copies([master])
    for entry in boosted.optimizer.state_dict()["state"].values():
        state += copies([entry[name] for name in engine.rule.states])
    return state


def equal(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """torch.equal, wherever they are."""
    return torch.equal(actual.cpu(), expected.cpu())


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """As torch.testing's, wherever they are."""
    torch.testing.assert_close(actual, expected, check_device=False, **options)


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Wherever they are."""
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        assert equal(mine, theirs)


def apart(weights: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> float:
    """How far from each other, relative, in the norm of all."""
    one, other = (torch.cat([w.flatten().float() for w in of]) for of in (weights, expected))
    return float((one - other).norm() / other.norm())
