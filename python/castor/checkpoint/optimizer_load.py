"""Loads of optimizer state: matched by parameter name, checked, then put in place."""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.optim import Optimizer

from castor.checkpoint.container import StoredTensor, read_headers
from castor.checkpoint.documents import decode
from castor.checkpoint.manifest import PART_MANIFEST, verify
from castor.checkpoint.optimizer import DESCRIPTION, FORMAT, driver_of, names_of
from castor.checkpoint.ranks import ReadyLoad, contents_of
from castor.checkpoint.snapshot import full_shape, local_shard, remote_names
from castor.checkpoint.staging import recover
from castor.errors import CheckpointError, UsageError
from castor.runtime.rules import MASTER, FusedRule, rule_like
from castor.runtime.shards import fill, own_shard


@dataclass(frozen=True, kw_only=True)
class OptimizerLoad:
    """A checked load of an optimizer; nothing in the checkpoint can make `apply` fail any more."""

    optimizer: Optimizer
    names: dict[torch.Tensor, str]
    stored: dict[str, StoredTensor]
    numbers: dict[str, dict[str, Any]]
    of_no_parameter: dict[Any, Any]
    """Values in `state` that belong to no parameter."""
    groups: list[dict[str, Any]]
    """Options for each of the optimizer's own groups, in its order."""
    loss_scaler: dict[str, float | int] | None
    rounding_seed: int | None
    """Seed of the rounding of moments; None: the saved format does not round."""

    @torch.no_grad()
    def apply(self) -> None:
        """Puts state, options, masters, loss scale and rounding seed in place."""
        driver = driver_of(self.optimizer)
        if driver is not None:
            driver.engine.session.begin_load(weights="none", states=True)
        with ExitStack() as stack:
            files = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in sorted({entry.path for entry in self.stored.values()})
            }
            # Tensors are mapped from the files: nothing is read before it is copied.
            entries: dict[str, dict[str, Any]] = {name: {} for name in self.names.values()}
            params = {name: param for param, name in self.names.items()}
            for key, entry in self.stored.items():
                name, _, field = key.rpartition(".")
                value = files[entry.path].get_tensor(key)
                if driver is not None:
                    value = local_shard(driver.engine, params[name], value)
                value = own_shard(params[name], value)
                entries[name][field] = value
            for name, numbers in self.numbers.items():
                entries[name].update(numbers)
            self._load_masters(entries)
            self._load_state(entries)
        if driver is not None and driver.scaler is not None and self.loss_scaler is not None:
            driver.scaler.load_state_dict(self.loss_scaler)
        if (
            self.rounding_seed is not None
            and getattr(self.optimizer, "rounding_seed", None) is not None
        ):
            self.optimizer.rounding_seed = self.rounding_seed  # type: ignore[attr-defined]
        if driver is not None:
            driver.engine.session.end_load(weights="none", states=True)

    def _load_state(self, entries: dict[str, dict[str, Any]]) -> None:
        driver = driver_of(self.optimizer)
        copies = (driver is not None and driver.fused) or _keeps_masters(self.optimizer)
        positions = {param: i for i, param in enumerate(self.names)}
        state: dict[Any, Any] = {}
        for param, name in self.names.items():
            if entries[name]:
                state[positions[param]] = {
                    # torch's optimizers keep the tensors they are given, so give them copies.
                    key: value.clone() if isinstance(value, torch.Tensor) and not copies else value
                    for key, value in entries[name].items()
                }
        groups = [
            {**options, "params": [positions[param] for param in group["params"]]}
            for options, group in zip(self.groups, self.optimizer.param_groups, strict=True)
        ]
        state |= self.of_no_parameter
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _load_masters(self, entries: dict[str, dict[str, Any]]) -> None:
        """Takes the masters out of `entries` and puts them where this optimizer keeps them."""
        driver = driver_of(self.optimizer)
        rounded = []
        for param, name in self.names.items():
            master = entries[name].pop("master", None)
            if master is None:
                continue
            if driver is not None and driver.engine.session.set_master(
                driver.engine.index_of[param],  # type: ignore[index]
                master,
            ):
                continue
            if param.dtype == torch.float32:
                fill(param, master)  # it is its own master
            elif _keeps_masters(self.optimizer):
                entries[name]["master"] = master
            else:
                rounded.append(name)
        if rounded:
            warnings.warn(
                f"{type(self.optimizer).__name__} keeps no float32 masters: {len(rounded)} "
                f"parameters, the first is '{rounded[0]}', go on from their rounded weights",
                RuntimeWarning,
                stacklevel=5,
            )


def _keeps_masters(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "keeps_masters", False))


def prepare_load_optimizer(
    optimizer: Optimizer, directory: Path, model: nn.Module | None
) -> ReadyLoad[None]:
    """Checks an optimizer's directory, and returns the load of it; see Booster.load_optimizer.

    Raises:
        CheckpointError: The state is damaged or that of another optimizer; nothing was changed.
        UsageError: The parameters have no names (see names_of), or the run is broken and has more
            optimizers than this one.
    """
    driver = driver_of(optimizer)
    if driver is not None and driver.num_optimizers > 1 and not driver.engine.session.consistent:
        raise UsageError(
            f"the run is broken, and the states of {driver.num_optimizers} optimizers with it: "
            "load them together, with booster.load(..., optimizer=[...])"
        )
    recover(directory)
    verify(directory, PART_MANIFEST)
    facts = {"the optimizer's state that is loaded": contents_of(directory, PART_MANIFEST)}
    return ReadyLoad(facts=facts, apply=prepare_optimizer(optimizer, directory, model).apply)


def prepare_optimizer(
    optimizer: Optimizer, directory: Path, model: nn.Module | None
) -> OptimizerLoad:
    """Compares a verified state with `optimizer`; changes nothing.

    Raises:
        CheckpointError: State and optimizer do not match.
        UsageError: See names_of.
    """
    path = directory / DESCRIPTION
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{directory} holds no optimizer state: cannot read {path}: {error.strerror}"
        ) from error
    if document.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {document.get('format')!r}; {FORMAT!r} is read")
    names = names_of(optimizer, model)
    stored = read_headers([directory / name for name in document["files"]])
    numbers = {name: decode(entry) for name, entry in document["state"].items()}
    driver = driver_of(optimizer)
    others = remote_names(driver.engine) if driver else set()
    groups = _match_groups(document["groups"], optimizer, names, others)
    _check_kind(optimizer, document, stored, numbers)
    stored = {key: one for key, one in stored.items() if key.rpartition(".")[0] not in others}
    numbers = {name: entry for name, entry in numbers.items() if name not in others}
    _check_entries(optimizer, names, stored, groups)
    return OptimizerLoad(
        optimizer=optimizer,
        names=names,
        stored=stored,
        numbers=numbers,
        of_no_parameter=decode(document.get("state_of_no_parameter", {})),
        groups=groups,
        loss_scaler=document["loss_scaler"],
        rounding_seed=document.get("rounding_seed"),
    )


def _match_groups(
    saved: list[dict[str, Any]],
    optimizer: Optimizer,
    names: dict[torch.Tensor, str],
    others: set[str],
) -> list[dict[str, Any]]:
    """Returns the options for each of the optimizer's groups, saved ones over its own.

    Args:
        saved: Groups of the checkpoint.
        optimizer: The optimizer to load into.
        names: Names of the optimizer's parameters.
        others: Names of parameters that only other ranks have.
    """
    group_of = {name: i for i, group in enumerate(saved) for name in group["params"]}
    own = others.union(names.values())
    missing = [name for name in (*names.values(), *sorted(others)) if name not in group_of]
    unexpected = [name for name in group_of if name not in own]
    if missing or unexpected:
        raise CheckpointError(
            f"the saved optimizer is over other parameters: it lacks {missing[:5]} "
            f"({len(missing)} in all) and has {unexpected[:5]} ({len(unexpected)}) that this one "
            "does not train; build the optimizer over the same parameters"
        )
    matched = []
    for group in optimizer.param_groups:
        sources = {group_of[names[param]]: names[param] for param in group["params"]}
        if len(sources) > 1:
            (_, first), (_, second), *_ = sources.items()
            raise CheckpointError(
                f"parameters '{first}' and '{second}' were saved in different groups and are in "
                "one now: their options differ; build the groups as they were"
            )
        # Options that the saved groups do not have keep their values.
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for position in sources:
            options |= decode(saved[position]["options"])
        matched.append(options)
    return matched


def _check_kind(
    optimizer: Optimizer,
    saved: dict[str, Any],
    stored: dict[str, StoredTensor],
    numbers: dict[str, dict[str, Any]],
) -> None:
    """Checks that the optimizer can read the saved class's state.

    Optimizers with the same update rule read each other's states. Any other optimizer reads only
    states of its own class.
    """
    if type(optimizer).__name__ == saved["optimizer"]:
        return
    fields = {key.rpartition(".")[2] for key in stored}
    fields |= {field for entry in numbers.values() for field in entry}
    rule = rule_like(optimizer.param_groups)
    options = [decode(group["options"]) for group in saved["groups"]]
    saved_rule = rule_like(options, fields)
    if rule is None or saved_rule is None or rule.classes != saved_rule.classes:
        raise CheckpointError(
            f"the saved state is that of {saved['optimizer']} (entries {sorted(fields)}), the "
            f"optimizer is {type(optimizer).__name__}; load it into its own kind"
        )


def _check_entries(
    optimizer: Optimizer,
    names: dict[torch.Tensor, str],
    stored: dict[str, StoredTensor],
    groups: list[dict[str, Any]],
) -> None:
    """Checks the shapes of saved states, and whether the optimizer's update rule can use them."""
    params = {name: param for param, name in names.items()}
    driver = driver_of(optimizer)
    engines = [] if driver is None else [driver.engine]
    rule = driver.engine.rule if driver is not None and driver.fused else None
    alike = rule or rule_like(optimizer.param_groups)
    of_params = set() if alike is None else alike.known - {"step"}
    fields: dict[str, set[str]] = {}
    for key, entry in stored.items():
        name, _, field = key.rpartition(".")
        if name not in params:
            raise CheckpointError(f"{entry.path} holds '{key}', of a parameter that is in no group")
        shape = full_shape(engines, params[name])
        if field in of_params and entry.shape != shape:
            raise CheckpointError(
                f"size mismatch for the optimizer state '{key}': the checkpoint has "
                f"{entry.shape}, the parameter {shape}"
            )
        fields.setdefault(name, set()).add(field)
    if rule is not None:
        _check_runs_fused(rule, fields, groups)


def _check_runs_fused(
    rule: FusedRule, fields: dict[str, set[str]], groups: list[dict[str, Any]]
) -> None:
    kind = f"the fused {next(iter(rule.classes))}"
    for name, present in fields.items():
        lacking = rule.entries - present
        if present != {MASTER} and lacking:
            raise CheckpointError(
                f"the saved state of '{name}' has no {sorted(lacking)}, which {kind} needs"
            )
    for options in groups:
        for option in rule.without:
            if options.get(option):
                raise CheckpointError(
                    f"the saved optimizer ran with {option}=True, which {kind} does not do; boost "
                    f"an optimizer with {option}=True, it takes the generic path"
                )
    try:
        rule.checked(groups)
    except ValueError as error:
        raise CheckpointError(
            f"the saved optimizer's options are not those of {kind}, as it was boosted: {error}"
        ) from error
