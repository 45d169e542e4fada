"""Times of a step by the clock of the device, which the host runs ahead of (docs/design/0070)."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import castor
import simulated_gpu
from accelerator import ON_A_REAL_ONE, Accelerator
from castor.activations import auto
from castor.activations.auto import compute_seconds
from castor.config.event_names import BACKWARD_ENTER, FORWARD_ENTER
from castor.report.chrome_trace import DEVICE, MODULES
from castor.report.html import page_data
from castor.report.source import source_of
from castor.runtime.engine import engine_of
from helpers import GIB, Boosted, boost, go_on, on_device_of
from simulated import GpuSimulation
from test_auto_activations import DEEP, KEEP_NONE, choosing, last_kept
from zoo import tower, tower_batch

MILLISECOND = 1000
SLEEP_MS = 30


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuSimulation]:
    """Of a GPU whose streams do what they are given at once."""
    yield GpuSimulation(monkeypatch)
    simulated_gpu.rest()


class _Slow(torch.autograd.Function):
    """The stream sleeps in forward and in backward; the host does not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        simulated_gpu.require()._sleep(SLEEP_MS * MILLISECOND)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        simulated_gpu.require()._sleep(SLEEP_MS * MILLISECOND)
        return gradient


class Slow(nn.Linear):
    """A layer that takes its device longer than the host takes to launch it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Slow.apply(x))


def slow_tower(*slow: int) -> nn.Module:
    model = tower(depth=3)
    for i in slow:
        model.layers[i].__class__ = Slow
    return model


def timeline_of(boosted: Boosted) -> dict[str, Any]:
    timeline = engine_of(boosted.model).session.timeline()
    assert timeline is not None
    return timeline


def check_times(boosted: Boosted) -> dict[str, Any]:
    """The last step has times of each event, in order."""
    timeline = timeline_of(boosted)
    times = timeline["device_times"]
    assert len(times) == len(timeline["events"])
    ends = [reached for reached, _ in times[1:]] + [timeline["device_end_ns"]]
    for (reached, computed), end in zip(times, ends, strict=True):
        assert 0 <= computed <= end - reached
    assert times[0][0] == 0
    return timeline


def time_next(boosted: Boosted) -> None:
    assert engine_of(boosted.model).session.time_next_step()


def forward(boosted: Boosted, seed: int) -> torch.Tensor:
    loss: torch.Tensor = boosted.model(**on_device_of(boosted, tower_batch(seed)))
    return loss


# --- whose time it is ---------------------------------------------------------------------------


def test_a_module_takes_the_time_of_its_kernels(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(slow_tower(0, 2))
    slow = [engine_of(boosted.model).modules.index(f"layers.{i}") for i in (0, 2)]
    for asked in (False, True):  # the first step has no plan, the third is asked for
        boosted.step(forward(boosted, 0))
        timeline = check_times(boosted)
        kinds = [(kind, module) for kind, module, *_ in timeline["events"]]
        seconds = compute_seconds(timeline)
        for module in slow:
            assert seconds[kinds.index((FORWARD_ENTER, module))] >= SLEEP_MS / 1e3
        backward = kinds.index((BACKWARD_ENTER, slow[1]))  # nothing asks for a gradient of x
        assert sum(seconds[backward:]) >= SLEEP_MS / 1e3
        boosted.step(forward(boosted, 1))
        assert timeline_of(boosted)["device_times"] == []
        if not asked:
            time_next(boosted)


def test_the_cpu_device_has_the_hosts_clock_alone() -> None:
    boosted = boost(tower())
    assert not engine_of(boosted.model).session.time_next_step()
    boosted.step(forward(boosted, 0))
    timeline = timeline_of(boosted)
    assert timeline["device_times"] == []
    assert len(compute_seconds(timeline)) == len(timeline["events"])


def test_times_change_no_bits(simulation: GpuSimulation) -> None:
    expected = go_on(simulation.boost(tower()), steps=4)
    boosted = simulation.boost(tower())
    losses = []
    for seed in range(4):
        time_next(boosted)
        losses += go_on(boosted, first=seed, steps=1)
        check_times(boosted)
    assert losses == expected


@pytest.mark.parametrize("seed", simulated_gpu.SEEDS)
def test_streams_that_dawdle_are_timed(simulation: GpuSimulation, seed: int) -> None:
    simulation.device.delay(seed)
    boosted = simulation.boost(tower(), 2**18)
    for number in range(4):
        time_next(boosted)
        boosted.step(forward(boosted, number))
        check_times(boosted)


def test_activations_are_planned_with_the_devices_time(
    simulation: GpuSimulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choosing(last_kept(KEEP_NONE), monkeypatch)
    planned: list[float] = []
    monkeypatch.setattr(
        auto,
        "compute_seconds",
        lambda timeline: planned.extend(compute_seconds(timeline)) or planned,
    )
    model = DEEP.model()
    model.model.layers[1].mlp.register_forward_hook(
        lambda *_: simulated_gpu.require()._sleep(SLEEP_MS * MILLISECOND)
    )
    boosted = simulation.boost(model, activations="auto", tile_logits=False)
    batch = on_device_of(boosted, DEEP.batch(0))
    boosted.step(boosted.model(**batch).loss)
    assert len(chosen) == 1
    events = timeline_of(boosted)["events"]
    of_slow = [
        seconds
        for (_, module, *_), seconds in zip(events, planned, strict=True)
        if engine_of(boosted.model).modules[module].startswith("model.layers.1")
    ]
    # The host waits for the device in the next block's attention.
    assert sum(of_slow) >= SLEEP_MS / 1e3
    assert chosen[0].seconds >= SLEEP_MS / 1e3


def test_the_trace_for_perfetto_has_modules_by_the_devices_clock(
    simulation: GpuSimulation, tmp_path: Path
) -> None:
    boosted = simulation.boost(slow_tower(1))
    for timed in (True, False):
        boosted.step(forward(boosted, 0))
        path = castor.report.write_trace(tmp_path / "trace.json", boosted.booster)
        events = json.loads(path.read_text())["traceEvents"]
        on_device = [e for e in events if e["ph"] == "X" and e["tid"] == DEVICE]
        named = [e for e in events if e["name"] == "thread_name" and e["tid"] == DEVICE]
        assert len(named) == timed
        if timed:
            on_host = [e for e in events if e["ph"] == "X" and e["tid"] == MODULES]
            assert [e["name"] for e in on_device] == [
                e["name"] for e in on_host if e["name"] != "optimizer.step"
            ]
            slow = [e for e in on_device if e["name"] == "layers.1"]
            assert {e["cat"] for e in slow} == {"forward", "backward"}
            assert all(e["dur"] >= SLEEP_MS * 1000 for e in slow if e["cat"] == "forward")
        else:
            assert on_device == []


def test_reports_name_the_clock_of_their_times(simulation: GpuSimulation) -> None:
    for boosted, name in ((simulation.boost(tower()), "host time"), (boost(tower()), "time")):
        boosted.step(forward(boosted, 0))
        assert page_data(source_of(boosted.model))["timeName"] == name
        assert ("host time" in castor.report.summary(boosted.booster)) == (name == "host time")


# --- what may happen in a step ------------------------------------------------------------------


def test_the_host_runs_ahead_of_a_step_that_is_timed(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(tower())
    boosted.step(forward(boosted, 0))
    time_next(boosted)
    batch = on_device_of(boosted, tower_batch(1))
    with simulated_gpu.require()._held():
        loss = boosted.model(**batch)
    boosted.step(loss)
    check_times(boosted)


def test_a_pass_that_raises_costs_no_times(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(tower())
    broken = True

    def refuse(*_: Any) -> None:
        if broken:
            raise RuntimeError("as the test ordered")

    hook = boosted.model.layers[3].register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="as the test ordered"):
        forward(boosted, 0)
    broken = False
    boosted.step(forward(boosted, 0))
    check_times(boosted)
    hook.remove()
    time_next(boosted)
    boosted.step(forward(boosted, 1))
    check_times(boosted)


def test_evaluation_within_a_step_is_timed_with_it(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(tower())
    loss = forward(boosted, 0)
    with torch.no_grad():
        forward(boosted, 1)
    boosted.step(loss)
    check_times(boosted)


def test_passes_of_several_threads_are_one_step(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(tower())
    losses: list[float] = []

    def run(seed: int) -> None:
        loss = forward(boosted, seed)
        boosted.booster.backward(loss, boosted.optimizer)
        losses.append(loss.item())

    for seed in range(3):
        thread = threading.Thread(target=run, args=(seed,))
        thread.start()
        thread.join()
    assert len(losses) == 3
    boosted.optimizer.step()
    check_times(boosted)


def test_a_capture_that_is_refused_costs_no_times(simulation: GpuSimulation) -> None:
    boosted = simulation.boost(tower())
    batch = on_device_of(boosted, tower_batch(0))
    simulation.device.begin_capture()
    try:
        with pytest.raises(castor.UsageError, match="CUDA graph"):
            boosted.model(**batch)
    finally:
        simulation.device.end_capture()
    boosted.step(forward(boosted, 0))
    check_times(boosted)


# --- on a GPU -----------------------------------------------------------------------------------


@ON_A_REAL_ONE
def test_a_matmul_takes_what_the_gpus_own_events_say(gpu: Accelerator) -> None:
    """Layers of 2 * 4096^3 floating-point operations, whose launches take the host no time."""
    layers = 4
    model = nn.Sequential(*(nn.Linear(gpu.width, gpu.width, bias=False) for _ in range(layers)))
    boosted = boost(model, 8 * GIB, device="cuda", host_memory=8 * GIB, precision="fp32")
    x = torch.randn((gpu.width, gpu.width), device=gpu.device)
    marks: list[list[Any]] = []

    def mark(*_: Any) -> None:
        marks[-1].append(gpu.torch.Event(enable_timing=True))
        marks[-1][-1].record()

    for layer in boosted.model:
        layer.register_forward_pre_hook(mark)
        layer.register_forward_hook(mark)
    for _ in range(3):  # libraries start, chunks come to stay
        marks.append([])
        time_next(boosted)
        boosted.step(boosted.model(x).square().mean())
    timeline = check_times(boosted)
    seconds = [
        took
        for (kind, module, *_), took in zip(
            timeline["events"], compute_seconds(timeline), strict=True
        )
        if kind == FORWARD_ENTER and module > 0
    ]
    starts, ends = marks[-1][::2], marks[-1][1::2]
    expected = [start.elapsed_time(end) / 1e3 for start, end in zip(starts, ends, strict=True)]
    assert len(seconds) == len(expected) == layers
    for took, known in zip(seconds, expected, strict=True):
        assert took == pytest.approx(known, rel=0.2)
        assert took > 2 * gpu.width**3 / 1e15  # no GPU does a PFLOP/s in fp32
