"""Bytes: what counts, the budget at every moment, and running out."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import castor
from helpers import (
    Boosted,
    assert_boost_fails,
    assert_close_losses,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    losses_of_plain,
    param_bytes,
    tight_memory,
)
from zoo import CASES, Tower, tower, tower_batch, tower_loss


def gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(**CASES["gpt2"].batch(seed)).loss


# --- accounting ---------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Reads the ledger before and after every operator of forward, backward and step."""

    def __init__(self, boosted: Boosted) -> None:
        super().__init__()
        self.boosted = boosted
        self.highest = 0
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators += 1
        use = self.boosted.booster.memory(self.boosted.model)
        assert use.device_bytes >= use.nonmodel_bytes
        self.highest = max(self.highest, use.device_bytes)
        return result


@pytest.mark.parametrize("fraction", [0.35, 0.6])
def test_budget_holds_at_every_operator(fraction: float) -> None:
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss, fraction)
    boosted = boost(CASES["gpt2"].model(), memory)
    with Watch(boosted) as watch:
        losses_of_boosted(boosted, gpt2_loss, steps=4)
    assert watch.operators > 400
    assert 0 < watch.highest <= boosted.report().peak_device_bytes <= memory


def test_activation_bytes_are_exact() -> None:
    """One linear layer: what forward leaves behind is its output and nothing else."""
    model = nn.Linear(64, 32)
    boosted = boost(model)
    x = torch.randn(16, 64)
    output = model(x)
    assert boosted.booster.memory().nonmodel_bytes == 16 * 32 * 4
    (output.square()).sum().backward()
    del output
    boosted.optimizer.step()
    assert boosted.booster.memory().nonmodel_bytes == 0
    chunk = boosted.report().peak_device_bytes - boosted.report().peak_nonmodel_bytes
    assert 0 <= chunk <= (64 * 32 + 32) * 4 + 128


@pytest.mark.parametrize("case", ["gpt2", "vit", "t5"])
def test_balance_and_peak_are_the_same_every_step(case: str) -> None:
    boosted = boost(CASES[case].model())
    held, peaks = [], []
    for seed in range(6):
        loss = boosted.model(**CASES[case].batch(seed)).loss
        boosted.booster.backward(loss, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        del loss
        held.append(boosted.booster.memory().nonmodel_bytes)
        peaks.append(boosted.report().peak_nonmodel_bytes)
    assert len(set(held)) == 1
    assert len(set(peaks)) == 1
    assert held[0] < 0.02 * peaks[0]


def test_profiler_works_beside_the_accounting() -> None:
    boosted = boost(tower())
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        losses_of_boosted(boosted, tower_loss, steps=2)
    events = profiler.key_averages()
    assert any(event.key == "aten::addmm" for event in events)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in events) > 0
    losses_of_boosted(boosted, tower_loss, steps=1)
    assert boosted.booster.memory().nonmodel_bytes == 0


@pytest.mark.parametrize("operation", ["gelu", "conv2d", "resize", "numpy"])
def test_allocator_serves_every_way_torch_asks_for_memory(operation: str) -> None:
    """oneDNN takes raw pointers; resize_ and numpy take storages over."""

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = nn.functional.gelu(self.conv(x))
            if operation == "resize":
                torch.empty(4).resize_(5000).zero_()
            if operation == "numpy":
                y = y + torch.from_numpy(y.detach().numpy().copy())
            return y

    boosted = boost(Uses())
    losses_of_boosted(
        boosted, lambda model, i: model(torch.full((2, 3, 16, 16), 0.1 + i)).square().mean()
    )
    assert boosted.booster.memory().nonmodel_bytes == 0


def test_report_adds_up_and_prints() -> None:
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss)
    boosted = boost(CASES["gpt2"].model(), memory)
    losses_of_boosted(boosted, gpt2_loss, steps=4)
    report = boosted.report()
    model_bytes = param_bytes(boosted.model)
    assert report.steps == 4
    assert report.nvme_bytes == 0
    assert report.device_budget_bytes == memory
    assert report.h2d_bytes >= 4 * 0.99 * model_bytes
    assert report.d2h_bytes == 4 * model_bytes  # the gradients
    assert report.demand_fetches + report.prefetch_hits > 0
    assert report.waste <= 0.03
    assert str(report).splitlines()[1].startswith("device peak ")
    assert report.as_dict()["peak_device_bytes"] == report.peak_device_bytes
    assert boosted.booster.memory().host_bytes == report.host_bytes <= report.host_budget_bytes


# --- running out --------------------------------------------------------------------------------


def test_activation_beyond_the_budget_raises_and_a_smaller_batch_goes_on() -> None:
    expected = losses_of_plain(tower(), tower_loss, steps=6)
    memory = tight_memory(tower, tower_loss)
    boosted = boost(tower(), memory)
    losses = losses_of_boosted(boosted, tower_loss, steps=3)
    with pytest.raises(castor.OutOfMemoryError, match=r"module 'layers\.\d'") as raised:
        boosted.model(**tower_batch(0, rows=1000))
    error = raised.value
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, castor.Error)
    assert (error.tier, error.budget) == ("device", memory)
    assert error.requested == 1000 * 32 * 4
    assert 0 <= error.available < error.requested
    assert "device_memory" in str(error)
    assert "batch" in str(error)
    del raised, error
    losses += [boosted.step(tower_loss(boosted.model, i)) for i in range(3, 6)]
    assert_close_losses(losses, expected)
    assert boosted.report().peak_device_bytes <= memory
    assert boosted.booster.memory().nonmodel_bytes == 0


def test_running_out_in_backward_raises_and_training_goes_on() -> None:
    class Hungry(Tower):
        hungry = False

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            loss = super().forward(x, labels)
            if self.hungry:
                loss.register_hook(lambda grad: grad + torch.zeros(2**20).sum())
            return loss

    def build() -> Hungry:
        torch.manual_seed(7)
        return Hungry()

    expected = losses_of_plain(build(), tower_loss)
    boosted = boost(build(), tight_memory(build, tower_loss))
    losses = losses_of_boosted(boosted, tower_loss, steps=3)
    boosted.model.hungry = True
    before = copies(boosted.model.parameters())
    with pytest.raises(castor.OutOfMemoryError, match=r"4\.00 MiB"):
        tower_loss(boosted.model, 0).backward()
    assert_same_weights(boosted.model, before)
    boosted.model.hungry = False
    boosted.optimizer.zero_grad()
    losses += [boosted.step(tower_loss(boosted.model, i)) for i in range(3, 6)]
    assert_close_losses(losses, expected)


def test_host_budget_overrun_at_boost_changes_nothing() -> None:
    needed = 16 * sum(p.numel() for p in tower().parameters())
    for share in (0.1, 0.5, 0.99):
        error = assert_boost_fails(
            castor.OutOfMemoryError, "host_memory", host_memory=int(share * needed)
        )
        assert error.tier == "host"
        assert error.budget == int(share * needed)
        assert error.available < error.requested


class Sliced(nn.Module):
    """Backward needs more memory than forward: the slice's gradient is as large as all outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x).exp()[:, :1]


def test_an_error_in_backward_names_the_operation() -> None:
    torch.manual_seed(0)
    boosted = boost(Sliced(), 700 * 1024, activations="keep")
    loss = boosted.model(torch.ones(16, 16)).sum()
    said = r"Asked for by .*run_backward .*\. In ExpBackward0, outside any module: chunks in use"
    with pytest.raises(castor.OutOfMemoryError, match=said):
        loss.backward()


def test_a_thread_that_boosts_is_not_named_as_what_asked() -> None:
    model = tower()
    optimizer = torch.optim.AdamW(model.parameters())
    booster = castor.Booster(
        castor.GeminiPlugin(device="cpu", device_memory="1MiB", host_memory="1KiB")
    )
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(booster.boost, model, optimizer).exception()
    assert isinstance(refused, castor.OutOfMemoryError)
    assert "Asked for by" not in str(refused)
    assert "host_memory" in str(refused)
