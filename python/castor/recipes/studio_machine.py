"""Measures the machine for `castor estimate`: `python -m castor.recipes.studio_machine`."""

from __future__ import annotations

import statistics
import time


def measured_options() -> list[str]:
    """Returns the options of `castor estimate` that describe this machine.

    Memory is GeminiPlugin's budgets where none are given. Bandwidths are those of `castor doctor`.
    FLOP/s are the median of five matrix products on the device: bf16 on a GPU, fp32 on the CPU.
    """
    import torch

    from castor.doctor import gather
    from castor.plugins import GeminiPlugin

    config, facts = GeminiPlugin().config, gather()
    device = torch.device(config.device)
    gpu = device.type != "cpu"
    link = facts.gpu_h2d_bytes_per_second if gpu else facts.copy_bytes_per_second
    if link is None:
        raise RuntimeError(f"castor doctor measured no link to {device}; run castor doctor")
    size = 4096 if gpu else 1024
    square = torch.ones(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    seconds = []
    for _ in range(6):  # the first one warms up
        start = time.perf_counter()
        product = square @ square
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    flops = 2 * size**3 / statistics.median(seconds[1:])
    options = {
        "--device-memory": f"{config.device_bytes // 2**20}MiB",
        "--host-memory": f"{config.host_bytes // 2**20}MiB",
        "--h2d": f"{link / 1e9:.1f}GB/s",
        "--dram": f"{facts.dram_bytes_per_second / 1e9:.1f}GB/s",
        "--updates": f"{facts.adam_bytes_per_second / 1e9:.1f}GB/s",
        "--flops": f"{flops / 1e12:.3f}T",
        "--precision": "bf16" if gpu else "fp32",
    }
    return [word for pair in options.items() for word in pair]


if __name__ == "__main__":
    print(" ".join(measured_options()))
