"""An unmodified model trained in tight(0.35) gives the losses of plain PyTorch."""

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

import castor
import grids
from helpers import (
    FP32_TOLERANCE,
    GIB,
    HALF_TOLERANCE,
    LR,
    PARAM_ALIGNMENT,
    STEPS,
    assert_close_losses,
    boost,
    equal,
    margin,
    on_device_of,
)
from zoo import CASES, Case, gpt2_with_dropout, medium_gpt2

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MAX_NORM = 0.5  # below the norms of these models' gradients: every step is clipped
WEIGHT_TOLERANCE = {"fp32": 5e-3, "bf16": 0.2, "fp16": 0.2}
FP16_SCALE = 2.0**10


@dataclass(frozen=True)
class Setting:
    case: str
    checkpointing: bool = False
    micro_batches: int = 1
    precision: str = "fp32"


@dataclass
class Run:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    report: castor.MemoryReport | None = None


def case_of(setting: Setting) -> Case:
    extra = {case.name: case for case in (gpt2_with_dropout(), medium_gpt2())}
    return (CASES | extra)[setting.case]


def in_dtype(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


@cache
def reference(setting: Setting) -> Run:
    """Plain PyTorch: torch AdamW on fp32 masters, working copies in the precision's dtype.

    Parameters are cast and buffers left alone, as from_pretrained(dtype=...) does.
    """
    case, dtype = case_of(setting), DTYPES[setting.precision]
    model = case.model(checkpointing=setting.checkpointing)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for param in model.parameters():
        param.data = param.data.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=LR)
    scale = FP16_SCALE if setting.precision == "fp16" else 1.0
    losses = []
    torch.manual_seed(99)
    for step in range(STEPS):
        total = 0.0
        for k in range(setting.micro_batches):
            batch = in_dtype(case.batch(step * setting.micro_batches + k), dtype)
            loss = case.loss(model(**batch), batch) / setting.micro_batches
            (loss * scale).backward()
            total += loss.item()
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad = None if param.grad is None else param.grad.float() / scale
        torch.nn.utils.clip_grad_norm_(masters, MAX_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        model.zero_grad()
        losses.append(total)
    names = [name for name, _ in model.named_parameters()]
    return Run(losses, dict(zip(names, copies_of(masters), strict=True)))


def copies_of(masters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [master.detach().clone() for master in masters]


def train(setting: Setting, memory: int, steps: int = STEPS) -> Run:
    case = case_of(setting)
    model = case.model(checkpointing=setting.checkpointing)
    fp16 = {"initial_scale": FP16_SCALE} if setting.precision == "fp16" else {}
    boosted = boost(model, memory, precision=setting.precision, max_norm=MAX_NORM, **fp16)
    losses = []
    torch.manual_seed(99)
    for step in range(steps):
        total = 0.0
        for k in range(setting.micro_batches):
            batch = on_device_of(boosted, case.batch(step * setting.micro_batches + k))
            loss = case.loss(model(**batch), batch) / setting.micro_batches
            boosted.booster.backward(loss, boosted.optimizer)
            total += loss.item()
            assert boosted.booster.memory(model).device_bytes <= memory
        boosted.optimizer.step()
        boosted.optimizer.zero_grad()
        losses.append(total)
    weights = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters()}
    return Run(losses, weights, boosted.report())


def tight(setting: Setting, fraction: float) -> int:
    model = case_of(setting).model()
    ample = train(setting, GIB, steps=3).report
    assert ample is not None
    element_size = DTYPES[setting.precision].itemsize
    return ample.peak_nonmodel_bytes + margin(model, fraction, element_size)


def check(setting: Setting, tolerance: float) -> castor.MemoryReport:
    expected = reference(setting)
    memory = tight(setting, 0.35)
    run = train(setting, memory)
    assert run.report is not None
    # BERT gives its loss in bf16, whose neighbours are up to eps apart.
    resolution = torch.finfo(DTYPES[setting.precision]).eps
    assert_close_losses(run.losses, expected.losses, max(tolerance, resolution))
    assert expected.losses[-1] != expected.losses[0]
    assert weight_error(setting, run, expected) <= WEIGHT_TOLERANCE[setting.precision]
    assert run.report.peak_device_bytes <= run.report.device_budget_bytes == memory
    assert run.report.evictions > 0, "the run did not stream"
    assert run.report.divergent_steps == 0
    assert run.report.skipped_steps == 0
    assert_host_bytes(setting, run.report)
    return run.report


def weight_error(setting: Setting, actual: Run, expected: Run) -> float:
    """How far the weights ended from the reference, relative to how far they travelled.

    Over the whole model: a weight whose gradient is nothing but rounding noise (the bias of the
    keys in attention) goes its own way in any two runs.
    """
    start = dict(case_of(setting).model().named_parameters())
    error = travelled = 0.0
    for name, weight in expected.weights.items():
        error += (actual.weights[name].float() - weight).square().sum().item()
        travelled += (start[name].detach() - weight).square().sum().item()
    return math.sqrt(error / travelled)


def assert_host_bytes(setting: Setting, report: castor.MemoryReport) -> None:
    """Parameter, gradient and two moments; fp16 has a master besides, bf16 half of one.

    Of tiny models the alignment shows: less than PARAM_ALIGNMENT bytes for each parameter, in the
    parameter's own payload, and as many elements in the others.
    """
    model = case_of(setting).model()
    size = DTYPES[setting.precision].itemsize
    numel = sum(p.numel() for p in model.parameters())
    padding = len(list(model.parameters())) * PARAM_ALIGNMENT // size
    per_element = {"fp32": 16, "fp16": 16, "bf16": 14}[setting.precision]
    assert per_element * numel <= report.host_bytes <= per_element * (numel + padding)


MODES = [
    pytest.param(False, 1, id="plain"),
    pytest.param(True, 1, id="checkpointing"),
    pytest.param(False, 4, id="accumulation"),
    pytest.param(True, 4, id="checkpointing-accumulation"),
]


@pytest.mark.parametrize(("checkpointing", "micro_batches"), MODES)
@pytest.mark.parametrize("case", CASES)
def test_fp32_matches_plain_pytorch(case: str, checkpointing: bool, micro_batches: int) -> None:
    check(Setting(case, checkpointing, micro_batches), FP32_TOLERANCE)


@pytest.mark.parametrize(("checkpointing", "micro_batches"), MODES[:3])
@pytest.mark.parametrize("case", grids.some(CASES, "gpt2", "llama", "bert", "t5", "mixtral"))
def test_bf16_matches_plain_pytorch_with_a_master(
    case: str, checkpointing: bool, micro_batches: int
) -> None:
    check(Setting(case, checkpointing, micro_batches, "bf16"), HALF_TOLERANCE)


@pytest.mark.parametrize(("checkpointing", "micro_batches"), MODES[:3])
@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_fp16_matches_plain_pytorch_with_a_scaled_loss(
    case: str, checkpointing: bool, micro_batches: int
) -> None:
    check(Setting(case, checkpointing, micro_batches, "fp16"), HALF_TOLERANCE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_draws_the_same_random_numbers(checkpointing: bool) -> None:
    check(Setting("gpt2-dropout", checkpointing), FP32_TOLERANCE)


def test_medium_model_takes_16_2_host_bytes_a_parameter() -> None:
    setting = Setting("gpt2-medium")
    report = check(setting, FP32_TOLERANCE)
    numel = sum(p.numel() for p in case_of(setting).model().parameters())
    assert report.host_bytes / numel <= 16.2


@pytest.mark.parametrize("case", grids.some(CASES, "gpt2", "t5", "mixtral"))
def test_runs_repeat_bitwise(case: str) -> None:
    setting = Setting(case)
    memory = tight(setting, 0.35)
    first, second = train(setting, memory, steps=5), train(setting, memory, steps=5)
    assert first.losses == second.losses
    for name, weight in first.weights.items():
        assert equal(weight, second.weights[name])
