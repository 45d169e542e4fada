"""Files of settings and plans, and of the processes of one `castor run`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from castor.errors import UsageError

# --- Settings in a file, by name: what `castor run --config` and castor.Config read and write -----


def read_settings_file(path: Path) -> dict[str, Any]:
    """Names and values from a JSON file, or from a YAML one where its name does not end in .json.

    Raises:
        UsageError: It holds something else, or YAML and there is no pyyaml.
        OSError: It cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        settings = json.loads(text) if path.suffix == ".json" else _from_yaml(text, path)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path} holds a {type(settings).__name__}: give names and values")
    return settings


def write_settings_file(path: Path, settings: Mapping[str, Any]) -> None:
    """Writes what read_settings_file reads.

    Args:
        path: Ends in .json for JSON; YAML otherwise.
        settings: Of numbers, strings, lists and dicts with strings as keys.

    Raises:
        UsageError: One is something else, or YAML is asked for and there is no pyyaml.
        OSError: It cannot be written.
    """
    for name, value in settings.items():
        try:
            kept = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            kept = None
        if kept != value:
            raise UsageError(f"{path} cannot hold {name}={value!r}: files take what JSON does")
    if path.suffix == ".json":
        text = json.dumps(dict(settings), indent=2) + "\n"
    else:
        text = _yaml(path).safe_dump(dict(settings), sort_keys=False)
    path.write_text(text, encoding="utf-8")


def _from_yaml(text: str, path: Path) -> Any:
    yaml = _yaml(path)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is no YAML: {error}") from error


def _yaml(path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise UsageError(
            f"{path}: YAML needs pyyaml; install it, or give a file that ends in .json"
        ) from None
    return yaml


# --- Tells the processes of `castor run` where they leave what the launcher reads at the end ------

DIRECTORY = "CASTOR_RUN_DIRECTORY"
"""Environment variable: a directory of the run, which the launcher removes."""
REPORT = "CASTOR_RUN_REPORT"
"""Environment variable: the file of `castor run --report`."""
BOOSTED = "boosted"
"""Name of a file that is there once a model has been boosted."""
PLAN_USED = "plan-used"
"""Name of a file that is there once a plugin has taken the layout of the plan."""
RECORD = "rank{rank}-{process}.json"
"""Name of the file of a process: what its models did."""


def run_directory() -> Path | None:
    """Returns the directory of the run; None: `castor run` has not started this process."""
    given = os.environ.get(DIRECTORY)
    return None if given is None else Path(given)


def report_file() -> Path | None:
    """Returns the file that `castor run --report` was given, if it was."""
    given = os.environ.get(REPORT)
    return None if given is None else Path(given)


def leave_mark(name: str) -> None:
    """Creates an empty file in the directory of the run, if there is one."""
    directory = run_directory()
    if directory is not None:
        with contextlib.suppress(OSError):  # the launcher is gone, and its directory
            (directory / name).touch()


# --- A plan: which ranks have which shards of a model, as `castor plan` writes it -----------------

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
