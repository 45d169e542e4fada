"""Placement policies, saved traces, and steps that leave the plan."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
from helpers import (
    assert_boost_fails,
    assert_close_losses,
    assert_same_weights,
    boost,
    copies,
    losses_of_boosted,
    losses_of_plain,
    tight_memory,
)
from zoo import CASES, Tower, tower, tower_batch, tower_loss


def gpt2_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return model(**CASES["gpt2"].batch(seed)).loss


POLICIES: dict[str, dict[str, Any]] = {
    "auto": {"placement_policy": "auto"},
    "cpu": {"placement_policy": "cpu"},
    "cuda": {"placement_policy": "cuda"},
    "older name": {"tensor_placement_policy": "cpu"},
    "static": {"placement_policy": "static"},
    "static half": {"placement_policy": "static", "offload_optim_frac": 0.5},
    "static optimizer": {"placement_policy": "static", "offload_optim_frac": 1.0},
    "static stream": {
        "placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 0.5,
    },
    "no prefetch": {"max_prefetch": 0},
    "far prefetch": {"max_prefetch": 4},
    "one chunk size": {"chunk_bytes": "8KiB"},
    "tiny chunks": {"chunk_bytes": 64},
    "one chunk": {"chunk_bytes": "1MiB"},
    "a slow link": {"link_bandwidth": "200MB/s", "max_prefetch": 2},
    "capped": {"steady_cuda_cap_ratio": 0.9, "warmup_non_model_data_ratio": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_the_same_bits(name: str) -> None:
    reference, boosted = boost(tower()), boost(tower(), **POLICIES[name])
    expected = losses_of_boosted(reference, tower_loss)
    assert losses_of_boosted(boosted, tower_loss) == expected
    assert_same_weights(boosted.model, copies(reference.model.parameters()))
    assert boosted.report().peak_device_bytes <= boosted.report().device_budget_bytes


def test_cuda_policy_needs_room_for_everything() -> None:
    everything = 16 * sum(p.numel() for p in tower().parameters())
    error = assert_boost_fails(
        castor.OutOfMemoryError, "placement_policy", everything // 2, placement_policy="cuda"
    )
    assert error.tier == "device"
    boosted = boost(tower(), 2 * everything, placement_policy="cuda")
    losses_of_boosted(boosted, tower_loss, steps=2)
    report = boosted.report()
    assert report.host_bytes == 0
    assert report.h2d_bytes == report.d2h_bytes == report.evictions == 0


# --- traces and divergence ----------------------------------------------------------------------


def test_saved_trace_makes_the_first_step_run_by_plan(tmp_path: Path) -> None:
    memory = tight_memory(CASES["gpt2"].model, gpt2_loss)
    first = boost(CASES["gpt2"].model(), memory)
    with pytest.raises(castor.UsageError, match="no trace"):
        first.booster.save_trace(tmp_path / "trace.json", first.model)
    expected = losses_of_boosted(first, gpt2_loss, steps=3)
    first.booster.save_trace(tmp_path / "trace.json", first.model)
    again = boost(CASES["gpt2"].model(), memory, trace_file=tmp_path / "trace.json")
    assert again.report().plans == 1
    hits = []
    for seed in range(3):
        before = again.report().prefetch_hits
        assert again.step(gpt2_loss(again.model, seed)) == expected[seed]
        hits.append(again.report().prefetch_hits - before)
    assert hits[0] == hits[1] == hits[2] > 0
    assert again.report().divergent_steps == 0
    assert again.report().plans == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "not json",
        lambda text: "[]",
        lambda text: text.replace("castor-trace-1", "castor-trace-9"),
        lambda text: json.dumps(json.loads(text) | {"modules": ["another"]}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "modules"}),
        lambda text: json.dumps(json.loads(text) | {"events": [["x"]]}),
        lambda text: json.dumps(json.loads(text) | {"events": [[77, 0, 0, 0]]}),
        lambda text: json.dumps(json.loads(text) | {"events": [[0, 99999, 0, 0]]}),
        lambda text: json.dumps(json.loads(text) | {"events": [[0, 0, -1, 0]]}),
    ],
    ids=["text", "list", "format", "model", "no modules", "columns", "kind", "id", "negative"],
)
def test_damaged_trace_is_refused_and_changes_nothing(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    path = tmp_path / "trace.json"
    boosted = boost(tower())
    losses_of_boosted(boosted, tower_loss, steps=1)
    boosted.booster.save_trace(path, boosted.model)
    path.write_text(damage(path.read_text()))
    assert_boost_fails((castor.UsageError, ValueError), "trac", trace_file=path)


def ragged_loss(model: nn.Module, seed: int) -> torch.Tensor:
    rows = [8, 8, 3, 8, 5, 1, 8, 2][seed % 8]
    return model(**tower_batch(seed, rows=rows))


class Branching(Tower):
    """Leaves out every other layer in some steps: other modules, not only other shapes."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        layers = self.layers if x.sum() > 0 else self.layers[::2]
        for layer in layers:
            x = torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), labels)


def branching() -> Branching:
    torch.manual_seed(7)
    return Branching()


def test_changing_shapes_train_as_plain_and_do_not_diverge() -> None:
    expected = losses_of_plain(tower(), ragged_loss, steps=16)
    boosted = boost(tower(), tight_memory(tower, tower_loss))
    assert_close_losses(losses_of_boosted(boosted, ragged_loss, steps=16), expected)
    report = boosted.report()
    assert report.divergent_steps == 0
    assert report.peak_device_bytes <= report.device_budget_bytes


def test_other_branches_train_as_plain_and_are_counted() -> None:
    full = [bool(tower_batch(seed)["x"].sum() > 0) for seed in range(16)]
    assert 3 < sum(full) < 13
    expected = losses_of_plain(branching(), tower_loss, steps=16)
    boosted = boost(branching(), tight_memory(tower, tower_loss))
    assert_close_losses(losses_of_boosted(boosted, tower_loss, steps=16), expected)
    report = boosted.report()
    assert 0 < report.divergent_steps < 16
    assert report.plans > 1, "a divergence that repeats becomes the plan"
    assert report.peak_device_bytes <= report.device_budget_bytes


def test_micro_batches_of_other_branches_accumulate_as_plain() -> None:
    """Parameters that some micro-batches of a step do not reach, and some steps not at all."""

    def loss(model: nn.Module, seed: int) -> torch.Tensor:
        return tower_loss(model, 3 * seed) / 3

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for step in range(6):
            for k in range(3):
                part = tower_loss(model, 3 * step + k) / 3
                part.backward()
                losses.append(part.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    plain = branching()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    boosted = boost(branching(), tight_memory(branching, loss), max_prefetch=2)
    assert_close_losses(train(boosted.model, boosted.optimizer), expected)
    assert boosted.report().peak_device_bytes <= boosted.report().device_budget_bytes
