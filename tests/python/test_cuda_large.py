"""A GPT of 18B parameters under 24 GiB, or the largest of its shape that a machine holds."""

import itertools
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import castor
from castor import GeminiPlugin
from castor.config.memory import host_memory
from castor.runtime.engine import engine_of
from helpers import GIB

WIDTH, LAYERS, VOCAB = 6144, 40, 50257
NUMEL = 18 * 10**9
CAP = 24 * GIB
HOST_BYTES, ALL_BYTES = 4.4, 8.2
"""A parameter: in bf16 with its gradient, which has to be on the host; with split_int8's state."""
HOST_SHARE = 0.94
"""Of the memory that is available; the rest is for a weight that is drawn, and for CUDA."""
DISK_SHARE = 1 / 8
"""Of the time that the test has, what a step may spend on reading, and on writing, its state."""
LEARNING_RATE = 2e-5
MOST_STEPS, FEWEST_STEPS = 6, 3


def config(layers: int, width: int = WIDTH, vocab: int = VOCAB) -> transformers.GPT2Config:
    found = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=width // 128, n_positions=1024, vocab_size=vocab,
        eos_token_id=0, bos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False,
    )  # fmt: skip
    found.loss_type = "ForCausalLM"
    return found


def num_parameters(layers: int) -> int:
    return layers * (12 * WIDTH**2 + 13 * WIDTH) + (VOCAB + 1024) * WIDTH + 2 * WIDTH


def layers_that_fit(host: float, disk: float) -> int:
    """At most LAYERS; parameters and gradients stay on the host, state goes where there is room."""
    fit = (
        layers
        for layers in range(LAYERS, 0, -1)
        if HOST_BYTES * num_parameters(layers) <= host
        and ALL_BYTES * num_parameters(layers) <= host + disk
    )
    return next(fit, 0)


def disk_bytes(folder: Path, seconds: float) -> int:
    """What a step can read and write of a folder's disk, by the speed at which it takes 1 GiB."""
    path = folder / "speed"
    piece = os.urandom(1 << 24)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(GIB // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    rate = GIB / (time.perf_counter() - start)
    path.unlink()
    in_time = min(float(shutil.disk_usage(folder).free), DISK_SHARE * seconds * rate)
    return int(0.9 * in_time)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Normal numbers from a table, and every core: torch draws 18B of them on one, in minutes."""
    table = torch.randn(1_000_003)  # a prime: rows of a matrix differ
    tables: dict[float, torch.Tensor] = {}

    def normal_(
        tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None
    ) -> torch.Tensor:
        assert mean == 0.0
        assert generator is None
        scaled = tables.setdefault(std, std * table)
        flat, size = tensor.detach().view(-1), len(table)
        whole = flat.numel() // size
        flat[: whole * size].view(whole, size).copy_(scaled.expand(whole, size))
        flat[whole * size :].copy_(scaled[: flat.numel() - whole * size])
        return tensor

    monkeypatch.setattr(torch.Tensor, "normal_", normal_)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(1)


def train(
    shape: transformers.GPT2Config, tokens: tuple[int, int], seconds: float, **settings: Any
) -> tuple[Any, castor.Booster, list[float]]:
    """MOST_STEPS steps on one batch, or as many as there is time for, but FEWEST_STEPS at least."""
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s: {what}", flush=True)

    with castor.LazyInitContext():
        model: Any = transformers.GPT2LMHeadModel(shape)
    old_name = model.gradient_checkpointing_enable  # deprecated in later transformers
    getattr(model, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
    plugin = GeminiPlugin(
        precision="bf16", optim_state_format="split_int8", max_norm=1.0, max_prefetch=2, **settings
    )
    optimizer = castor.HybridAdam(model.parameters(), lr=LEARNING_RATE)
    booster = castor.Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    say(f"boosted {sum(p.numel() for p in model.parameters())} parameters")
    batch = torch.randint(shape.vocab_size, tokens, device=settings["device"])
    losses: list[float] = []
    before = time.perf_counter()
    longest = 0.0
    for step in range(MOST_STEPS):
        if step >= FEWEST_STEPS and time.perf_counter() - start + longest > seconds:
            break
        loss = model(input_ids=batch, labels=batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        say(f"loss {losses[-1]:.4f}")
        now = time.perf_counter()
        before, longest = now, max(longest, now - before)
    return model, booster, losses


def assert_falling(losses: list[float]) -> None:
    assert len(losses) >= FEWEST_STEPS
    assert all(map(math.isfinite, losses))
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))


# --- without a GPU ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "disk", "layers"),
    [
        (160e9, 0, 40),  # 18.4B parameters take 151 GB
        (110e9, 45e9, 40),
        (110e9, 10e9, 31),
        (110e9, 0, 28),
        (70e9, 500e9, 34),  # parameters and gradients are the host's
        (1e9, 500e9, 0),
    ],
)
def test_the_largest_model_that_host_and_disk_hold(host: float, disk: float, layers: int) -> None:
    assert num_parameters(LAYERS) >= NUMEL
    assert layers_that_fit(host, disk) == layers


@pytest.mark.usefixtures("tiled")
@pytest.mark.parametrize(("seconds", "steps"), [(0.0, FEWEST_STEPS), (600.0, MOST_STEPS)])
def test_the_large_run_on_a_small_model(seconds: float, steps: int) -> None:
    _, booster, losses = train(
        config(2, 128, vocab=512),
        (2, 64),
        seconds,
        device="cpu",
        device_memory="1GiB",
        host_memory="1GiB",
    )
    assert_falling(losses)
    assert len(losses) == steps
    assert booster.report().peak_device_bytes <= GIB


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.usefixtures("tiled")
def test_18_billion_parameters_train_under_24_gib(
    cuda: ModuleType, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """Or as many as host memory and disk hold in the time there is, which the result says."""
    seconds = float(os.environ.get("CASTOR_TEST_SECONDS", "inf"))
    host = int(HOST_SHARE * host_memory().available_bytes)
    disk = 0 if host >= ALL_BYTES * num_parameters(LAYERS) else disk_bytes(tmp_path, seconds)
    layers = layers_that_fit(host, disk)
    numel = num_parameters(layers)
    room = f"{host / GIB:.0f} GiB of host memory and {disk / GIB:.0f} GiB of disk"
    print(f"{layers} of {LAYERS} layers, {numel / 1e9:.1f}B parameters, in {room}", flush=True)
    for name, value in (("parameters", numel), ("host_bytes", host), ("disk_bytes", disk)):
        record_property(name, value)
    if ALL_BYTES * numel < 2 * CAP:
        pytest.skip(f"{room} hold no model that is large for 24 GiB of device memory")
    total = torch.cuda.get_device_properties(0).total_memory
    if total < CAP:
        pytest.skip(f"the GPU has {total / GIB:.0f} GiB")
    torch.cuda.set_per_process_memory_fraction(CAP / total)
    torch.cuda.reset_peak_memory_stats()
    settings: dict[str, Any] = {} if host >= ALL_BYTES * numel else {"nvme_path": tmp_path}
    try:
        model, booster, losses = train(
            config(layers), (4, 1024), seconds,
            device="cuda", device_memory=CAP - GIB, host_memory=host, **settings,
        )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    report = booster.report()
    for name, value in (
        ("losses", losses),
        ("reserved_bytes", torch.cuda.max_memory_reserved()),
        ("refused_allocations", torch.cuda.memory_stats()["num_ooms"]),
        ("report", {key: value for key, value in vars(report).items() if isinstance(value, int)}),
    ):
        record_property(name, value)
    assert_falling(losses)
    assert torch.cuda.max_memory_reserved() <= CAP
    assert report.peak_device_bytes <= CAP - GIB
    assert engine_of(model).device == torch.device("cuda", 0)
