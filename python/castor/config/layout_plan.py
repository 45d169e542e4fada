"""A plan: which ranks have which shards of a model, as `castor plan` writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castor.config.run_files import PLAN_USED, leave_mark
from castor.config.settings_file import read_settings_file, write_settings_file
from castor.errors import UsageError

ENVIRONMENT = "CASTOR_PLAN"
"""Environment variable by which `castor run --plan` names the file to the ranks."""
LAYOUT = (
    *("tp_size", "ep_size", "sp_size", "sequence_parallelism_mode", "pp_size", "pp_style"),
    *("num_microbatches", "num_model_chunks", "activations"),
    *("host_memory", "nvme_path", "nvme_memory"),
)
"""Arguments of HybridParallelPlugin that a plan gives."""
_KEYS = {"layout", "nodes", "ranks_per_node", "batch_size", "workload", "predicted"}


def write_plan(path: Path, plan: Mapping[str, Any]) -> None:
    """Writes what read_plan reads.

    Args:
        path: Ends in .json for JSON; YAML otherwise.
        plan: "layout": HybridParallelPlugin's arguments; "nodes" and "ranks_per_node": where they
            are for; "batch_size": samples of a step of each copy of the model; "workload" and
            "predicted": for people.

    Raises:
        UsageError: See write_settings_file.
        OSError: It cannot be written.
    """
    write_settings_file(path, plan)


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a plan; see write_plan.

    Raises:
        UsageError: It is none.
        OSError: It cannot be read.
    """
    plan = read_settings_file(Path(path))
    layout = plan.get("layout")
    if not isinstance(layout, dict) or set(plan) - _KEYS or set(layout) - set(LAYOUT):
        raise UsageError(f"{path} is no plan; `castor plan CONFIG --output {path}` writes one")
    for name in ("nodes", "ranks_per_node"):
        count = plan.get(name)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise UsageError(f"{path}: {name} is {count!r}; give a whole number of 1 or more")
    return plan


def planned_layout(plan: str | os.PathLike[str]) -> dict[str, Any]:
    """HybridParallelPlugin's arguments of a plan.

    Args:
        plan: "auto": the one that `castor run --plan` was given; otherwise a file.

    Raises:
        UsageError: "auto" without such a run, or the file is no plan.
        OSError: It cannot be read.
    """
    if plan == "auto":
        given = os.environ.get(ENVIRONMENT)
        if given is None:
            raise UsageError(
                "HybridParallelPlugin('auto') takes the layout that `castor run --plan FILE` gives "
                "its ranks, and nobody has: `castor plan CONFIG --cluster CLUSTER --output FILE` "
                "writes one. Or give its file instead of 'auto', or sizes"
            )
        plan = given
        leave_mark(PLAN_USED)
    layout: dict[str, Any] = read_plan(plan)["layout"]
    return layout
