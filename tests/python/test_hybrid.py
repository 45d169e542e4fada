"""Spare device memory takes whole chunks: same bits, fewer bytes over the link, no new errors."""

import gc
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
import grids
from castor.runtime.engine import engine_of
from helpers import (
    FORMATS,
    LR,
    Boosted,
    assert_boost_fails,
    assert_same_weights,
    boost,
    copies,
    equal,
    plugin,
)
from zoo import CASES, tower, tower_batch

OF_THE_CPU_DEVICE = pytest.mark.cpu_device(
    "a GPU has no optimizers without kernels, no views of moments and no arrays"
)
STAY = {"gpu_margin_mem_ratio": 0.0}
WAYS = grids.some(
    tuple(itertools.product(("none", "forward"), (None, "200MB/s"))),
    ("none", None),
    ("forward", "200MB/s"),
)
"""Overlaps and links."""
BACKWARD = {"nonfinite": "ignore", "enable_gradient_accumulation": False, "overlap": "backward"}


def loss_of(model: nn.Module, seed: int, rows: int = 8) -> torch.Tensor:
    loss: torch.Tensor = model(**tower_batch(seed, rows=rows))
    return loss


def train(boosted: Boosted, steps: int = 4, *, accumulate: int = 1, first: int = 0) -> Boosted:
    case = CASES["gpt2"]
    seeds = itertools.count(first)
    for _ in range(steps):
        for _ in range(accumulate):
            batch = case.batch(next(seeds))
            boosted.booster.backward(
                case.loss(boosted.model(**batch), batch) / accumulate, boosted.optimizer
            )
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    return boosted


def gpt2(**settings: Any) -> Boosted:
    return boost(CASES["gpt2"].model(), **settings)


def resident_tower(steps: int = 2, **settings: Any) -> Boosted:
    """Wholly on the device by now."""
    boosted = boost(tower(), **settings)
    for seed in range(steps):
        boosted.step(loss_of(boosted.model, seed))
    assert boosted.report().resident_chunks == boosted.report().num_chunks
    return boosted


def take_of_device(model: nn.Module, size: int, *_: Any) -> None:
    """A hook, by functools.partial."""
    torch.empty(size, dtype=torch.uint8, device=engine_of(model).device)


def state_of(boosted: Boosted) -> list[torch.Tensor]:
    state = boosted.optimizer.state_dict()["state"]
    return [
        value.clone()
        for entry in state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    ]


def assert_same(actual: Boosted, expected: Boosted) -> None:
    assert_same_weights(actual.model, copies(expected.model.parameters()))
    for mine, other in zip(state_of(actual), state_of(expected), strict=True):
        assert equal(mine, other)
    report = actual.report()
    assert report.peak_device_bytes <= report.device_budget_bytes


# --- the same bits ------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize(("precision", "state_format"), FORMATS)
def test_resident_chunks_change_no_bit(
    precision: str, state_format: str, max_norm: float, accumulate: int
) -> None:
    settings: dict[str, Any] = {
        "precision": precision,
        "optim_state_format": state_format,
        "max_norm": max_norm,
    }
    expected = train(gpt2(**STAY, **settings), accumulate=accumulate)
    assert expected.report().resident_chunks == 0
    peak = expected.report().peak_device_bytes
    for overlap, link in WAYS:
        for memory in (2 * peak, 2**30):
            boosted = gpt2(memory=memory, overlap=overlap, link_bandwidth=link, **settings)
            assert_same(train(boosted, accumulate=accumulate), expected)
            report = boosted.report()
            assert report.resident_chunks > 0
            if memory == 2**30:
                assert report.resident_chunks == report.num_chunks


@pytest.mark.parametrize(("precision", "state_format"), FORMATS[:1] + FORMATS[2:])
def test_updates_in_backward_give_the_same_bits(precision: str, state_format: str) -> None:
    settings: dict[str, Any] = {"precision": precision, "optim_state_format": state_format}
    expected = train(gpt2(**STAY, nonfinite="ignore", **settings), 5)
    for link in (None, "200MB/s"):
        boosted = train(gpt2(link_bandwidth=link, **BACKWARD, **settings), 5)
        assert boosted.report().resident_chunks == boosted.report().num_chunks
        assert_same(boosted, expected)


@OF_THE_CPU_DEVICE
def test_other_optimizers_run_on_resident_chunks() -> None:
    weights = []
    for settings in (STAY, {}):
        model = tower()
        boosted = boost(model, optimizer=torch.optim.RMSprop(model.parameters(), LR), **settings)
        for seed in range(5):
            boosted.step(loss_of(boosted.model, seed))
        weights.append(copies(boosted.model.parameters()))
    assert boosted.report().resident_chunks == boosted.report().num_chunks
    assert all(equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_chunks_whose_state_is_on_nvme_are_not_resident(tmp_path: Path, overlap: str) -> None:
    expected = train(gpt2(**STAY), 5)
    boosted = gpt2(overlap=overlap, nvme_path=tmp_path, nvme_offload_fraction=0.5)
    assert_same_weights(train(boosted, 5).model, copies(expected.model.parameters()))
    assert 0 < boosted.report().resident_chunks < boosted.report().num_chunks


# --- which chunks, and what it saves ------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cpu", "cuda", "static"])
def test_only_auto_makes_chunks_resident(policy: str) -> None:
    boosted = boost(tower(), placement_policy=policy, **STAY)
    for seed in range(3):
        boosted.step(loss_of(boosted.model, seed))
    assert boosted.report().resident_chunks == 0
    assert_boost_fails(
        ValueError, "bounds the chunks that placement_policy='auto'", placement_policy=policy,
        gpu_margin_mem_ratio=0.5,
    )  # fmt: skip


@pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="gpu_margin_mem_ratio"):
        plugin(gpu_margin_mem_ratio=ratio)


def test_the_report_tells() -> None:
    boosted = resident_tower(steps=3)
    assert "\nresident  " in str(boosted.report())
    assert "Resident" in castor.report.summary(boosted.booster)
    session = engine_of(boosted.model).session
    assert session.timeline()["on_device_at_start"] == list(range(boosted.report().num_chunks))


# --- tensors that users hold --------------------------------------------------------------------


@OF_THE_CPU_DEVICE
def test_tensors_held_from_before_keep_up() -> None:
    boosted = boost(tower())
    first = boosted.model.layers[0].weight
    loss_of(boosted.model, 0).backward()
    gradient = first.grad
    boosted.optimizer.step()
    moment = boosted.optimizer.state[first]["exp_avg"]
    addresses = first.data_ptr(), gradient.data_ptr(), moment.data_ptr()
    for seed in range(1, 4):
        boosted.optimizer.zero_grad(set_to_none=False)
        loss_of(boosted.model, seed).backward()
        boosted.optimizer.step()
    assert boosted.report().resident_chunks == boosted.report().num_chunks
    moved = first.data_ptr(), gradient.data_ptr(), moment.data_ptr()
    assert all(before != after for before, after in zip(addresses, moved, strict=True))
    assert first.grad is gradient
    reference = boost(tower(), **STAY)
    for seed in range(4):
        reference.optimizer.zero_grad()
        loss_of(reference.model, seed).backward()
        reference.optimizer.step()
    other = reference.model.layers[0].weight
    assert equal(gradient, other.grad)
    assert equal(moment, reference.optimizer.state[other]["exp_avg"])
    assert_same(boosted, reference)


def test_aliases_made_on_the_device_follow_to_the_host() -> None:
    boosted = resident_tower()
    weight = boosted.model.layers[0].weight
    loss_of(boosted.model, 5).backward()
    alias, part = weight.detach()[1:], weight.grad[:2]
    moments = [entry["exp_avg_sq"].view(-1) for entry in boosted.optimizer.state.values()]
    expected = copies([alias, part, *moments])
    crowd_out(boosted)
    for tensor, value in zip([alias, part, *moments], expected, strict=True):
        assert equal(tensor, value)
    with torch.no_grad():
        alias.fill_(0.25)
    assert equal(weight[1:], torch.full_like(alias, 0.25))


@OF_THE_CPU_DEVICE
def test_a_chunk_that_an_array_refers_to_stays_where_it_is() -> None:
    boosted = boost(tower())
    weight = boosted.model.layers[2].weight
    array = weight.detach().numpy()
    for seed in range(4):
        boosted.step(loss_of(boosted.model, seed))
    assert 0 < boosted.report().resident_chunks < boosted.report().num_chunks
    assert equal(torch.from_numpy(array), weight)


@OF_THE_CPU_DEVICE
def test_an_array_made_of_a_resident_chunk_outlives_the_model() -> None:
    boosted = resident_tower()
    arrays = [p.detach().numpy() for p in boosted.model.parameters()]
    expected = copies(boosted.model.parameters())
    del boosted
    gc.collect()
    for array, value in zip(arrays, expected, strict=True):
        assert equal(torch.from_numpy(array), value)


# --- the way back -------------------------------------------------------------------------------


def crowd_out(boosted: Boosted) -> None:
    """An evaluation whose activations want nearly all of the device."""
    report = boosted.report()

    def take(*_: Any) -> None:
        take_of_device(boosted.model, report.device_budget_bytes - report.resident_bytes // 2)

    handle = boosted.model.layers[3].register_forward_pre_hook(take)
    with torch.no_grad():
        loss_of(boosted.model, 0)
    handle.remove()
    assert boosted.report().resident_chunks < boosted.report().num_chunks


@pytest.mark.parametrize("settings", [{}, {"link_bandwidth": "1GB/s", "overlap": "forward"}])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_memory_that_is_needed_after_all_comes_back(phase: str, settings: dict[str, Any]) -> None:
    """A step in the middle takes what streaming would have left it."""

    def run(**more: Any) -> Boosted:
        boosted = boost(tower(), memory, **settings, **more)
        for seed in range(6):
            handles = []
            if seed == 3:
                take = partial(take_of_device, boosted.model, size)
                for layer in (boosted.model.layers[1], boosted.model.layers[3]):
                    handles.append(
                        layer.register_forward_hook(take)
                        if phase == "forward"
                        else layer.weight.register_hook(take)
                    )
            boosted.step(loss_of(boosted.model, seed))
            for handle in handles:
                handle.remove()
        return boosted

    whole = resident_tower(**settings).report()
    window = whole.peak_device_bytes - whole.resident_bytes
    memory = whole.resident_bytes + window
    size = memory - 2 * window - 6 * whole.chunk_bytes
    stays = run(**STAY)
    boosted = run()
    assert_same(boosted, stays)
    after = boosted.report()
    assert after.d2h_bytes > after.num_chunks * after.chunk_bytes, "it did go to the host"


def test_an_error_that_streaming_gives_is_the_same_error() -> None:
    messages = []
    for settings in (STAY, {}):
        boosted = boost(tower(), 2**20, **settings)
        for seed in range(3):
            boosted.step(loss_of(boosted.model, seed))
        take = partial(take_of_device, boosted.model, 2**21)
        handle = boosted.model.layers[3].register_forward_pre_hook(take)
        with pytest.raises(castor.OutOfMemoryError) as raised:
            boosted.model(**tower_batch(0))
        handle.remove()
        messages.append(str(raised.value))
        boosted.step(loss_of(boosted.model, 4))
    assert messages[0].partition("available")[0] == messages[1].partition("available")[0]
