"""Budgets of a recipe that gives none: what is free on this machine when its run begins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castor.config import parse_bytes
from castor.errors import UsageError
from castor.recipes.recipe import Recipe, load
from castor.recipes.runs import RECIPE

_BUDGETS = ("device_memory", "host_memory")


def with_budgets(recipe: Recipe, run: Path) -> tuple[Recipe, str | None]:
    """Returns a recipe with device_memory and host_memory, and a sentence on the chosen ones.

    A run that goes on keeps the budgets that it began with.

    Args:
        recipe: A resolved recipe.
        run: Folder of its run, which may hold the recipe of a run that was stopped.

    Raises:
        UsageError: The device of the recipe is not there.
    """
    lacking = [name for name in _BUDGETS if name not in recipe.memory]
    if not lacking:
        return recipe, None
    kept = load(run / RECIPE).memory if (run / RECIPE).is_file() else {}
    if set(lacking) <= kept.keys():
        found, why = {name: kept[name] for name in lacking}, "as the run began"
    else:
        chosen, where = _free(recipe.memory, recipe.parallel.nproc or 1)
        # Whole MiB, by which a recipe says them; a budget of less would hold no step.
        found = {name: f"{max(chosen[name] >> 20, 1)}MiB" for name in lacking}
        why = f"chosen from what is free on {where}"
    recipe = recipe.model_copy(update={"memory": {**recipe.memory, **found}})
    said = " and ".join(f"{name} {size}" for name, size in found.items())
    return recipe, f"{said}, {why}"


def _free(memory: Mapping[str, Any], ranks: int) -> tuple[dict[str, int], str]:
    """Returns the budgets of one rank in bytes, and the name of the device."""
    import torch

    if torch.device(memory.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")) == (
        torch.device("cpu")
    ):
        return measured(memory, ranks)
    # Asking a GPU takes memory of it, for as long as the process lives.
    done = subprocess.run(
        [sys.executable, "-m", "castor.recipes.budgets", json.dumps(dict(memory)), str(ranks)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise UsageError(f"the memory of the device cannot be asked for: {last[0]}")
    budgets, where = json.loads(done.stdout)
    return budgets, where


def measured(memory: Mapping[str, Any], ranks: int) -> tuple[dict[str, int], str]:
    """Returns the budgets of one rank, and the name of its device.

    Args:
        memory: GeminiPlugin's arguments.
        ranks: Number of ranks on this machine. GPUs beyond the first are theirs by number; a
            single one is shared.

    Raises:
        UsageError: There is no such device.
    """
    import torch

    from castor.plugins.machine import choose_budgets, choose_device

    given = [memory.get(name) for name in _BUDGETS]
    sizes = [None if one is None else parse_bytes(one, "memory") for one in given]
    device = choose_device(memory.get("device"))
    devices = [device]
    if device.type == "cuda" and ranks > 1 and ":" not in str(memory.get("device")):
        devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())][:ranks]
    found = [choose_budgets(one, *sizes, ranks=ranks) for one in devices]
    device_bytes, host_bytes = (min(one) for one in zip(*found, strict=True))
    if device.type == "cuda" and len(devices) == 1:
        device_bytes = device_bytes // ranks if sizes[0] is None else device_bytes
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(devices[0])
    return dict(zip(_BUDGETS, (device_bytes, host_bytes), strict=True)), name


if __name__ == "__main__":
    print(json.dumps(measured(json.loads(sys.argv[1]), int(sys.argv[2]))))
