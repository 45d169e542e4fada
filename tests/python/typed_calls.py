"""Calls that mypy accepts, and calls that it refuses: an ignore that is not needed is an error."""

from castor import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)


def calls() -> None:
    GeminiPlugin(device_memory="22GiB", precision="bf16", nvme_path=["/mnt/a"], zero_stage=3)
    GeminiPlugin(reduction="backend")
    GeminiPlugin(reduce_on="device")
    GeminiPlugin(reduction="fastest")  # type: ignore[arg-type]
    GeminiPlugin(keep_fp32=["*.gate"], activations={"*": "keep"}, max_norm=1)
    GeminiPlugin(device_memory=1.5)  # type: ignore[arg-type]
    GeminiPlugin(precision="bf17")  # type: ignore[arg-type]
    GeminiPlugin(devise_memory="22GiB")  # type: ignore[call-arg]
    GeminiPlugin("22GiB")  # type: ignore[arg-type, call-arg]
    HybridParallelPlugin("auto", device_memory="22GiB")
    HybridParallelPlugin(tp_size=2, pp_style="zbv", tp_plan={"layers.*": "colwise"})
    HybridParallelPlugin(tp_size="2")  # type: ignore[arg-type]
    HybridParallelPlugin(tensor_size=2)  # type: ignore[call-arg]
    LowLevelZeroPlugin(stage=2, cpu_offload=True, device_memory="22GiB", max_norm=1.0)
    LowLevelZeroPlugin(stage=3)  # type: ignore[arg-type]
    LowLevelZeroPlugin(zero_stage=1)  # type: ignore[call-arg]
    TorchDDPPlugin(precision="bf16", bucket_cap_mb=25)
    TorchDDPPlugin(device_memory="22GiB")  # type: ignore[call-arg]
    TorchFSDPPlugin(reshard_after_forward=True, max_norm="1")  # type: ignore[arg-type]
