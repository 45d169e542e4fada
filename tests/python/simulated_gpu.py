"""A GPU simulated by threads, known to torch as the device "simgpu": tests/simulated_gpu.

install() makes `torch.simgpu`, which has of `torch.cuda` what torch and the tests ask for.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed

import builds

NAME = "simgpu"
BACKEND = "simnccl"
"""Name that torch.distributed knows the device's process groups by; they have NCCL's semantics."""
HASTY = "simnccl_hasty"
"""The same with a fifth of a second to connect in, whatever the timeout."""
ID = "CASTOR_SIMULATED_GPU_ID"
"""Environment variable that names a process's GPU: those of two processes are one by this alone."""
SEEDS = tuple(map(int, os.environ.get("CASTOR_SIMULATED_GPU_SEEDS", "1").split(",")))
"""Of the delays that tests run under."""


@functools.cache
def library() -> Path | None:
    """The newest build; None: there is none."""
    return builds.newest("simulated_gpu", "_simulated_gpu")


def _load(name: str) -> Any:
    path = library()
    assert path is not None
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def load_cuda() -> ModuleType:
    """castor._cuda, compiled for the simulated GPU."""
    module: ModuleType = _load("_cuda")
    return module


@functools.cache
def install() -> None:
    """Adds the device to torch, for the rest of the process.

    Before the first backward: autograd starts its devices' threads then.
    """
    gpu = _load("_simulated_gpu")
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(gpu)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    if distributed.is_available():
        for name, make in ((BACKEND, gpu.make_group), (HASTY, functools.partial(_make_hasty, gpu))):
            distributed.Backend.register_backend(name, make, devices=[NAME])
    atexit.register(gpu.close)


def _make_hasty(gpu: Any, store: Any, rank: int, size: int, _: timedelta) -> Any:
    return gpu.make_group(store, rank, size, timedelta(seconds=0.2))


@functools.cache
def _warm_up() -> None:
    """The first operator imports torch's shape functions, which takes seconds."""
    torch.zeros(1, device=NAME).add(1)


def require() -> Any:
    """torch.simgpu; CASTOR_REQUIRE_SIMULATED_DEVICE=1 makes its absence a failure, not a skip."""
    builds.require("simulated_gpu", "_simulated_gpu")
    install()
    _warm_up()
    return torch.simgpu  # type: ignore[attr-defined]


def rest() -> None:
    """After a test: no delays, no error, and nothing of it left on the device.

    What a failed test held would be on the device, and count there, until another one fails.
    """
    gpu = require().gpu
    gpu.delay(0)
    gpu.reset_error()
    gpu.refuse_tensor(0)
    gpu.refuse_block(0)
    gpu.refuse_pages(0)
    gpu.limit(1.0)
    gpu.limit_registered(2**63)
    if (failed := getattr(sys, "last_traceback", None)) is not None:
        traceback.clear_frames(failed)
        for frame, _ in traceback.walk_tb(failed):
            frame.f_locals.keys()  # brings up to date the dictionary that a report has been made of
    if gpu.memory()["allocated"]:  # cycles, which count in the next test's budget
        gc.collect()


@dataclass(frozen=True)
class Properties:
    total_memory: int
    name: str = "simulated GPU"
    uuid: str = field(
        default_factory=lambda: os.environ.get(ID, f"simulated, of process {os.getpid()}")
    )


class Stream(torch.Stream):
    """As torch.cuda.Stream."""

    def __new__(cls, **kwargs: Any) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, 0), **kwargs)


def event(**kwargs: Any) -> torch.Event:
    """As torch.cuda.Event. No subclass: torch.Event.elapsed_time refuses those."""
    return torch.Event(device=torch.device(NAME, 0), **kwargs)


def _device_module(gpu: Any) -> ModuleType:
    """What torch.cuda is for a GPU."""
    module: Any = ModuleType(f"torch.{NAME}")

    @contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    @contextmanager
    def held() -> Iterator[None]:
        gate = gpu.hold()
        in_time = False
        try:
            yield
        finally:
            in_time = gate.open()
        assert in_time, "the host has waited for a stream that it held"

    @contextmanager
    def device(_: Any) -> Iterator[None]:
        yield

    def figure(name: str) -> Any:
        return lambda device=None: gpu.memory()[name]

    module.gpu = gpu
    module.Stream, module.Event, module.stream, module.device = Stream, event, stream, device
    module.current_stream = lambda device=None: torch.accelerator.current_stream()
    module.set_stream = torch.accelerator.set_stream
    module.synchronize = lambda device=None: gpu.synchronize()
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.is_bf16_supported = lambda: True
    # Random numbers are the CPU's, and torch seeds those by itself.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.memory_allocated = figure("allocated")
    module.max_memory_allocated = figure("peak_allocated")
    module.memory_reserved = figure("reserved")
    module.max_memory_reserved = figure("peak_reserved")
    module.reset_peak_memory_stats = lambda device=None: gpu.reset_peaks()
    module.empty_cache = gpu.empty_cache
    module.mem_get_info = lambda device=None: (
        gpu.memory()["available"],
        gpu.memory()["capacity"],
    )
    module.set_per_process_memory_fraction = lambda fraction, device=None: gpu.limit(fraction)
    module.get_device_properties = lambda device=None: Properties(gpu.memory()["capacity"])
    module._sleep = gpu.sleep
    """Microseconds that the current stream sleeps."""
    module._held = held
    """A context: what the current stream is given, and has not begun, it does after it."""
    return module
