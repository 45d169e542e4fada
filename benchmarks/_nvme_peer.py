"""DeepSpeed's NVMe optimizer offload on the CPU: what castor's NVMe tier is measured against.

ZeRO-3 with offload_optimizer on "nvme" (ZeRO-Infinity): master, exp_avg and exp_avg_sq of each
sub-group are files, read and written through libaio with O_DIRECT; gradients are written beside
them in backward and read back in the step. Parameters stay in host memory. It needs libaio-dev and
builds its async_io operator on the first run, half a minute, and its CPU Adam, 3 minutes.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _steps import Model, Report, Step, start_deepspeed


@dataclass(frozen=True, kw_only=True)
class NvmeSettings:
    """What DeepSpeed's documentation lets a user choose, set to what was fastest here."""

    sub_group_size: int = 8_000_000
    """Elements that are read, updated and written at once; rounded up to whole parameters."""
    pipeline: bool = True
    """Read the next sub-group and write the last one beside Adam (pipeline_read and _write)."""
    buffer_count: int = 12
    """Of a sub-group's size each: 3 states and a gradient, of 3 sub-groups at once."""
    block_bytes: int = 1 << 20
    queue_depth: int = 32
    num_threads: int = 1
    """That share each transfer (intra_op_parallelism)."""
    bf16: bool = False
    """Parameters and gradients in bf16; the state is fp32 either way."""

    def config(self, directory: str) -> dict[str, Any]:
        """For start_deepspeed, with the files under a directory."""
        return {
            "bf16": {"enabled": self.bf16},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": self.sub_group_size,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": directory,
                    "pipeline_read": self.pipeline,
                    "pipeline_write": self.pipeline,
                    "buffer_count": self.buffer_count,
                },
            },
            "aio": {
                "block_size": self.block_bytes,
                "queue_depth": self.queue_depth,
                "single_submit": False,
                "overlap_events": True,
                "intra_op_parallelism": self.num_threads,
            },
        }


def make_deepspeed_nvme(
    model: Model, path: str | os.PathLike[str], settings: NvmeSettings | None = None
) -> tuple[Step, Report]:
    """DeepSpeed ZeRO-3 with all optimizer state in files, for a Contender.

    Args:
        model: What is trained; 18 layers are 61M parameters.
        path: A directory on the device. A folder is made in it, and goes when the process ends.
        settings: Of DeepSpeed.

    Returns:
        The step, and a report: "compute_seconds" and "update_seconds", of each step the time of
        forward and backward, in which gradients are written, and of engine.step(), which clips,
        updates, and moves the state; "num_params"; "state_bytes" and "gradient_bytes" in files
        after the last step. A step reads both and writes state_bytes.

    Raises:
        RuntimeError: libaio cannot be used, or no state went to the path.
    """
    settings = settings or NvmeSettings()
    os.environ["DS_ACCELERATOR"] = "cpu"  # before the first import of deepspeed
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise RuntimeError("DeepSpeed's async_io cannot be built: apt-get install libaio-dev")
    folder = tempfile.TemporaryDirectory(prefix="castor-peer-", dir=path)
    engine = start_deepspeed(model, settings.config(folder.name))
    num_params = sum(param.ds_numel for param in engine.module.parameters())
    compute_seconds: list[float] = []
    update_seconds: list[float] = []

    def step(i: int) -> float:
        start = time.perf_counter()
        loss = engine(**model.batch(i)).loss
        engine.backward(loss)
        middle = time.perf_counter()
        engine.step()
        compute_seconds.append(middle - start)
        update_seconds.append(time.perf_counter() - middle)
        return loss.item()

    def report() -> dict[str, Any]:
        files = list(Path(folder.name).rglob("*.swp"))
        gradients = sum(file.stat().st_size for file in files if "_gradient_" in file.name)
        state = sum(file.stat().st_size for file in files) - gradients
        if state < 12 * num_params:
            raise RuntimeError(
                f"{state} bytes of DeepSpeed's state are files; {12 * num_params} should be"
            )
        return {
            "compute_seconds": compute_seconds,
            "update_seconds": update_seconds,
            "num_params": num_params,
            "state_bytes": state,
            "gradient_bytes": gradients,
        }

    return step, report
