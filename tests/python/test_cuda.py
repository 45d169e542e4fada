"""The GPU parts over torch's own streams and allocator. Their C++ tests are in tests/cpp/cuda."""

import os
from typing import Any

import pytest
import torch

import castor
from accelerator import Accelerator
from castor import _loader
from castor._loader import BUILD_INFO, load_cuda


def entry(param: torch.Tensor, grad: torch.Tensor, **more: Any) -> dict[str, Any]:
    """What adam_update takes for a fresh fp32 or 16-bit parameter in format fp32."""
    hyper = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    state = {"exp_avg": torch.zeros_like(param, dtype=torch.float32)}
    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
    state["master"] = param if param.dtype == torch.float32 else param.float()
    flags = {"decoupled": True, "maximize": False, "step": 1, "format": "fp32"}
    return {"param": param, "grad": grad, **state, **hyper, **flags, **more}


@pytest.mark.parametrize(
    ("built", "here", "expected"),
    [
        ("none", "13.0", "was built without castor._cuda"),
        ("13.0.88", "12.8", "is for CUDA 12.8"),
        ("13.0.88", None, "is for CUDA none"),
    ],
)
def test_loading_without_what_it_needs_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, built: str, here: str | None, expected: str
) -> None:
    info = _loader.BuildInfo(**{**vars(BUILD_INFO), "cuda": built})
    monkeypatch.setattr(_loader, "BUILD_INFO", info)
    monkeypatch.setattr(torch.version, "cuda", here)
    with pytest.raises(ImportError, match=expected):
        load_cuda()


def test_the_module_imports_without_a_gpu() -> None:
    if BUILD_INFO.cuda == "none" or torch.version.cuda is None:
        pytest.skip("castor was built without castor._cuda, or torch without CUDA")
    assert load_cuda().runtime_version() // 1000 == int(BUILD_INFO.cuda.split(".")[0])


def test_cpu_tensors_are_refused_by_name() -> None:
    if BUILD_INFO.cuda == "none" or torch.version.cuda is None:
        pytest.skip("castor was built without castor._cuda, or torch without CUDA")
    module = load_cuda()
    with pytest.raises(ValueError, match="expected a CUDA tensor, got one on cpu"):
        module.square_norms([torch.zeros(3)])
    with pytest.raises(ValueError, match="expected a CUDA tensor, got one on cpu"):
        module.adam_update([entry(torch.zeros(3), torch.zeros(3))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adam_gives_the_bits_of_the_cpu(gpu: Accelerator, dtype: torch.dtype) -> None:
    param, grad = torch.randn(100_003).to(dtype), torch.randn(100_003).to(dtype)
    on_cpu = entry(param.clone(), grad)
    on_gpu = entry(param.to(gpu.device), grad.to(gpu.device))
    for step in range(1, 4):
        castor._C.adam_update([on_cpu | {"step": step}])
        gpu.castor.adam_update([on_gpu | {"step": step}])
    for name in ("param", "master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(on_gpu[name].cpu(), on_cpu[name]), name


def test_square_norms_agree_with_float64(gpu: Accelerator) -> None:
    tensors = [torch.randn(n, device=gpu.device) for n in (0, 1, 4097, 300_001)]
    expected = torch.stack([t.double().square().sum() for t in tensors])
    torch.testing.assert_close(gpu.castor.square_norms(tensors), expected, rtol=1e-13, atol=0)


def test_a_copy_is_ordered_with_the_current_stream(gpu: Accelerator) -> None:
    engine, pinned = gpu.castor.CopyEngine(0), gpu.castor.PinnedArena(0)
    host, back = pinned.empty(1 << 24), pinned.empty(1 << 24)
    slot = gpu.castor.DeviceArena(0).empty(1 << 24)
    for stream in (gpu.torch.current_stream(), gpu.torch.Stream()):
        with gpu.torch.stream(stream):
            for value in range(1, 20):
                host.fill_(value)
                slot.fill_(0)
                ticket = engine.submit(slot, host)
                engine.order(ticket)
                slot.add_(1)
                engine.wait(engine.submit(back, slot))
                assert engine.done(ticket)
                assert bool((back == value + 1).all())


def test_pinned_memory_is_page_locked_and_readable_in_place(gpu: Accelerator) -> None:
    arena = gpu.castor.PinnedArena(0)
    host = arena.empty((5 << 20) + 1)
    assert host.is_pinned()
    assert arena.registered_bytes == (5 << 20) + os.sysconf("SC_PAGE_SIZE")
    del host
    assert arena.registered_bytes == 0


def test_slots_are_the_caching_allocators(gpu: Accelerator) -> None:
    arena = gpu.castor.DeviceArena(0)
    before = gpu.torch.memory_allocated()
    slot = arena.empty(1 << 20)
    assert gpu.torch.memory_allocated() - before == 1 << 20
    assert arena.statistics()["allocated"] == gpu.torch.memory_allocated()
    del slot
    assert gpu.torch.memory_allocated() == before


def test_a_slot_beyond_the_process_fraction_is_refused(gpu: Accelerator) -> None:
    total = gpu.torch.get_device_properties(0).total_memory
    gpu.torch.set_per_process_memory_fraction(0.1)
    try:
        with pytest.raises(
            castor.OutOfMemoryError, match="torch's CUDA allocator refused"
        ) as raised:
            gpu.castor.DeviceArena(0).empty(total // 5)
        assert (raised.value.tier, raised.value.requested) == ("device", total // 5)
    finally:
        gpu.torch.set_per_process_memory_fraction(1.0)
