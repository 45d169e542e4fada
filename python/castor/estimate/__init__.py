"""Predicts whether a model trains on a machine, how fast, and what would bound it.

Nothing is allocated but shapes: the model of a Hugging Face config runs one step on torch's meta
device, castor's planner plans it, and the simulator runs the plan on the machine's figures.
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
        config: A config.json of a Hugging Face model.
        on: The machine, from `machine`.
        workload: Batch, sequence, precision and the rest. Default: `Workload()`.

    Returns:
        What the step takes, and the largest batch that fits.

    Raises:
        OSError: The config cannot be read.
        ValueError: The config is no model that transformers can build and that runs on the meta
            device.
        ModuleNotFoundError: transformers is not installed.
    """
    return Estimator(Path(config), workload or Workload()).estimate(on)
