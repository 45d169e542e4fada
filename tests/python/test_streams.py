"""Streams: what castor moves is in order with what the compute stream does, whoever makes it move.

On the simulated GPU (tests/simulated_gpu), whose streams run by themselves and dawdle.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

import castor
import simulated_gpu
from helpers import Boosted, assert_equal, boost, copies, exact_state, go_on
from simulated import GpuSimulation
from zoo import tower, tower_batch

STAY = {"gpu_margin_mem_ratio": 0.0}
MILLISECOND = 1000
MIB = 2**20


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuSimulation]:
    """Of a GPU whose streams do what they are given at once."""
    yield GpuSimulation(monkeypatch)
    simulated_gpu.rest()


@pytest.fixture(params=simulated_gpu.SEEDS, ids="seed {}".format)
def dawdling(request: pytest.FixtureRequest, simulation: GpuSimulation) -> GpuSimulation:
    simulation.device.delay(request.param)
    return simulation


@pytest.fixture
def gpu() -> Any:
    return simulated_gpu.require()


def on_gpu(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.to("simgpu") for key, value in batch.items()}


def fill_budget(boosted: Boosted) -> list[torch.Tensor]:
    """Takes all that chunks may leave, on the current stream; the values are sevens."""
    before = boosted.report().evictions
    taken: list[torch.Tensor] = []
    with suppress(castor.OutOfMemoryError):
        while True:
            taken.append(torch.full((4096,), 7.0, device="simgpu"))
    assert boosted.report().evictions > before or boosted.report().resident_chunks == 0
    return taken


def in_little_room(simulation: GpuSimulation, spare: int = 0, **settings: Any) -> Boosted:
    """A tower whose chunks have to take turns on the device."""
    probe = simulation.boost(tower(), **(settings | STAY))
    go_on(probe, steps=2)
    report = probe.report()
    largest = max(p.numel() for p in probe.model.parameters()) * 4
    room = max(4 * largest, report.host_bytes // 16)  # one for a gradient on its way
    return simulation.boost(tower(), report.peak_nonmodel_bytes + room + spare, **settings)


# --- under pressure from a side stream ----------------------------------------------------------


def test_an_edit_that_is_under_way_is_not_lost_where_a_side_stream_evicts(
    simulation: GpuSimulation, gpu: Any
) -> None:
    boosted = simulation.boost(tower(), MIB, **STAY)
    side = gpu.Stream()
    with torch.no_grad():
        boosted.model(**on_gpu(tower_batch(0)))  # the chunks are on the device
        gpu._sleep(50 * MILLISECOND)
        for param in boosted.model.parameters():
            param.fill_(0.5)
        with gpu.stream(side):
            taken = fill_budget(boosted)
    gpu.synchronize()
    del taken
    for param in boosted.model.parameters():
        assert bool((param == 0.5).all())


@pytest.mark.parametrize(("precision", "state_format"), [("fp32", "fp32"), ("bf16", "split")])
def test_an_update_that_is_under_way_is_not_lost_where_a_side_stream_evicts(
    simulation: GpuSimulation, gpu: Any, precision: str, state_format: str
) -> None:
    settings = {"precision": precision, "optim_state_format": state_format}
    reference = boost(tower(), **settings)
    boosted = simulation.boost(tower(), 2 * MIB, **settings)
    assert go_on(boosted) == go_on(reference)
    assert boosted.report().resident_chunks > 0
    loss = boosted.model(**on_gpu(tower_batch(4)))
    boosted.booster.backward(loss, boosted.optimizer)
    simulation.device.delay(1, longest_us=20 * MILLISECOND, one_in=1)
    boosted.optimizer.step()
    with gpu.stream(gpu.Stream()):
        taken = fill_budget(boosted)
    assert boosted.report().resident_chunks == 0
    simulation.device.delay(0)
    boosted.optimizer.zero_grad()
    del taken
    go_on(reference, first=4, steps=1)
    assert_equal(exact_state(boosted), exact_state(reference))


def test_a_tensor_of_a_side_stream_may_take_the_room_of_a_chunk_that_is_still_read(
    simulation: GpuSimulation, gpu: Any
) -> None:
    boosted = simulation.boost(tower(), MIB, **STAY)
    side = gpu.Stream()
    weight = next(iter(boosted.model.parameters()))
    expected = weight.detach().cpu()
    with torch.no_grad():
        boosted.model(**on_gpu(tower_batch(0)))
        gpu._sleep(30 * MILLISECOND)
        doubled = weight * 2
        with gpu.stream(side):
            taken = fill_budget(boosted)
    assert torch.equal(doubled.cpu(), 2 * expected)
    del taken


@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
def test_batches_that_a_side_stream_brings_change_nothing(
    dawdling: GpuSimulation, gpu: Any, place: dict[str, Any]
) -> None:
    """The prefetching loader of many training scripts, in a budget where its copies evict."""
    reference = boost(tower(), **place)
    expected = go_on(reference, steps=6)
    boosted = in_little_room(dawdling, 4096, **place)
    side = gpu.Stream()

    def bring(seed: int) -> dict[str, torch.Tensor]:
        with gpu.stream(side):
            return {
                key: value.pin_memory().to("simgpu", non_blocking=True)
                for key, value in tower_batch(seed).items()
            }

    losses = []
    batch = bring(0)
    for seed in range(6):
        gpu.current_stream().wait_stream(side)
        for value in batch.values():
            value.record_stream(gpu.current_stream())
        now, batch = batch, bring(seed + 1)
        losses.append(boosted.step(boosted.model(**now)))
    assert losses == expected
    assert_equal(exact_state(boosted), exact_state(reference))


def test_another_thread_may_take_the_memory(dawdling: GpuSimulation, gpu: Any) -> None:
    reference = boost(tower())
    expected = go_on(reference, steps=6)
    boosted = in_little_room(dawdling, 8192)
    stop = threading.Event()
    failures: list[Exception] = []

    def take() -> None:
        try:
            with gpu.stream(gpu.Stream()):
                while not stop.is_set():
                    torch.empty(4096, dtype=torch.uint8, device="simgpu").fill_(1)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    try:
        losses = go_on(boosted, steps=6)
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert losses == expected
    assert_equal(exact_state(boosted), exact_state(reference))


# --- weights on side streams --------------------------------------------------------------------


def test_record_stream_protects_a_weight(simulation: GpuSimulation, gpu: Any) -> None:
    """What an all-gather, or an average of weights beside the step, does."""
    boosted = simulation.boost(tower(), MIB, **STAY)
    side = gpu.Stream()
    weight = next(iter(boosted.model.parameters()))
    expected = weight.detach().cpu()
    with torch.no_grad():
        boosted.model(**on_gpu(tower_batch(0)))
        side.wait_stream(gpu.current_stream())
        with gpu.stream(side):
            gpu._sleep(30 * MILLISECOND)
            doubled = weight * 2
        weight.record_stream(side)
        taken = fill_budget(boosted)
    side.synchronize()
    assert torch.equal(doubled.cpu(), 2 * expected)
    del taken


def test_record_stream_protects_a_gradient(simulation: GpuSimulation, gpu: Any) -> None:
    boosted = simulation.boost(tower(), 2 * MIB)
    go_on(boosted)
    assert boosted.report().resident_chunks > 0, "gradients are on the device"
    boosted.booster.backward(boosted.model(**on_gpu(tower_batch(4))), boosted.optimizer)
    grad = next(iter(boosted.model.parameters())).grad
    assert grad is not None
    expected = grad.detach().cpu()
    side = gpu.Stream()
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        gpu._sleep(30 * MILLISECOND)
        doubled = grad * 2
    grad.record_stream(side)
    taken = fill_budget(boosted)
    assert boosted.report().resident_chunks == 0
    side.synchronize()
    assert torch.equal(doubled.cpu(), 2 * expected)
    del taken


@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
def test_an_evaluation_may_run_on_a_side_stream(
    dawdling: GpuSimulation, gpu: Any, place: dict[str, Any]
) -> None:
    reference = boost(tower(), **place)
    boosted = in_little_room(dawdling, 4096, **place)
    side = gpu.Stream()
    for seed in range(5):
        expected, losses = go_on(reference, seed, 1), go_on(boosted, seed, 1)
        with torch.no_grad():
            expected.append(reference.model(**tower_batch(99)).item())
            side.wait_stream(gpu.current_stream())
            with gpu.stream(side):
                losses.append(boosted.model(**tower_batch(99)).item())
            gpu.current_stream().wait_stream(side)
        assert losses == expected
    assert_equal(exact_state(boosted), exact_state(reference))


# castor keeps the accumulators, and torch those their first stream: it says so, and waits.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
def test_a_whole_step_may_run_on_a_side_stream(
    dawdling: GpuSimulation, gpu: Any, place: dict[str, Any], overlap: str
) -> None:
    settings = {**place, "overlap": overlap}
    reference = boost(tower(), **settings)
    boosted = in_little_room(dawdling, 4096, **settings)
    for seed in range(6):
        expected = go_on(reference, seed, 1)
        stream = gpu.Stream() if seed % 2 else gpu.current_stream()
        stream.wait_stream(gpu.current_stream())
        with gpu.stream(stream):
            losses = go_on(boosted, seed, 1)
        gpu.current_stream().wait_stream(stream)
        assert losses == expected
    assert_equal(exact_state(boosted), exact_state(reference))


# --- memory that an operator has the address of -------------------------------------------------


def small_tensors(count: int) -> list[torch.Tensor]:
    return [torch.empty(512, dtype=torch.uint8, device="simgpu") for _ in range(count)]


@pytest.mark.parametrize(
    "view",
    [lambda p: p, lambda p: p.data, lambda p: p.detach().view(-1), lambda p: p[3:]],
    ids=["parameter", "data", "view", "slice"],
)
def test_an_operator_keeps_the_weight_that_it_has_the_address_of(
    simulation: GpuSimulation, gpu: Any, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Outside its module nothing pins a weight. The operator takes its address, then a workspace,
    which could be the weight's own memory, and then gives the kernel to the stream."""
    boosted = simulation.boost(tower(), 64 * 1024, **STAY)
    layer = boosted.model.layers[0]
    x = torch.ones(1, 32, device="simgpu")
    seen = view(layer.weight)
    refused = 0
    with torch.no_grad():
        expected = 2 * seen.cpu()
        layer(x)
        before = boosted.report().evictions
        taken: list[torch.Tensor] = []
        while boosted.report().evictions == before:  # until the weight leaves
            taken += small_tensors(1)
        spare = len(taken) - 1 - seen.numel() * 4 // 512
        for workspace in range(512, 8192, 512):
            taken.clear()
            layer(x)
            taken += small_tensors(spare)
            try:
                doubled = torch.ops.simulated_gpu.doubled_with_workspace(seen, workspace)
            except castor.OutOfMemoryError:
                refused += 1
                continue
            assert torch.equal(doubled.cpu(), expected), workspace
            del doubled
    assert refused > 0


# --- graphs -------------------------------------------------------------------------------------


def test_a_capture_is_refused_by_name(simulation: GpuSimulation, gpu: Any) -> None:
    boosted = simulation.boost(tower(), MIB)
    expected = go_on(boost(tower()), steps=2)
    losses = go_on(boosted, steps=1)
    batch = on_gpu(tower_batch(1))
    weight = next(iter(boosted.model.parameters()))
    simulation.device.begin_capture()
    try:
        with pytest.raises(castor.UsageError, match="CUDA graph"):
            boosted.model(**batch)
        with torch.no_grad(), pytest.raises(castor.UsageError, match=r"torch\.cuda\.graph"):
            weight.norm()
        with pytest.raises(castor.UsageError, match="CUDA graph"):
            boosted.optimizer.step()
        with pytest.raises(castor.UsageError, match="make room"):
            torch.empty(2 * MIB, device="simgpu")
        torch.empty(512, device="simgpu")  # there is room
    finally:
        simulation.device.end_capture()
    losses += go_on(boosted, first=1, steps=1)
    assert losses == expected


# --- backward on its own thread -----------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_backward_beside_the_host(dawdling: GpuSimulation, gpu: Any, overlap: str) -> None:
    """A host that never waits runs as far ahead as castor lets it."""
    settings: dict[str, Any] = {"overlap": overlap}
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    reference = boost(tower(), **settings)
    go_on(reference, steps=8)
    boosted = in_little_room(dawdling, **settings)
    for seed in range(8):
        loss = boosted.model(**tower_batch(seed))
        boosted.booster.backward(loss, boosted.optimizer)
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
    assert_equal(exact_state(boosted), exact_state(reference))


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("place", [STAY, {}], ids=["streamed", "resident"])
def test_a_model_that_goes_while_updates_and_copies_run_leaves_its_weights(
    simulation: GpuSimulation, overlap: str, place: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"overlap": overlap, **place}
    if overlap == "backward":
        settings |= {"nonfinite": "ignore", "enable_gradient_accumulation": False}
    reference = boost(tower(), **settings)
    go_on(reference, steps=3)
    expected = copies(reference.model.parameters())
    for _ in range(5):
        model = tower()
        boosted = simulation.boost(model, **settings)
        go_on(boosted, steps=2)
        held = list(model.parameters())
        loss = boosted.model(**tower_batch(2))
        boosted.booster.backward(loss, boosted.optimizer)
        simulation.device.delay(1, longest_us=2 * MILLISECOND, one_in=1)
        boosted.optimizer.step()
        del model, boosted, loss
        gc.collect()
        simulation.device.delay(0)
        assert_equal([p.detach() for p in held], expected)
