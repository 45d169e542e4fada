"""A step on the meta device has the events of a boosted one, whatever the model."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from castor import _C, Booster, GeminiPlugin
from castor.config import Precision, StateFormat
from castor.config.event_names import EVENT_KINDS
from castor.config.names import SCALAR_TYPES
from castor.estimate.metatrace import Step, record_step
from castor.estimate.operators import Results
from castor.runtime.engine import engine_of
from castor.runtime.spec import ModelSpec
from zoo import CASES, Batch, Case

Trace = list[tuple[str, int]]
"""Kinds, and the modules or chunks they are of."""
FORMATS: dict[Precision, StateFormat] = {"fp32": "fp32", "bf16": "split"}


def step_of(build: Callable[[], nn.Module], batch: Batch, precision: Precision = "fp32") -> Step:
    """On the meta device."""
    with torch.device("meta"):
        model = build().to(getattr(torch, SCALAR_TYPES[precision])).train()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    spec = ModelSpec.structure(model)
    params = zip(spec.names, spec.params, strict=True)
    simulator = _C.Simulator(
        params=[(name, param.numel(), param.requires_grad) for name, param in params],
        modules=[(m.name, m.params, m.parent) for m in spec.modules],
        precision=SCALAR_TYPES[precision],
        chunk_bytes=0,
        state_format=FORMATS[precision],
    )
    inputs = {name: tensor.to("meta") for name, tensor in batch.items()}
    return record_step(model, spec, inputs, simulator)


def recorded(build: Callable[[], nn.Module], batch: Batch, precision: Precision = "fp32") -> Trace:
    """Of a step on the meta device."""
    step = step_of(build, batch, precision)
    return [(EVENT_KINDS[m.kind], m.position) for m in step.trace]


def boosted(build: Callable[[], nn.Module], batch: Batch, precision: Precision = "fp32") -> Trace:
    """Of a step that castor's runtime followed."""
    model = build().train()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    plugin = GeminiPlugin(
        device="cpu",
        device_memory="64MiB",
        precision=precision,
        optim_state_format=FORMATS[precision],
        activations="keep",
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.backward(model(**batch).loss, optimizer)
    optimizer.step()
    trace = engine_of(model).session.trace()
    assert trace is not None
    return [(EVENT_KINDS[event[0]], event[1]) for event in trace]


@dataclasses.dataclass
class Kept:
    """What a module may return: its tensor is two dicts and a list deep in an object."""

    found: dict[str, dict[str, list[torch.Tensor]]]
    beside: str = "no tensor"


@dataclasses.dataclass
class Output:
    loss: torch.Tensor


class Wrapping(nn.Module):
    """A linear layer that returns an object."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> Kept:
        return Kept(found={"of": {"this": [self.inner(x).tanh() * self.scale]}})


class Stack(nn.Module):
    """Modules that return objects, in and out of checkpoints; a frozen and an unused layer."""

    def __init__(self, *, depth: int = 3, reentrant: bool | None = None) -> None:
        super().__init__()
        width = 16
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Wrapping(width) for _ in range(depth))
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(width, width)
        self.reentrant = reentrant

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer(x).found["of"]["this"][0]
        return found

    def forward(self, x: torch.Tensor) -> Output:
        x = self.first(x)
        for layer in self.layers:
            if self.reentrant is None:
                x = self._layer(layer, x)
            else:
                x = checkpoint(self._layer, layer, x, use_reentrant=self.reentrant)
        return Output(loss=self.frozen(x).square().mean())


def rows() -> Batch:
    return {"x": torch.ones((4, 16))}


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_step_on_the_meta_device_has_the_events_of_a_boosted_one(name: str) -> None:
    case = CASES[name]
    # On the meta device, as on GPUs, torch multiplies by experts in bf16 alone.
    precision: Precision = "bf16" if name == "mixtral" else "fp32"
    events = recorded(case.build, case.batch(0), precision)
    assert events == boosted(case.build, case.batch(0), precision)
    assert {kind for kind, _ in events} == set(EVENT_KINDS)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_modules_that_return_objects_are_followed_into_backward(reentrant: bool | None) -> None:
    def build() -> nn.Module:
        return Stack(reentrant=reentrant)

    events = recorded(build, rows())
    assert events == boosted(build, rows())
    layers = {
        i for i, m in enumerate(ModelSpec.structure(build()).modules) if m.name.startswith("layers")
    }
    entered = [position for kind, position in events if kind == "backward_enter"]
    assert layers <= set(entered)


def checkpointed(case: Case, *, reentrant: bool) -> nn.Module:
    model: Any = case.build()
    with warnings.catch_warnings():  # transformers 6 will rename it
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`use_cache=True` is incompatible")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_layers_that_a_model_checkpoints_are_entered_as_often(name: str, reentrant: bool) -> None:
    case = CASES[name]

    def build() -> nn.Module:
        return checkpointed(case, reentrant=reentrant)

    events = recorded(build, case.batch(0))
    assert events == boosted(build, case.batch(0))
    assert len(events) > len(recorded(case.build, case.batch(0)))


@pytest.mark.parametrize("name", sorted(CASES))
def test_remembered_operators_take_what_they_took(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    precision: Precision = "bf16" if name == "mixtral" else "fp32"
    asked: list[bool] = []
    find = Results.find

    def counted(results: Results, key: Any) -> Any:
        found = find(results, key)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(Results, "find", counted)
    remembered = step_of(case.build, case.batch(0), precision)
    assert any(asked)
    monkeypatch.setattr(Results, "find", lambda *_: None)
    assert remembered == step_of(case.build, case.batch(0), precision)


class Mixing(nn.Module):
    """Operators of which one call tells nothing of the next: in place, views, other types."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.table = torch.ones((4, 4))  # of which nobody knows: no buffer

    def forward(self, x: torch.Tensor) -> Output:
        x = x * self.scale + self.table.view(2, 8).view(4, 4)
        x = torch.ops.aten._unsafe_view(x, [4, 4])
        for factor in (2, 2.0, True, 2):
            ints = torch.ones((4, 4), dtype=torch.int64, device=x.device) * factor
            x = x + ints
        for operand in (x, x.t(), x.double(), x[:, ::2].contiguous().repeat(1, 2)):
            x = (operand * operand).float()
        for _ in range(2):
            fresh = torch.zeros_like(x)
            fresh.add_(x)
            x = torch.ops.aten._unsafe_view(fresh, [2, 8]).view(4, 4)
            x = torch.cat(torch.max(x, 1, keepdim=True)[:1] * 4, dim=1) + x
        there = torch.arange(4, device=x.device).float() * 2
        here = torch.arange(4, device="cpu").float() * 2
        for _ in range(2):  # what is written has values
            here.add_(1)
        for one in (x.clone(), x.double()):
            one.mul_(2).masked_fill_(one > 0, 1)
            x = x + one.float()
        assert here.tolist() == [2, 4, 6, 8], "its values are known"
        return Output(loss=(x * there).sum() * here.sum().item())


def test_operators_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.ones((4, 4))}
    remembered = step_of(Mixing, batch)
    monkeypatch.setattr(Results, "find", lambda *_: None)
    assert remembered == step_of(Mixing, batch)
