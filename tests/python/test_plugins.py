"""What Booster needs of a plugin, and that the runtime needs none."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import castor
from castor import _C
from castor.plugins import Plugin
from castor.runtime.engine import Engine, EngineSettings, engine_of
from helpers import losses_of_plain, plugin
from zoo import tower, tower_loss

MIB = 2**20


class Recording:
    """A plugin that is not castor's, around one that is."""

    def __init__(self) -> None:
        self.inner = plugin()
        self.configured: list[nn.Module] = []

    @property
    def scales_loss(self) -> bool:
        return self.inner.scales_loss

    def configure(self, model: nn.Module, optimizer: Optimizer | None) -> Any:
        self.configured.append(model)
        return self.inner.configure(model, optimizer)


def test_booster_takes_any_plugin() -> None:
    own = Recording()
    booster = castor.Booster(own)
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster.boost(model, optimizer)
    assert own.configured == [model]
    losses = []
    for seed in range(3):
        loss = tower_loss(model, seed)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(losses_of_plain(tower(), tower_loss, steps=3), rel=1e-5)


def test_gemini_plugin_is_one() -> None:
    assert isinstance(plugin(), Plugin)
    assert not plugin().scales_loss
    assert plugin(precision="fp16").scales_loss


@pytest.mark.parametrize("wrong", [object(), castor.GeminiPlugin, "gemini", None])
def test_what_is_no_plugin_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="give a GeminiPlugin"):
        castor.Booster(cast(Plugin, wrong))


def test_an_engine_needs_no_plugin() -> None:
    session = _C.SessionOptions(
        precision="float32",
        chunk_bytes=0,
        placement=_C.PlacementOptions(
            policy="auto", offload_optim_frac=0.0, offload_param_frac=0.0
        ),
        runtime=_C.RuntimeOptions(
            max_prefetch=1, warmup_nonmodel_ratio=0.8, steady_cap_ratio=1.0, margin_ratio=1.0
        ),
        budgets=_C.SharedBudgets(device_bytes=8 * MIB, host_bytes=8 * MIB, nvme_bytes=MIB),
        state=_C.StateOptions(
            rule=None,
            state_format="fp32",
            nvme=None,
            nvme_fraction=0.0,
            device_fraction=0.0,
            device_fraction_adapts=False,
        ),
        overlap="none",
        num_threads=0,
    )
    model = tower()
    settings = EngineSettings(session=session, precision="fp32", device=torch.device("cpu"))
    engine = Engine(model, settings)
    assert engine_of(model) is engine
    with torch.no_grad():
        assert tower_loss(model, 0).item() == pytest.approx(tower_loss(tower(), 0).item())
    assert engine.report().device_budget_bytes == 8 * MIB
