"""Predicts whether a model trains on a machine, how fast, and what would bound it.

The model of a Hugging Face config runs one step on torch's meta device, where tensors have shapes
and no memory. castor's planner plans the step, and the simulator runs the plan on the machine's
figures.
"""

from __future__ import annotations

from pathlib import Path

from castor.estimate.estimator import Estimate, Estimator
from castor.estimate.machine import Machine, machine, preset_names
from castor.estimate.workload import Workload

__all__ = ["Estimate", "Estimator", "Machine", "Workload", "estimate", "machine", "preset_names"]


def estimate(config: str | Path, on: Machine, workload: Workload | None = None) -> Estimate:
    """Estimates one training step.

    Args:
        config: Path of a Hugging Face model's config.json.
        on: The machine, from `machine`.
        workload: Batch, sequence length, precision and other options. Default: `Workload()`.

    Returns:
        The memory and time of the step, and the largest batch that fits.

    Raises:
        OSError: The config cannot be read.
        ValueError: transformers cannot build the model, or it cannot run on the meta device.
        ModuleNotFoundError: transformers is not installed.
    """
    return Estimator(Path(config), workload or Workload()).estimate(on)
