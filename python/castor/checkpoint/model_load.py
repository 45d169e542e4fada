"""Reading a model: all is checked first, then each tensor goes straight to its place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from castor.checkpoint import adapters
from castor.checkpoint.agreement import ReadyLoad, contents_of
from castor.checkpoint.container import StoredTensor, read_headers
from castor.checkpoint.manifest import PART_MANIFEST, verify
from castor.checkpoint.model import INDEX, SINGLE_FILE, state_of, weight_files
from castor.checkpoint.parts import adapters_in_whole, own_part, own_targets, whole_shape
from castor.checkpoint.staging import recover
from castor.config.names import LoadedWeights
from castor.errors import CheckpointError
from castor.runtime.boosted_model import compiled_from
from castor.runtime.engine import Engine, being_loaded, engines_holding
from castor.runtime.packed import is_packed
from castor.runtime.peft_model import is_peft_model
from castor.runtime.shards import fill, own_class

Sources = Callable[[], Iterator[tuple[str, torch.Tensor]]]


@dataclass(kw_only=True)
class Comparison:
    """How a checkpoint's keys and shapes differ from a model's."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mis_shaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    """(key, shape in the checkpoint, shape in the model)"""

    note: str = ""
    """Why transformers could not do better; for errors."""

    def check(self, model: nn.Module, *, strict: bool) -> None:
        """Raises CheckpointError in the words of torch's load_state_dict."""
        errors = []
        if strict and self.missing:
            keys = ", ".join(f'"{key}"' for key in self.missing)
            errors.append(f"Missing key(s) in state_dict: {keys}. ")
        if strict and self.unexpected:
            keys = ", ".join(f'"{key}"' for key in self.unexpected)
            errors.append(f"Unexpected key(s) in state_dict: {keys}. ")
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
    """A checked load; `apply` cannot fail for what the checkpoint holds."""

    targets: dict[str, torch.Tensor]
    engines: list[Engine]
    sources: Sources
    incompatible: _IncompatibleKeys

    @torch.no_grad()
    def apply(self, *, with_optimizer: bool = False) -> _IncompatibleKeys:
        """Copies every tensor into the model.

        Args:
            with_optimizer: The optimizer's state is replaced next.
        """
        whole = [engine.session.whole for engine in self.engines]
        loaded = set(self.targets.values())
        for engine in self.engines:
            every_weight = not self.incompatible.missing_keys and loaded.issuperset(engine.params)
            weights: LoadedWeights = "all" if every_weight else "some"
            engine.session.begin_load(weights=weights, states=with_optimizer)
        for key, source in self.sources():
            self._assign(self.targets[key], source)
        for engine in self.engines:
            engine.session.share_homes()
        for engine, before in zip(self.engines, whole, strict=True):
            # Parameters that the checkpoint lacks are still those of a step that failed.
            trained = (p for p, t in zip(engine.params, engine.trained, strict=True) if t)
            if before or (not self.incompatible.missing_keys and loaded.issuperset(trained)):
                engine.session.end_load(weights="some", states=False)
        return self.incompatible

    def _assign(self, target: torch.Tensor, source: torch.Tensor) -> None:
        for engine in self.engines:
            index = engine.index_of.get(target)  # type: ignore[call-overload]
            if index is not None:
                # By the update's own rounding, so that the next one sees no edit.
                engine.session.adopt(index, own_part(engine, target, source).contiguous())
                torch.autograd.graph.increment_version(target)
                return
        fill(target, source)


def prepare_load_model(
    model: nn.Module, directory: Path, *, strict: bool
) -> ReadyLoad[_IncompatibleKeys]:
    """A load of a model's directory, checked; see Booster.load_model.

    Raises:
        CheckpointError: It is damaged or does not fit; the model was not changed.
    """
    recover(directory)
    if (directory / PART_MANIFEST).exists():
        verify(directory, PART_MANIFEST)
    facts = {"the model that is loaded": contents_of(directory, PART_MANIFEST)}
    return ReadyLoad(facts=facts, apply=prepare_model(model, directory, strict=strict).apply)


def prepare_model(model: nn.Module, directory: Path, *, strict: bool) -> ModelLoad:
    """Compares a verified checkpoint with `model`; changes nothing.

    Raises:
        CheckpointError: They do not match, or a file's structure is not sound.
    """
    model = compiled_from(model)
    engines = engines_holding(model)
    with being_loaded(engines):
        targets = state_of(model)
    packed = _beside_packed(model, targets)
    _check_targets(model, targets)
    others: dict[str, tuple[int, tuple[int, ...]]] = {}
    for engine in engines:
        targets, others = own_targets(engine, targets)
    of_peft = is_peft_model(model)
    if of_peft and not any((directory / name).exists() for name in (SINGLE_FILE, INDEX)):
        known = adapters_in_whole(engines)
        stored, targets = adapters.read_adapters(model, directory, targets, known)
        others = {
            adapters.prefix_of(adapter) + key: others[of]
            for adapter, keys in (known or {}).items()
            for key, of in keys.items()
            if of in others
        }
        sources: Sources = partial(adapters.stored_adapters, stored, targets, directory)
    else:
        stored = _check_packed(packed, read_headers(weight_files(directory)), targets)
        sources = _from_files(stored, targets)
    comparison = _compare(stored, targets, engines, others)
    if not of_peft and (comparison.missing or comparison.unexpected) and _can_convert(model):
        try:
            comparison, sources = _through_transformers(model, directory, stored, targets)
        except Exception as error:
            comparison.note = f"\n\t({type(model).__name__}.from_pretrained fails too: {error})"
    comparison.check(model, strict=strict)
    return ModelLoad(
        targets=targets,
        engines=engines,
        sources=sources,
        incompatible=_IncompatibleKeys(comparison.missing, comparison.unexpected),
    )


def _beside_packed(
    model: nn.Module, targets: dict[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    """Takes out of a state dict what quantised layers add: by the key of what they have packed."""
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
    """What is to be read, where the rest, which unpacks it, is what the layers have already.

    A state dict hands out copies of some of that, in which a load would be lost.

    Raises:
        CheckpointError: It is not: the bytes were packed in another way.
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
    """`others`: what ranks with other layers have; every rank finds the same."""
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
            shape, own = stored[key].shape, whole_shape(engines, target)
            if shape != own:
                comparison.mis_shaped.append((key, shape, own))
        elif id(target) not in loaded:  # else it is tied to one that is there
            comparison.missing.append(key)
    comparison.unexpected = [key for key in stored if key not in targets and key not in others]
    return comparison


def _from_files(stored: dict[str, StoredTensor], targets: dict[str, torch.Tensor]) -> Sources:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for path in sorted({entry.path for entry in stored.values()}):
            with safe_open(path, framework="pt") as file:
                for key, entry in stored.items():
                    if entry.path == path and key in targets:
                        yield key, file.get_tensor(key)

    return tensors


def _can_convert(model: nn.Module) -> bool:
    return hasattr(type(model), "from_pretrained") and hasattr(model, "config")


def _through_transformers(
    model: nn.Module,
    directory: Path,
    stored: dict[str, StoredTensor],
    targets: dict[str, torch.Tensor],
) -> tuple[Comparison, Sources]:
    """Lets the model's class read the checkpoint, with its renaming and fusing of keys.

    A second model stands in host memory meanwhile.
    """
    floats = {entry.dtype for entry in stored.values() if entry.dtype.is_floating_point}
    dtype = max(floats, key=lambda kind: torch.finfo(kind).bits, default=torch.float32)
    model_class: Any = own_class(model)
    # It initialises what the checkpoint lacks: the run's random numbers are not for that.
    with torch.random.fork_rng(devices=[]):
        loaded, info = model_class.from_pretrained(
            directory,
            config=copy.deepcopy(model.config),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
            use_safetensors=True,
        )
    wrong = {entry[0] for entry in info["mismatched_keys"]}
    missing = set(info["missing_keys"])
    comparison = Comparison(
        missing=[key for key in targets if key in missing],
        unexpected=sorted(info["unexpected_keys"]),
        mis_shaped=[
            (key, tuple(shape), tuple(own)) for key, shape, own in sorted(info["mismatched_keys"])
        ],
    )
    tensors = loaded.state_dict()

    def sources() -> Iterator[tuple[str, torch.Tensor]]:
        for key in targets:
            if key in tensors and key not in missing and key not in wrong:
                yield key, tensors[key]

    return comparison, sources
