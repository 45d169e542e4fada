"""Loads of models: everything is checked first, then each tensor goes straight to its place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from castor.checkpoint import adapters
from castor.checkpoint.container import StoredTensor, pieces, read_headers
from castor.checkpoint.hub_names import (
    PlannedTensor,
    hub_names_of,
    in_names_of_files,
    keys_of_files,
    own_key_mapping,
)
from castor.checkpoint.manifest import PART_MANIFEST, read_hub, verify
from castor.checkpoint.model import INDEX, SINGLE_FILE, kept_keys, state_of, weight_files
from castor.checkpoint.ranks import ReadyLoad, contents_of
from castor.checkpoint.snapshot import (
    full_adapters,
    full_keys,
    full_shape,
    local_shard,
    local_targets,
)
from castor.checkpoint.staging import recover
from castor.config.names import LoadedWeights
from castor.errors import CheckpointError
from castor.lazy import LazyInitContext, give_each
from castor.runtime.boosted_model import compiled_from
from castor.runtime.engine import Engine, being_loaded, engines_holding
from castor.runtime.packed import is_packed
from castor.runtime.peft_model import is_peft_model
from castor.runtime.shards import fill, own_class

Sources = Callable[[Callable[[str, torch.Tensor], None]], None]
"""Function that reads tensors one by one; it calls its argument with (key in the model, tensor)."""


@dataclass(kw_only=True)
class Comparison:
    """The differences between a checkpoint's keys and shapes and a model's."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """Tensors whose shapes differ: (key, shape in the checkpoint, shape in the model)."""

    incomplete: list[str] = field(default_factory=list)
    """Missing keys that form one tensor of the model together with keys that are there."""

    note: str = ""
    """Reason why transformers cannot read the checkpoint either, for errors."""

    def check(self, model: nn.Module, *, strict: bool) -> None:
        """Checks that the checkpoint fits, as torch's load_state_dict does.

        Args:
            model: The model, for messages.
            strict: Whether missing and unexpected keys are errors.

        Raises:
            CheckpointError: The checkpoint does not fit; the message is in torch's words.
        """
        errors = []
        if strict and self.missing:
            keys = ", ".join(f'"{key}"' for key in self.missing)
            errors.append(f"Missing key(s) in state_dict: {keys}. ")
        if strict and self.unexpected:
            keys = ", ".join(f'"{key}"' for key in self.unexpected)
            errors.append(f"Unexpected key(s) in state_dict: {keys}. ")
        if not strict and self.incomplete:
            keys = ", ".join(f'"{key}"' for key in self.incomplete)
            errors.append(
                f"Missing key(s) in state_dict: {keys}, which are one tensor of the model together "
                "with others that are there: give all of them, or none. "
            )
        errors += [
            f"size mismatch for {key}: copying a param with shape {torch.Size(stored)} from "
            f"checkpoint, the shape in current model is {torch.Size(own)}."
            for key, stored, own in self.mis_shaped
        ]
        if errors:
            lines = "\n\t".join(errors)
            raise CheckpointError(
                f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}{self.note}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """A checked load of a model; nothing in the checkpoint can make `apply` fail any more."""

    targets: dict[str, torch.Tensor]
    engines: list[Engine]
    sources: Sources
    incompatible: _IncompatibleKeys

    @torch.no_grad()
    def apply(self, *, with_optimizer: bool = False) -> _IncompatibleKeys:
        """Copies every tensor into the model.

        Args:
            with_optimizer: Whether the optimizer's state is replaced next.

        Returns:
            The missing and unexpected keys.
        """
        whole = [engine.session.consistent for engine in self.engines]
        loaded = set(self.targets.values())
        for engine in self.engines:
            every_weight = not self.incompatible.missing_keys and loaded.issuperset(engine.params)
            weights: LoadedWeights = "all" if every_weight else "some"
            engine.session.begin_load(weights=weights, states=with_optimizer)
        self.sources(lambda key, source: self._assign(self.targets[key], source))
        for engine in self.engines:
            engine.session.share_weights()
        for engine, before in zip(self.engines, whole, strict=True):
            # Parameters that the checkpoint lacks still have the values of a step that failed.
            trained = (p for p, t in zip(engine.params, engine.trained, strict=True) if t)
            if before or (not self.incompatible.missing_keys and loaded.issuperset(trained)):
                engine.session.end_load(weights="some", states=False)
        return self.incompatible

    def _assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for engine in self.engines:
            index = engine.index_of.get(target)  # type: ignore[call-overload]
            if index is not None:
                # Rounded as updates round, so that the next update sees no edit.
                engine.session.adopt(index, local_shard(engine, target, source).contiguous())
                torch.autograd.graph.increment_version(target)
                return
        fill(target, source)


def prepare_load_model(
    model: nn.Module, directory: Path, *, strict: bool
) -> ReadyLoad[_IncompatibleKeys]:
    """Checks a model's directory, and returns the load that applies it; see Booster.load_model.

    Raises:
        CheckpointError: The checkpoint is damaged or does not fit; the model was not changed.
    """
    recover(directory)
    if (directory / PART_MANIFEST).exists():
        verify(directory, PART_MANIFEST)
    facts = {"the model that is loaded": contents_of(directory, PART_MANIFEST)}
    return ReadyLoad(facts=facts, apply=prepare_model(model, directory, strict=strict).apply)


def prepare_model(model: nn.Module, directory: Path, *, strict: bool) -> ModelLoad:
    """Compares a verified checkpoint with `model`; changes nothing.

    Raises:
        CheckpointError: Checkpoint and model do not match, or a file's structure is not sound.
    """
    model = compiled_from(model)
    engines = engines_holding(model)
    with being_loaded(engines):
        targets = state_of(model)
    packed = _beside_packed(model, targets)
    _check_targets(model, targets)
    others: dict[str, tuple[int, tuple[int, ...]]] = {}
    for engine in engines:
        targets, others = local_targets(engine, targets)
    of_peft = is_peft_model(model)
    if of_peft and not any((directory / name).exists() for name in (SINGLE_FILE, INDEX)):
        known = full_adapters(engines)
        stored, targets = adapters.read_adapters(model, directory, targets, known)
        others = {
            adapters.prefix_of(adapter) + key: others[of]
            for adapter, keys in (known or {}).items()
            for key, of in keys.items()
            if of in others
        }
        sources = _one_by_one(partial(adapters.stored_adapters, stored, targets, directory))
        comparison = _compare(stored, targets, engines, others)
    else:
        stored = _check_packed(packed, read_headers(weight_files(directory)), targets)
        comparison, sources = _match(model, directory, stored, targets, engines, others)
    comparison.check(model, strict=strict)
    return ModelLoad(
        targets=targets,
        engines=engines,
        sources=sources,
        incompatible=_IncompatibleKeys(comparison.missing, comparison.unexpected),
    )


def _match(
    model: nn.Module,
    directory: Path,
    stored: dict[str, StoredTensor],
    targets: dict[str, torch.Tensor],
    engines: list[Engine],
    others: dict[str, tuple[int, tuple[int, ...]]],
) -> tuple[Comparison, Sources]:
    """Compares a model's files with the model, and returns the function that reads them.

    Args:
        model: The model.
        directory: Directory of the files.
        stored: Tensors of the files, by name.
        targets: This rank's tensors of the model, by key.
        engines: Engines of the model.
        others: (number, full shape) of the tensors that only other ranks have, by key.

    Raises:
        CheckpointError: The files contradict themselves.
    """
    numbers = {key: number for key, (number, _) in others.items()}
    numbers |= {key: id(tensor) for key, tensor in targets.items()}
    whole = [key for engine in engines for key in full_keys(engine)]
    numbers = {key: numbers[key] for key in dict.fromkeys((*whole, *numbers))}
    comparison = _compare(stored, targets, engines, others)
    sources = _one_by_one(partial(_from_files, stored, targets))
    names = hub_names_of(model)
    plan = None
    if names is not None:
        shapes = {key: shape for key, (_, shape) in others.items()}
        shapes |= {key: full_shape(engines, tensor) for key, tensor in targets.items()}
        shapes = {key: shapes[key] for key in numbers}
        kept = kept_keys(model, numbers)
        plan = names.plan_of_files(shapes, {key: key for key in numbers if key not in kept})
        sealed = (directory / PART_MANIFEST).exists()
        record = read_hub(directory, PART_MANIFEST) if sealed else None
        if not in_names_of_files(stored, plan, numbers, sealed=sealed, record=record):
            plan = None
    differs = bool(comparison.missing or comparison.unexpected)
    convertible = _can_convert(model) and not is_peft_model(model)
    if plan is None and not (differs and convertible):
        _check_ties(stored, {key: key for key in stored}, numbers)
        return comparison, sources
    key_of = keys_of_files(model, stored, numbers)
    _check_ties(stored, key_of, numbers)
    if plan is not None and (found := _incomplete(plan, stored)).incomplete:
        found.unexpected = [name for name, key in key_of.items() if key not in numbers]
        return found, sources
    direct = comparison, sources
    try:
        theirs, sources = _through_transformers(model, directory, stored, targets)
    except Exception as error:
        comparison.note = f"\n\t({type(model).__name__}.from_pretrained fails too: {error})"
        return direct
    return _in_names_of_files(theirs, plan, stored, key_of), sources


def _check_ties(
    stored: dict[str, StoredTensor], key_of: Mapping[str, str], numbers: Mapping[str, int]
) -> None:
    """Checks that a tied tensor has the same values under all its names in the files.

    Args:
        stored: Tensors of the files, by name.
        key_of: Key of the model for each name.
        numbers: Number of the tensor for each key of the model; tied keys have the same number.
    """
    first: dict[int, str] = {}
    for name, entry in stored.items():
        key = key_of.get(name, name)
        if key not in numbers:
            continue
        other = first.setdefault(numbers[key], name)
        if other == name or key_of.get(other, other) == key:
            continue
        if not _same_values(entry, other, stored[other], name):
            files = dict.fromkeys((str(stored[other].path), str(entry.path)))
            raise CheckpointError(
                f"'{other}' and '{name}' of {' and '.join(files)} are one tensor in this model, "
                "which ties them, and differ in the file: delete the wrong one from it, or build "
                "the model with weights that are not tied (tie_word_embeddings=False)"
            )


def _same_values(entry: StoredTensor, other: str, before: StoredTensor, name: str) -> bool:
    with safe_open(entry.path, framework="pt") as file:
        mine = file.get_tensor(name)
    with safe_open(before.path, framework="pt") as file:
        theirs = file.get_tensor(other)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    pairs = zip(pieces(mine), pieces(theirs), strict=True)
    return all(one == another for one, another in pairs)


def _incomplete(plan: Sequence[PlannedTensor], stored: Collection[str]) -> Comparison:
    """Compares the names in the files with a plan, whose groups are read together.

    Missing names are also incomplete where other names of their group are there.
    """
    groups: dict[int, list[str]] = {}
    for entry in plan:
        groups.setdefault(entry.group, []).append(entry.name)
    comparison = Comparison()
    for names in groups.values():
        missing = [name for name in names if name not in stored]
        comparison.missing += missing
        if len(missing) < len(names):
            comparison.incomplete += missing
    return comparison


def _in_names_of_files(
    comparison: Comparison,
    plan: Sequence[PlannedTensor] | None,
    stored: dict[str, StoredTensor],
    key_of: Mapping[str, str],
) -> Comparison:
    """Translates from_pretrained's comparison from the model's keys into names in the files."""
    names: dict[str, list[str]] = {}
    for entry in plan or ():
        for key in entry.sources:
            names.setdefault(key, []).append(entry.name)
    name_of: dict[str, list[str]] = {}
    for name, key in key_of.items():
        name_of.setdefault(key, []).append(name)
    missing: dict[str, None] = {}
    for key in comparison.missing:
        absent = [name for name in names.get(key, ()) if name not in stored]
        missing.update(dict.fromkeys(absent or [key]))
    unexpected: dict[str, None] = {}
    for key in comparison.unexpected:
        unexpected.update(dict.fromkeys(name_of.get(key, [key])))
    mis_shaped = [
        (names[key][0] if len(names.get(key, ())) == 1 else key, shape, own)
        for key, shape, own in comparison.mis_shaped
    ]
    return replace(
        comparison, missing=[*missing], unexpected=sorted(unexpected), mis_shaped=mis_shaped
    )


def _one_by_one(tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Sources:
    def give(take: Callable[[str, torch.Tensor], None]) -> None:
        for key, tensor in tensors():
            take(key, tensor)

    return give


def _beside_packed(
    model: nn.Module, targets: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Removes from `targets` the tensors that quantised layers add beside packed weights.

    Returns:
        The removed tensors, by key of the packed parameter and by their own key.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found: dict[str, dict[str, torch.Tensor]] = {
        key: {}
        for key, tensor in targets.items()
        if isinstance(tensor, nn.Parameter) and is_packed(tensor)
    }
    for key in [key for key, tensor in targets.items() if id(tensor) not in own]:
        for packed, beside in found.items():
            if key.startswith(f"{packed}."):
                beside[key] = targets.pop(key)
                break
    return found


def _check_packed(
    packed: dict[str, dict[str, torch.Tensor]],
    stored: dict[str, StoredTensor],
    targets: dict[str, torch.Tensor],
) -> dict[str, StoredTensor]:
    """Checks that stored packed weights fit the layers' quantisation; returns the tensors to read.

    The stored tensors beside packed weights must equal the layers' own, and are not read. A state
    dict hands out copies of some of them, so that values loaded there would be lost.

    Args:
        packed: See _beside_packed.
        stored: Tensors of the files, by name.
        targets: The model's tensors, by key.
    """
    rest = dict(stored)
    for name, beside in packed.items():
        for key, own in {name: targets[name], **beside}.items():
            entry = stored.get(key)
            differs = entry is None or entry.dtype != own.dtype
            if entry is not None and key != name:
                del rest[key]
                with safe_open(entry.path, framework="pt") as file:
                    differs = not torch.equal(file.get_tensor(key), own.cpu())
            if differs and name in stored:
                raise CheckpointError(
                    f"parameter '{name}' is quantised, and what is stored of it is not, or in "
                    f"another way (see '{key}'), so that this layer would unpack it wrongly: build "
                    "the model with from_pretrained of the checkpoint, before boost"
                )
    return rest


def _check_targets(model: nn.Module, targets: dict[str, torch.Tensor]) -> None:
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for key, tensor in targets.items():
        if id(tensor) not in own:
            raise CheckpointError(
                f"'{key}' of the state dict is neither a parameter nor a buffer of this "
                f"{type(model).__name__} (a hook of the model made it); load such a model with its "
                "own load_state_dict"
            )


def _compare(
    stored: dict[str, StoredTensor],
    targets: dict[str, torch.Tensor],
    engines: list[Engine],
    others: dict[str, tuple[int, tuple[int, ...]]],
) -> Comparison:
    """Compares the stored tensors with those of the full model; the same result on every rank.

    Args:
        stored: Tensors of the files, by key.
        targets: This rank's tensors of the model, by key.
        engines: Engines of the model.
        others: (number, full shape) of the tensors that only other ranks have, by key.
    """
    comparison = Comparison()
    there = {number for key, (number, _) in others.items() if key in stored}
    for key, (number, shape) in others.items():
        if key in stored and stored[key].shape != shape:
            comparison.mis_shaped.append((key, stored[key].shape, shape))
        elif number not in there:
            comparison.missing.append(key)
    loaded = {id(targets[key]) for key in stored if key in targets}
    for key, target in targets.items():
        if key in stored:
            shape, own = stored[key].shape, full_shape(engines, target)
            if shape != own:
                comparison.mis_shaped.append((key, shape, own))
        elif id(target) not in loaded:  # else it is tied to one that is there
            comparison.missing.append(key)
    comparison.unexpected = [key for key in stored if key not in targets and key not in others]
    return comparison


def _from_files(
    stored: dict[str, StoredTensor], targets: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted({entry.path for entry in stored.values()}):
        with safe_open(path, framework="pt") as file:
            for key, entry in stored.items():
                if entry.path == path and key in targets:
                    yield key, file.get_tensor(key)


def _can_convert(model: nn.Module) -> bool:
    return hasattr(type(model), "from_pretrained") and hasattr(model, "config")


def _through_transformers(
    model: nn.Module,
    directory: Path,
    stored: dict[str, StoredTensor],
    targets: dict[str, torch.Tensor],
) -> tuple[Comparison, Sources]:
    """Lets the model's class read the checkpoint, with its renaming and fusing of keys.

    The class makes a lazy model, whose tensors are read one after the other.
    """
    tensors, info = from_files(model, directory, stored)
    if info["missing_keys"] or info["unexpected_keys"]:
        given = own_key_mapping(model)
        if given is not None:
            tensors, info = from_files(model, directory, stored, given)
    wrong = {entry[0] for entry in info["mismatched_keys"]}
    missing = set(info["missing_keys"])
    comparison = Comparison(
        missing=[key for key in targets if key in missing],
        unexpected=sorted(info["unexpected_keys"]),
        mis_shaped=[
            (key, tuple(shape), tuple(own)) for key, shape, own in sorted(info["mismatched_keys"])
        ],
    )
    wanted = {
        key: tensors[key]
        for key in targets
        if key in tensors and key not in missing and key not in wrong
    }

    def sources(take: Callable[[str, torch.Tensor], None]) -> None:
        with torch.random.fork_rng(devices=[]):
            give_each(wanted, take)

    return comparison, sources


def from_files(
    model: Any,
    directory: Path,
    stored: Mapping[str, StoredTensor],
    key_mapping: Mapping[str, str] | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Returns a checkpoint's lazy tensors by key, and the loading info of from_pretrained.

    Args:
        model: A model of transformers, or of a library like it.
        directory: Directory of the files.
        stored: Tensors of the files, by name.
        key_mapping: See from_pretrained.
    """
    floats = {entry.dtype for entry in stored.values() if entry.dtype.is_floating_point}
    dtype = max(floats, key=lambda kind: torch.finfo(kind).bits, default=torch.float32)
    model_class: Any = own_class(model)
    # from_pretrained initialises what the checkpoint lacks, and must not use up the run's random
    # numbers for that.
    with torch.random.fork_rng(devices=[]), LazyInitContext():
        loaded, info = model_class.from_pretrained(
            directory,
            config=copy.deepcopy(model.config),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=key_mapping,
            local_files_only=True,
            use_safetensors=True,
        )
    return loaded.state_dict(keep_vars=True), info
